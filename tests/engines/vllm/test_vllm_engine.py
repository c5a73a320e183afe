"""The cap inside a running vLLM: what stays the same, what is dropped, what is computed."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import kernel_rows
import pytest
import torch
from oracle import route_oracle
from vllm_engines import (
    DEVICES,
    EXPERTS,
    LENGTHS,
    Capped,
    K,
    answers,
    asked,
    prompts,
    start,
    stock_answers,
)
from vllm_models import FAMILIES, dtype_of, make

from paceline import CapacityPolicy
from paceline.engines.sharing import SharedBudgetWarning
from paceline.engines.vllm.capped_model import check_settings
from paceline.engines.vllm.runners import out_of_reach
from paceline.plan import Plan

TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Capped:
    """A tiny OLMoE with the cap in it, and what it said before."""
    folder = make("olmoe", tmp_path_factory.mktemp("olmoe"))
    stock = stock_answers(folder)
    with asked(policy="capacity_factor=1000", devices=str(DEVICES)):
        return Capped(start(folder), stock, folder)


NO_CHANGE = [
    None,
    "capacity_factor=1000",
    "capacity_factor=1.0,min_expert_load=1000000",
    "mode=observe",
    "capacity_factor=0.5,mode=shadow,min_expert_load=0",
    "capacity_factor=4,min_expert_load=0",
]


@pytest.mark.parametrize("policy", NO_CHANGE)
def test_what_drops_nothing_changes_no_bit(olmoe: Capped, policy: str | None) -> None:
    olmoe.set(policy)
    assert answers(olmoe.llm) == olmoe.stock


CAPS = [
    "capacity_factor=1.0,min_expert_load=0",
    "capacity_factor=0.9,min_expert_load=0",
    "capacity_factor=0.5,min_expert_load=0",
    "capacity_factor=1.0,unit=expert,min_expert_load=0",
    "capacity_factor=0.7,keep=weight,renormalize=true,min_expert_load=0",
    "capacity_factor=0.7,keep=first,min_expert_load=0",
    "capacity_factor=0.7,keep=random,seed=3,min_expert_load=0",
    "capacity_factor=1.0,protect_first=4,min_expert_load=0",
    "capacity_factor=1.0,pool=request,min_expert_load=0",
    "capacity_factor=1.0,phase=prefill,min_expert_load=0",
]


@pytest.mark.parametrize("policy", CAPS)
def test_the_kernel_computes_what_the_oracle_keeps(olmoe: Capped, policy: str) -> None:
    """Each layer's rows of each expert, counted in the kernel, are those of the NumPy oracle."""
    seen: list[tuple[Any, Any]] = []
    layers = olmoe.model.layers
    undo = olmoe.model.watch(lambda layer, inputs, a: seen.append((layer, _copied(inputs))))
    try:
        done = olmoe.prefill(policy)
    finally:
        undo()
    assert done["forwards"] == done["capped"] == 1
    assert len(done["calls"]) == len(seen) == len(layers)
    lost = 0
    for rows, (layer, inputs) in zip(done["calls"], seen, strict=True):
        want = route_oracle(inputs, CapacityPolicy.parse(policy), layer.units)
        assert rows == want.expert_loads_after
        lost += want.dropped
    assert done["dropped"] == lost > 0


def _copied(inputs: Any) -> Any:
    """Inputs as they were: the layer writes to the ids and weights afterwards."""
    import dataclasses

    return dataclasses.replace(
        inputs, topk_ids=inputs.topk_ids.clone(), topk_weights=inputs.topk_weights.clone()
    )


@pytest.mark.parametrize("factor", ["1.0", "1.1", "0.3"])
def test_no_device_computes_more_than_its_capacity(olmoe: Capped, factor: str) -> None:
    done = olmoe.prefill(f"capacity_factor={factor},min_expert_load=0")
    hosted = EXPERTS // DEVICES
    places = ceil(Fraction(factor) * TOKENS * K * hosted / EXPERTS)
    for rows in done["calls"]:
        assert max(_by_device(rows)) <= places
    assert done["dropped"] == len(done["calls"]) * TOKENS * K - sum(map(sum, done["calls"]))


def _by_device(rows: list[int]) -> list[int]:
    hosted = EXPERTS // DEVICES
    return [sum(rows[d * hosted : (d + 1) * hosted]) for d in range(DEVICES)]


def test_a_request_pool_knows_no_neighbours(olmoe: Capped) -> None:
    policy = "capacity_factor=0.8,pool=request,min_expert_load=0"
    together = olmoe.prefill(policy)
    alone = 0
    for prompt in prompts():
        before = olmoe.model.describe()["dropped"]
        answers(olmoe.llm, tokens=1, of=[prompt])
        alone += olmoe.model.describe()["dropped"] - before
    assert together["dropped"] == alone > 0


