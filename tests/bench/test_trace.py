"""Recorded routing as a workload: padding, bad files, and pools, against NumPy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import CapacityPolicy, ExpertPlacement
from paceline.bench.layer_timing import emulate_layer
from paceline.bench.workload import SHAPES, Shape, build_experts, trace_workload
from paceline.traces import sample, save_trace

TINY = SHAPES["tiny"]
DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def choices(tokens: int, experts: int = 8, k: int = 2, seed: int = 0, layers: int = 1) -> Any:
    """[layers, tokens, k] ids with favourites, and float16 weights."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.ones(experts))
    share = (share + 0.02) / (share + 0.02).sum()
    rows = [rng.choice(experts, k, replace=False, p=share) for _ in range(layers * tokens)]
    ids = np.stack(rows).reshape(layers, tokens, k)
    return ids, rng.random(ids.shape).astype(np.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_recorded_choice_is_what_runs(tmp_path: Path, dtype: str) -> None:
    ids, weights = choices(10, layers=3)
    path = tmp_path / "trace.npz"
    np.savez(path, topk_ids=ids.astype(dtype), topk_weights=weights)
    load = trace_workload(path, TINY, layer=1, tokens=12, offset=3)
    got = load.gate(load.hidden)
    rows = (np.arange(12) + 3) % 10
    assert (got.topk_ids.numpy() == ids[1][rows]).all()
    assert (got.topk_weights.numpy() == weights[1][rows].astype(np.float32)).all()
    assert got.valid is None


def test_a_row_that_wasnt_captured_is_padding(tmp_path: Path) -> None:
    """One expert named k times is what a failed capture looks like: no router does that."""
    ids, weights = choices(10)
    ids[0, 4, 1] = ids[0, 4, 0]
    np.savez(tmp_path / "t.npz", topk_ids=ids, topk_weights=weights)
    load = trace_workload(tmp_path / "t.npz", TINY, 0, 10)
    assert load.gate(load.hidden).valid.tolist() == [token != 4 for token in range(10)]


@pytest.mark.parametrize("name", ["esft_v2lite_law", "gpt_oss_20b_decode"])
def test_traces_of_any_format_are_workloads(tmp_path: Path, name: str) -> None:
    trace = sample(name)
    shape = Shape("s", 8, 8, trace.header.experts, trace.header.k or 0, 4)
    save_trace(trace, tmp_path / "own")
    chunk = next(iter(trace.chunks))
    for path in (Path(f"sample:{name}"), tmp_path / "own"):
        got = (load := trace_workload(path, shape, 2, 50, offset=7)).gate(load.hidden)
        assert (got.topk_ids == chunk.ids[2, 7:57]).all()
        assert (got.topk_weights == chunk.weights[2, 7:57].float()).all()
    with pytest.raises(ValueError, match="layer must be below 6"):
        trace_workload(path, shape, 6, 50)


def bad_files() -> dict[str, tuple[dict[str, Any], str]]:
    ids, weights = choices(6)
    unknown, deep, holes = ids.copy(), ids.copy(), weights.copy()
    unknown[0, 2, 0], deep[0, 2, 0], holes[0, 3, 1] = 8, -2, np.nan
    dense = np.zeros_like(ids)
    return {
        "no ids": ({"ids": ids}, "holds no weights"),
        "pickled": ({"topk_ids": np.array([{}]), "topk_weights": weights}, "expected numbers"),
        "two dimensions": (
            {"topk_ids": ids[0], "topk_weights": weights[0]},
            r"\[layers, tokens, k\]",
        ),
        "no layers": ({"topk_ids": ids[:0], "topk_weights": weights[:0]}, r"\[layers, tokens, k\]"),
        "no tokens": ({"topk_ids": ids[:, :0], "topk_weights": weights[:, :0]}, r"\[1, 0, 2\]"),
        "fewer weights": ({"topk_ids": ids, "topk_weights": weights[:, 1:]}, "of shape"),
        "float ids": (
            {"topk_ids": ids * 1.0, "topk_weights": weights},
            "topk_ids must be integers, got float64",
        ),
        "bool ids": (
            {"topk_ids": ids > 3, "topk_weights": weights},
            "topk_ids must be integers, got bool",
        ),
        "whole weights": ({"topk_ids": ids, "topk_weights": ids}, "are no floats"),
        "complex": ({"topk_ids": ids, "topk_weights": weights * 1j}, "expected numbers"),
        "unknown expert": ({"topk_ids": unknown, "topk_weights": weights}, "expert 8"),
        "huge": (
            {"topk_ids": ids.astype(np.uint64) + 2**63, "topk_weights": weights},
            "expert 9223372036854",
        ),
        "below -1": (
            {"topk_ids": deep, "topk_weights": weights},
            "expert -2: ids must be 0 to 7, or -1",
        ),
        "another k": ({"topk_ids": ids[..., :1], "topk_weights": weights[..., :1]}, "k=1"),
        "dense layer": ({"topk_ids": dense, "topk_weights": weights}, "nothing was captured"),
        "NaN": ({"topk_ids": ids, "topk_weights": holes}, "token 3 has weights"),
        "infinite": ({"topk_ids": ids, "topk_weights": holes * np.inf}, "finite numbers"),
        "padding alone": ({"topk_ids": dense - 1, "topk_weights": weights}, "all of them are -1"),
        "requests": (
            {"topk_ids": ids, "topk_weights": weights, "token_request": np.zeros(5, int)},
            "each of the 6 tokens",
        ),
    }


@pytest.mark.parametrize("case", bad_files())
def test_a_bad_trace_is_one_sentence(tmp_path: Path, case: str) -> None:
    arrays, expected = bad_files()[case]
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=expected) as caught:
        trace_workload(path, TINY, 0, 12)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 broken", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_trace_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"trace\.npz") as caught:
        trace_workload(path, TINY, 0, 12)
    assert len(str(caught.value).splitlines()) == 1
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"\[tokens, layers, k\]"):
        trace_workload(tmp_path / "one.npy", TINY, 0, 12)
    with pytest.raises(ValueError, match="there is no trace"):
        trace_workload(tmp_path / "none.npz", TINY, 0, 12)


