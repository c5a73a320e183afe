"""Figures of a trace against loops anybody can check, and against the published ones."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_traces import count_trace, traces
from strategies import placements

from paceline import ExpertPlacement
from paceline.traces import ImportOptions, Trace, open_trace, sample
from paceline.traces.format import MODALITIES, PHASES, UNKNOWN
from paceline.traces.loads import trace_loads
from paceline.traces.trace import repeats, without

HERE = Path(__file__).with_name("samples")


def loads_of(trace: Trace) -> tuple[np.ndarray, dict[tuple[str, str], np.ndarray]]:
    """[batches, layers, experts] counts, and the same by phase and modality, by loops."""
    layers, experts = len(trace.header.layers), trace.header.experts
    batches: list[np.ndarray] = []
    total = sum(chunk.batches for chunk in trace.chunks)
    groups: dict[tuple[str, str], np.ndarray] = {}
    for chunk in trace.chunks:
        starts = chunk.starts.tolist()
        for batch in range(len(starts) - 1):
            table = np.zeros((layers, experts), dtype=int)
            for layer in range(layers):
                for token in range(starts[batch], starts[batch + 1]):
                    valid = chunk.fact("valid", layer)
                    if valid is not None and not valid[token]:
                        continue
                    names = []
                    for fact, known in (("phase", PHASES), ("modality", MODALITIES)):
                        codes = chunk.fact(fact, layer)
                        code = UNKNOWN if codes is None else int(codes[token])
                        names.append("unknown" if code == UNKNOWN else known[code])
                    key = (names[0], names[1])
                    groups.setdefault(key, np.zeros((total, layers, experts), dtype=int))
                    for expert in chunk.ids[layer, token].tolist():
                        if 0 <= expert < experts:
                            table[layer, expert] += 1
                            groups[key][len(batches), layer, expert] += 1
            batches.append(table)
    return np.array(batches), groups


@given(trace=traces(), data=st.data())
def test_figures_are_those_of_the_loops(trace: Trace, data: Any) -> None:
    placement = data.draw(placements(trace.header.experts, optional=False))
    hosts, P, E = placement.expert_to_device, placement.num_devices, trace.header.experts
    counts, groups = loads_of(trace)
    if not counts.sum():
        with pytest.raises(ValueError, match="no assignment"):
            trace_loads(trace, [placement])
        return
    got = trace_loads(trace, [placement]).to_dict()
    devices = np.zeros((*counts.shape[:2], P))
    for expert in range(E):
        devices[:, :, hosts[expert]] += counts[:, :, expert]
    means = counts.sum(2) / P
    close = {"rel_tol": 1e-9}
    overall = got["overall"]
    assert math.isclose(overall["device_peak_to_mean"], devices.max(2).sum() / means.sum(), **close)
    assert math.isclose(
        overall["expert_peak_to_mean"], counts.max(2).sum() / (counts.sum() / E), **close
    )
    assert math.isclose(overall["straggler_loss"], 1 - means.sum() / devices.max(2).sum(), **close)
    assert math.isclose(overall["balancedness_sum"], means.sum() / devices.max(2).sum(), **close)
    busy = means > 0
    assert math.isclose(
        overall["balancedness_mean"], (means[busy] / devices.max(2)[busy]).mean(), **close
    )
    best = sum(math.ceil(total / P) for total in counts.sum(2).ravel())
    assert math.isclose(overall["best_possible"], best / means.sum(), **close)
    assert math.isclose(overall["perfect_balance_speedup"], devices.max(2).sum() / best, **close)
    assert got["batches"] == len(counts)
    used = [(counts[:, :, [e for e in range(E) if hosts[e] == d]] > 0).sum(2) for d in range(P)]
    read = np.array(used).max(0)
    assert math.isclose(overall["most_active_experts"], read[busy].mean(), **close)
    for layer, figures in enumerate(got["layers"]):
        own, on_device = counts[:, layer], devices[:, layer]
        assert figures["expert_loads"] == own.sum(0).tolist()
        assert figures["device_loads"] == on_device.sum(0).tolist()
        assert figures["assignments"] == own.sum()
        if not own.sum():
            continue
        total, some = own.sum(1), own.sum(1) > 0
        ratios = on_device.max(1)[some] / (total[some] / P)
        spread = figures["device_peak_to_mean"]
        assert math.isclose(spread["mean"], on_device.max(1).sum() / (total.sum() / P), **close)
        assert math.isclose(spread["p50"], float(np.percentile(ratios, 50)), **close)
        assert math.isclose(spread["p95"], float(np.percentile(ratios, 95)), **close)
        assert math.isclose(spread["max"], ratios.max(), **close)
        active = [(row > 0).sum() for row in own[some]]
        assert figures["active_experts"]["min"] == min(active)
        assert figures["active_experts"]["max"] == max(active)
        assert math.isclose(figures["active_experts"]["mean"], np.mean(active), **close)
        assert math.isclose(figures["most_active_experts"], read[some, layer].mean(), **close)
        pooled = on_device.sum(0).max() / (total.sum() / P)
        assert math.isclose(figures["pooled_device_peak_to_mean"], pooled, **close)
    found = {(g["phase"], g["modality"]): g for g in got["groups"]}
    assert found.keys() == groups.keys()
    for key, table in groups.items():
        own = found[key]
        assert own["assignments"] == table.sum()
        on_device = np.zeros((*table.shape[:2], P))
        for expert in range(E):
            on_device[:, :, hosts[expert]] += table[:, :, expert]
        if table.sum():
            ratio = on_device.max(2).sum() / (table.sum() / P)
            assert math.isclose(own["device_peak_to_mean"], ratio, **close)
            pooled = on_device.sum(0).max(1).sum() / (table.sum() / P)
            assert math.isclose(own["pooled_device_peak_to_mean"], pooled, **close)


def expected() -> list[tuple[Path, dict[str, Any]]]:
    said = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    return [
        (HERE / name.replace("{0,1}", "0"), entry)
        for name, entry in said.items()
        if "expert_peak_to_mean" in entry
    ]


@pytest.mark.parametrize(("path", "said"), expected(), ids=[p.name for p, _ in expected()])
def test_pooled_figures_of_every_format(path: Path, said: dict[str, Any]) -> None:
    trace = open_trace(path, ImportOptions(experts=64, k=said.get("k"), layers=5))
    for layer, figures in enumerate(trace_loads(trace, 8).to_dict()["layers"]):
        for name in ("expert", "device"):
            key = "expert_peak_to_mean" if name == "expert" else "device_peak_to_mean_8_contiguous"
            assert round(figures[f"pooled_{name}_peak_to_mean"], 4) == said[key][layer]


def test_groups_of_counts_are_kept_apart() -> None:
    trace = count_trace()
    chunk = next(iter(trace.chunks))
    got = trace_loads(trace, 2).to_dict()
    found = {(g["phase"], g["modality"]): g for g in got["groups"]}
    for index, key in enumerate([("prefill", "text"), ("decode", "unknown")]):
        assert found[key]["assignments"] == int(chunk.counts[:, :, index].sum())
        assert found[key]["tokens"] == int(chunk.rows[:, :, index].sum(0).max())
    assert got["tokens"] == int(chunk.rows.sum((0, 2)).max())


def test_layers_of_other_numbers_of_experts() -> None:
    """Two layers, of 4 and of 2 experts, each on 2 devices."""
    one = count_trace(batches=1, layers=2, experts=4, k=1)
    counts = torch.tensor([[[[4, 0, 0, 4]], [[3, 1, 0, 0]]]])
    chunk = dataclasses.replace(
        next(iter(one.chunks)), counts=counts, rows=None,
        group_codes=torch.tensor([[0, 0]], dtype=torch.uint8),
    )  # fmt: skip
    small = one.header.layers[1].model_copy(update={"experts": 2})
    header = one.header.model_copy(update={"layers": (one.header.layers[0], small)})
    got = trace_loads(Trace(header, (chunk,)), 2).to_dict()
    assert [layer["device_loads"] for layer in got["layers"]] == [[4, 4], [3, 1]]
    assert [layer["pooled_expert_peak_to_mean"] for layer in got["layers"]] == [2.0, 1.5]
    assert got["overall"]["device_peak_to_mean"] == (4 + 3) / (4 + 2)


def test_shares_have_balance_and_no_totals(tmp_path: Path) -> None:
    table = {"token_scores": {"1": {"0": 0.5, "3": 0.5}, "2": {"1": 0.25, "2": 0.75}}}
    (tmp_path / "it.json").write_text(json.dumps(table))
    got = trace_loads(open_trace(tmp_path / "it.json", ImportOptions(experts=4)), 2).to_dict()
    assert got["tokens"] is None
    assert [layer["assignments"] for layer in got["layers"]] == [None, None]
    assert [layer["pooled_expert_peak_to_mean"] for layer in got["layers"]] == [2.0, 3.0]
    assert got["overall"]["device_peak_to_mean"] == (1.0 + 1.5) / 2
    assert "best_possible" not in got["overall"]


def test_devices_that_dont_fit_are_refused() -> None:
    trace = sample("gpt_oss_20b_decode")
    for devices in (
        33,
        [ExpertPlacement.contiguous(64, 8)],
        [ExpertPlacement.contiguous(32, 8)] * 2,
    ):
        with pytest.raises(ValueError, match=r"placement|devices"):
            trace_loads(trace, devices)


# -- rows that repeat -----------------------------------------------------------------------------


@given(trace=traces())
def test_repeats_are_those_that_comparing_all_rows_finds(trace: Trace) -> None:
    rows, live = [], []
    for chunk in trace.chunks:
        for token in range(chunk.tokens):
            rows.append(tuple(chunk.ids[:, token].flatten().tolist()))
            valid = True
            if chunk.valid is not None:
                valid = bool(chunk.valid[..., token].any())
            live.append(valid)
    seen: list[Any] = []
    repeated = []
    for row, valid in zip(rows, live, strict=True):
        repeated.append(valid and row in seen)
        if valid:
            seen.append(row)
    found = repeats(trace)
    assert found.tokens == sum(live)
    assert found.is_repeated.tolist() == repeated
    assert found.repeated == sum(repeated)
    assert found.commonest == max((seen.count(row) for row in seen), default=0)
    commonest = [row for row, is_it in zip(rows, found.is_commonest, strict=True) if is_it]
    assert len(commonest) == found.commonest
    assert len(set(commonest)) <= 1


def test_a_dummy_row_is_seen_and_figures_come_with_and_without(tmp_path: Path) -> None:
    """Rows as engines make them up: half of the log is one row."""
    trace = sample("esft_v2lite_law")
    chunk = next(iter(trace.chunks))
    ids = chunk.ids.clone()
    ids[:, 1::2] = ids[:, :1]
    padded = Trace(trace.header, (dataclasses.replace(chunk, ids=ids),))
    got = trace_loads(padded, 8, batch_tokens=1024).to_dict()
    assert got["rows"]["tokens"] == 4096
    assert 0.5 < got["rows"]["commonest_share"] < 0.51
    assert got["overall"]["device_peak_to_mean"] > 1.5
    real = Trace(trace.header, (chunk.take(torch.arange(2, 4096, 2), torch.tensor([0, 2047])),))
    alone = trace_loads(real, 8, batch_tokens=1024).overall.device_peak_to_mean
    without_it = got["rows"]["without_commonest"]["device_peak_to_mean"]
    assert math.isclose(without_it, alone, rel_tol=0.01)
    found = repeats(padded)
    rest = without(padded, "commonest", found)
    assert repeats(rest).tokens == found.tokens - found.commonest