def test_prefill_phase_leaves_decoding_alone(olmoe: Capped) -> None:
    olmoe.set("capacity_factor=0.5,phase=prefill,min_expert_load=0")
    before = olmoe.model.describe()
    kernel_rows.CALLS.clear()
    answers(olmoe.llm, tokens=6)
    after, layers = olmoe.model.describe(), len(olmoe.model.layers)
    assert after["capped_forwards"] - before["capped_forwards"] == 1
    for rows in kernel_rows.CALLS[layers:]:
        assert sum(rows) == len(LENGTHS) * K
    assert sum(kernel_rows.CALLS[0]) < TOKENS * K


@pytest.mark.parametrize("factor", ["", "capacity_factor=1.25,"])
def test_decode_reads_few_experts_of_each_device(olmoe: Capped, factor: str) -> None:
    """12 requests decode: 24 rows on 8 experts, below the CPU's 8 an expert; a prefill isn't."""
    olmoe.set(f"{factor}max_active=1")
    before = olmoe.model.describe()["dropped"]
    kernel_rows.CALLS.clear()
    answers(olmoe.llm, tokens=6)
    layers, hosted = len(olmoe.model.layers), EXPERTS // DEVICES
    steps = kernel_rows.CALLS[layers:]
    assert len(steps) == 5 * layers
    for rows in steps:
        by_device = [rows[d * hosted : (d + 1) * hosted] for d in range(DEVICES)]
        assert max(sum(n > 0 for n in device) for device in by_device) == 1
    if not factor:  # else the prefill drops too
        asked = len(steps) * len(LENGTHS) * K
        dropped = olmoe.model.describe()["dropped"] - before
        assert dropped == asked - sum(map(sum, steps)) > 0
        assert sum(kernel_rows.CALLS[0]) == TOKENS * K


def test_small_batches_are_left_alone_by_default(olmoe: Capped) -> None:
    few = (5, 4)  # 18 rows on 8 experts: 2.25 an expert, below the CPU's 8
    assert olmoe.prefill("capacity_factor=0.5", few)["dropped"] == 0
    assert olmoe.prefill("capacity_factor=0.5")["dropped"] > 0


def test_shadow_says_what_enforcing_would_drop(olmoe: Capped) -> None:
    """In the first layer, whose inputs are the same: the later ones see other states."""
    policy = "capacity_factor=0.6,min_expert_load=0"
    counts = []
    for mode in ("enforce", "shadow"):
        before = olmoe.model.describe()["by_layer"][0]["dropped"]
        done = olmoe.prefill(f"{policy},mode={mode}")
        counts.append(olmoe.model.describe()["by_layer"][0]["dropped"] - before)
        assert (sum(done["calls"][0]) == TOKENS * K) == (mode == "shadow")
    assert counts[0] == counts[1] > 0


def test_requests_that_share_a_budget_are_told_once(olmoe: Capped) -> None:
    layer = olmoe.model.layers[0]
    layer.warns = True
    with pytest.warns(SharedBudgetWarning, match="12 sequences share one budget"):
        olmoe.prefill("capacity_factor=0.9,min_expert_load=0")
    assert not layer.warns
    layer.warns = True
    olmoe.prefill("capacity_factor=0.9,min_expert_load=0,pool=request")
    assert layer.warns