def kept_rows(
    ids: Any, device: Any, pool: Any, factor: float, devices: int, experts: int, sizes: Any
) -> tuple[Any, Any, int]:
    """Rows of each device before and after a cap, and assignments: counting alone, no ranking."""
    k = ids.shape[1]
    before, after = np.zeros(devices, int), np.zeros(devices, int)
    for name in set(pool.tolist()):
        rows = ids[(pool == name) & (ids >= 0).any(1)]
        loads = np.bincount(device[rows[rows >= 0]], minlength=devices)
        places = [
            math.ceil(round(factor * 100) * len(rows) * k * n / (100 * experts)) for n in sizes
        ]
        before += loads
        after += np.minimum(loads, places)
    return before, after, int((ids >= 0).sum())


@given(
    seed=st.integers(0, 10**6),
    padding=st.sampled_from([0.0, 0.3, 0.9]),
    holes=st.booleans(),
    pool=st.sampled_from(["batch", "source", "request"]),
    factor=st.sampled_from([0.5, 1.0, 1.25]),
    scattered=st.booleans(),
)
def test_pools_and_padding_are_what_they_say(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    padding: float,
    holes: bool,
    pool: str,
    factor: float,
    scattered: bool,
) -> None:
    rng = np.random.default_rng(seed)
    shape, devices, own = Shape("s", 8, 8, 8, 2, 3), 3, 20
    ids, weights = choices(own * devices, seed=seed)
    ids[:, rng.random(own * devices) < padding] = -1
    if holes:
        ids[:, ::7, 1] = -1
    ids[0, 0] = 3, 4
    weights = np.where(ids < 0, np.nan, weights)
    request = rng.integers(0, 4, own * devices)
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    np.savez(path, topk_ids=ids, topk_weights=weights, token_request=request)
    placement = (
        ExpertPlacement.explicit(rng.integers(0, devices, 8).tolist(), devices)
        if scattered
        else ExpertPlacement.contiguous(8, devices)
    )
    loads = [trace_workload(path, shape, 0, own, offset=own * d) for d in range(devices)]
    policy = CapacityPolicy(capacity_factor=factor, pool=pool, min_expert_load=0)
    found = emulate_layer(
        loads, build_experts(shape, 8), placement, {"none": None, "cap": policy}, rounds=1
    )
    label = {
        "batch": np.zeros(own * devices, int),
        "source": np.arange(own * devices) // own,
        "request": request,
    }[pool]
    device = np.array(placement.expert_to_device)
    before, after, offered = kept_rows(ids[0], device, label, factor, devices, 8, placement.sizes)
    assert found["none"].rows == before.tolist()
    assert found["cap"].rows == after.tolist()
    assert found["none"].dropped == 0
    assert found["cap"].dropped == pytest.approx(1 - after.sum() / offered)
    assert found["none"].gate_mass == 1
    assert 0 <= found["cap"].gate_mass <= 1


def test_a_pool_of_requests_needs_requests(tmp_path: Path) -> None:
    ids, weights = choices(40)
    np.savez(tmp_path / "t.npz", topk_ids=ids, topk_weights=weights)
    loads = [trace_workload(tmp_path / "t.npz", TINY, 0, 10, offset=10 * d) for d in range(4)]
    policies = {"r": CapacityPolicy(capacity_factor=1, pool="request", min_expert_load=0)}
    placement = ExpertPlacement.contiguous(8, 4)
    with pytest.raises(ValueError, match="needs token_request"):
        emulate_layer(loads, build_experts(TINY, 8), placement, policies, 1)


def test_the_verb_keeps_padding_out_of_every_figure(tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from paceline.cli.app import app

    ids, weights = choices(400)
    ids[:, 150:] = -1
    path = tmp_path / "t.npz"
    np.savez(path, topk_ids=ids, topk_weights=weights)
    options = ["--shape", "16,16,8,2,4", "--trace", str(path), "--tokens", "100", "--rounds", "1"]
    caps = ["-p", "capacity_factor=1,pool=batch"]
    done = runner.invoke(app, ["bench", "layer", *options, *caps, "--json"])
    assert done.exit_code == 0, done.output
    before, after = json.loads(done.stdout)["policies"]
    rows = np.bincount(ids[0, :150].flatten() // 2, minlength=4)
    left = np.minimum(rows, 75)
    assert before["loads"] == rows.tolist()
    assert after["loads"] == left.tolist()
    assert before["dropped_share"] == 0
    assert after["dropped_share"] == pytest.approx(1 - left.sum() / 300)
    assert after["peak_to_mean"] == pytest.approx(left.max() / 75)