def test_back_to_the_start(olmoe: Capped) -> None:
    olmoe.set("capacity_factor=0.5,min_expert_load=0")
    assert answers(olmoe.llm) != olmoe.stock
    olmoe.set("start")
    assert str(olmoe.model.layers[0].policy) == "capacity_factor=1000.0"
    assert answers(olmoe.llm) == olmoe.stock


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("capacity_factor=0", "capacity_factor='0' is not allowed"),
        ("capacity_factor=1,pool=source", "data and expert parallelism"),
        ("capacity_factor=1,drop_first=image", "drop_first=image is not possible"),
        ("capacity_factor=1,expand=all", "start the server with it"),
        ("capacity_factor=1,compensate=true", "needs a calibration of this model"),
        ("capacity_factor=1,keep=contribution", "keep=contribution needs a calibration"),
        ("max_active=2", "max_active=2 can never bind"),
        ("max_active=1,pool=request", 'max_active=1 with pool="request"'),
        ("nonsense", "is not of the form name=value"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_changes_nothing(
    olmoe: Capped, policy: str, said: str
) -> None:
    olmoe.set("capacity_factor=1.5")
    assert said in olmoe.reason(policy)
    assert str(olmoe.model.layers[0].policy) == "capacity_factor=1.5"


def test_settings_that_contradict_a_cap(olmoe: Capped, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own configuration of the running engine, with one setting changed at a time."""
    config = olmoe.llm.llm_engine.vllm_config
    shared = [CapacityPolicy(capacity_factor=1.25)]
    check_settings(config, shared, accepted=False)
    with monkeypatch.context() as patch:
        patch.setattr(config.cache_config, "enable_prefix_caching", True)
        with pytest.raises(ValueError, match="pool=batch with prefix caching"):
            check_settings(config, shared, accepted=False)
        check_settings(config, shared, accepted=True)
        check_settings(config, [shared[0].replace(pool="request")], accepted=False)
        check_settings(config, [shared[0].replace(mode="shadow")], accepted=False)
    with monkeypatch.context() as patch:
        patch.setattr(config.aux_output_config, "enable_return_routed_experts", True)
        with pytest.raises(ValueError, match="enable_return_routed_experts"):
            check_settings(config, shared, accepted=True)
    with monkeypatch.context() as patch:
        patch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
        with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT"):
            check_settings(config, shared, accepted=True)
        check_settings(config, [CapacityPolicy(mode="observe")], accepted=True)


def test_layers_out_of_reach(olmoe: Capped, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of the running engine, with one trait changed at a time."""
    runner = next(m for m in _modules(olmoe) if type(m).__name__ == "MoERunner")
    assert out_of_reach(runner) is None
    experts = runner.routed_experts.quant_method.moe_kernel.fused_experts
    for owner, name, value, said in (
        (type(runner), "is_monolithic", property(lambda self: True), "routes by itself"),
        (type(runner), "do_naive_dispatch_combine", property(lambda self: True), "naive"),
        (runner, "router", object(), "none of vLLM's"),
        (experts, "_use_zentorch", True, "can't skip dropped slots"),
        (runner.expert_map_manager, "num_fused_shared_experts", 1, "fused"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert said in str(out_of_reach(runner))


def _modules(capped: Capped) -> Any:
    worker = capped.llm.llm_engine.model_executor.driver_worker.worker
    return worker.model_runner.get_model().modules()


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    folder = make("qwen3", tmp_path)
    with asked(policy="capacity_factor=1.25"), pytest.raises(Exception, match="has no MoE layer"):
        start(folder)


def test_a_plan_gives_each_layer_its_own(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make("qwen2_moe", tmp_path_factory.mktemp("qwen2_moe"))
    plan = Plan(
        policies=(
            CapacityPolicy(capacity_factor=0.5, min_expert_load=0),
            CapacityPolicy(mode="observe"),
        ),
        placements=(2,),
        layers=2,
        experts=EXPERTS,
        k=K,
    )
    plan.save(tmp_path / "plan.toml")
    with asked(plan=str(tmp_path / "plan.toml")):
        capped = Capped(start(folder), None)
        done = capped.prefill("start")
        first, second = done["calls"]
        assert sum(first) == 2 * ceil(Fraction("0.5") * TOKENS * K / 2)
        assert sum(second) == TOKENS * K
        assert capped.model.describe()["policy"] is None


@pytest.mark.long
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_other_families(family: str, eager: bool, tmp_path: Path) -> None:
    folder, dtype = make(family, tmp_path), dtype_of(family)
    settings = {} if eager else {"kv_cache_memory_bytes": None}
    with asked(policy="capacity_factor=1000", devices=str(DEVICES)):
        capped = Capped(start(folder, dtype=dtype, eager=eager, **settings), None)
        off = capped.prefill(None)
        assert capped.prefill("capacity_factor=1000")["said"] == off["said"]
        done = capped.prefill("capacity_factor=1.0,min_expert_load=0")
        places = ceil(Fraction(TOKENS * K * (EXPERTS // DEVICES), EXPERTS))
        assert done["dropped"] > 0
        for rows in done["calls"]:
            assert max(_by_device(rows)) <= places
        assert sum(map(sum, off["calls"])) - sum(map(sum, done["calls"])) == done["dropped"]


@pytest.mark.long
def test_compiled_with_extras(tmp_path: Path) -> None:
    """Compiled, with room for extras: unbinding is stock, and a cap drops and fills."""
    folder = make("mixtral", tmp_path)
    with asked(policy="capacity_factor=1.0,expand=all,expand_limit=2,min_expert_load=0",
               devices=str(DEVICES)):  # fmt: skip
        capped = Capped(start(folder, eager=False, kv_cache_memory_bytes=None), None)
        off = capped.prefill(None)
        assert sum(off["calls"][0]) == TOKENS * K
        assert capped.prefill("capacity_factor=1000")["said"] == off["said"]
        drop = capped.prefill("capacity_factor=1.0,min_expert_load=0")
        fill = capped.prefill("start")
        places = ceil(Fraction(TOKENS * K * (EXPERTS // DEVICES), EXPERTS))
        for dropped, filled in zip(drop["calls"], fill["calls"], strict=True):
            assert max(_by_device(filled)) <= places
            assert sum(filled) >= sum(dropped)
        assert sum(map(sum, fill["calls"])) > sum(map(sum, drop["calls"]))
        recompiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        capped.prefill("capacity_factor=0.5,min_expert_load=0")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == recompiled
