"""The cap inside a running vLLM: which bits stay the same, what is dropped, what is computed."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import kernel_rows
import pytest
import torch
from oracle import route_oracle
from served_models import FAMILIES, dtype_of, make
from vllm import SamplingParams
from vllm_engines import (
    DEVICES,
    EXPERTS,
    HOSTED,
    LENGTHS,
    UNBOUND,
    Capped,
    K,
    answers,
    capped_engine,
    environment,
    prompts,
    rows_by_device,
    start,
    stock_answers,
)

from paceline import CapacityPolicy
from paceline.engines.serving.capped_model import OWN_BUDGETS
from paceline.engines.sharing import SharedBudgetWarning
from paceline.engines.vllm.cpu_experts import TrialFailed, try_experts
from paceline.engines.vllm.runners import check_settings, out_of_reach
from paceline.plan import Plan

TOKENS = sum(LENGTHS)
PLACES = ceil(Fraction(TOKENS * K * HOSTED, EXPERTS))  # of a device, with a factor of 1


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Capped:
    """A tiny OLMoE with the cap in it, and its answers before."""
    folder = make("olmoe", tmp_path_factory.mktemp("olmoe"))
    return capped_engine(folder, stock_answers(folder))


NO_CHANGE = [
    None,
    UNBOUND,
    "capacity_factor=1.0,min_expert_load=1000000",
    "mode=observe",
    "capacity_factor=0.5,mode=shadow,min_expert_load=0",
    "capacity_factor=4,min_expert_load=0",
]


@pytest.mark.parametrize("policy", NO_CHANGE)
def test_a_policy_that_drops_nothing_changes_no_bit(olmoe: Capped, policy: str | None) -> None:
    olmoe.set(policy)
    assert answers(olmoe.llm) == olmoe.stock


CAPS = [
    "capacity_factor=1.0,min_expert_load=0",
    "capacity_factor=1.1,min_expert_load=0",
    "capacity_factor=0.5,min_expert_load=0",
    "capacity_factor=1.0,unit=expert,min_expert_load=0",
    "capacity_factor=0.7,keep=weight,renormalize=true,min_expert_load=0",
    "capacity_factor=0.7,keep=first,min_expert_load=0",
    "capacity_factor=0.7,keep=random,seed=3,min_expert_load=0",
    "capacity_factor=1.0,protect_first=4,min_expert_load=0",
    "capacity_factor=1.0,pool=request,min_expert_load=0",
    "capacity_factor=1.0,phase=prefill,min_expert_load=0",
]


@pytest.mark.parametrize("text", CAPS)
def test_the_kernel_computes_what_the_oracle_keeps(olmoe: Capped, text: str) -> None:
    """Each layer's rows of each expert, counted in the kernel, are those of the NumPy oracle."""
    seen: list[tuple[Any, Any]] = []
    policy, layers = CapacityPolicy.parse(text), olmoe.model.layers

    def keep(layer: Any, inputs: Any, assignment: Any) -> None:  # the layer overwrites both
        ids, weights = inputs.topk_ids.clone(), inputs.topk_weights.clone()
        seen.append((layer, replace(inputs, topk_ids=ids, topk_weights=weights)))

    undo = olmoe.model.watch(keep)
    try:
        done = olmoe.prefill(text)
    finally:
        undo()
    assert done["forwards"] == done["capped"] == 1
    assert len(done["calls"]) == len(seen) == len(layers)
    dropped = 0
    for rows, (layer, inputs) in zip(done["calls"], seen, strict=True):
        want = route_oracle(inputs, policy, layer.units)
        assert rows == want.expert_loads_after
        if policy.unit == "device" and policy.pool == "batch" and not policy.protect_first:
            places = ceil(Fraction(str(policy.capacity_factor)) * TOKENS * K * HOSTED / EXPERTS)
            assert max(rows_by_device(rows)) <= places
        dropped += want.dropped
    assert done["dropped"] == dropped == len(layers) * TOKENS * K - sum(map(sum, done["calls"]))
    assert dropped > 0


def test_a_request_pool_knows_no_neighbours(olmoe: Capped) -> None:
    policy = "capacity_factor=0.8,pool=request,min_expert_load=0"
    together = olmoe.prefill(policy)["dropped"]
    before = olmoe.dropped()
    for prompt in prompts():
        answers(olmoe.llm, tokens=1, of=[prompt])
    assert together == olmoe.dropped() - before > 0


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
    """12 requests decode: 24 rows on 8 experts, below a CPU's 8 per expert; a prefill isn't."""
    olmoe.set(f"{factor}max_active=1")
    before = olmoe.dropped()
    kernel_rows.CALLS.clear()
    answers(olmoe.llm, tokens=6)
    layers = len(olmoe.model.layers)
    steps = kernel_rows.CALLS[layers:]
    assert len(steps) == 5 * layers
    for rows in steps:
        assert max(rows_by_device([int(n > 0) for n in rows])) == 1
    if not factor:  # else the prefill drops too
        chosen = len(steps) * len(LENGTHS) * K
        assert olmoe.dropped() - before == chosen - sum(map(sum, steps)) > 0
        assert sum(kernel_rows.CALLS[0]) == TOKENS * K


def test_small_batches_are_left_alone_by_default(olmoe: Capped) -> None:
    few = (5, 4)  # 18 rows on 8 experts: 2.25 per expert, below a CPU's 8
    assert olmoe.prefill("capacity_factor=0.5", few)["dropped"] == 0
    assert olmoe.prefill("capacity_factor=0.5")["dropped"] > 0


def test_shadow_counts_what_enforcing_would_drop(olmoe: Capped) -> None:
    """In the first layer, whose inputs are the same: the later ones see other states."""
    counts = []
    for mode in ("enforce", "shadow"):
        before = olmoe.model.describe()["by_layer"][0]["dropped"]
        done = olmoe.prefill(f"capacity_factor=0.6,min_expert_load=0,mode={mode}")
        counts.append(olmoe.model.describe()["by_layer"][0]["dropped"] - before)
        assert (sum(done["calls"][0]) == TOKENS * K) == (mode == "shadow")
    assert counts[0] == counts[1] > 0


def test_requests_that_share_a_budget_are_warned_of_once(olmoe: Capped) -> None:
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
    ("policy", "reason"),
    [
        ("capacity_factor=0", "capacity_factor must be a number > 0"),
        ("capacity_factor=1,pool=source", "pool=source needs .* data and expert parallelism"),
        (
            "capacity_factor=1,drop_first=image",
            "drop_first=image is not possible: .* serving engine",
        ),
        ("capacity_factor=1,expand=all", "start the server with it"),
        ("capacity_factor=1,compensate=true", "needs a calibration of this model"),
        ("capacity_factor=1,keep=contribution", "keep=contribution needs a calibration"),
        ("max_active=2", "max_active must allow fewer experts than a device hosts"),
        ("max_active=1,pool=request", 'pool must be .* got "request"'),
        ("nonsense", "policy must have the form name=value"),
    ],
)
def test_a_refusal_is_one_sentence_and_changes_nothing(
    olmoe: Capped, policy: str, reason: str
) -> None:
    olmoe.set("capacity_factor=1.5")
    assert re.search(reason, olmoe.llm.collective_rpc("paceline_check", args=(policy,))[0])
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
    worker = olmoe.llm.llm_engine.model_executor.driver_worker.worker
    modules = worker.model_runner.get_model().modules()
    runner = next(m for m in modules if type(m).__name__ == "MoERunner")
    assert out_of_reach(runner) is None
    true = property(lambda self: True)
    for owner, name, value, reason in (
        (type(runner), "is_monolithic", true, "routes by itself"),
        (type(runner), "do_naive_dispatch_combine", true, "naive"),
        (runner, "router", object(), "none of vLLM's"),
        (runner.routed_experts.quant_method.moe_kernel.impl, "fused_experts", None, "no modular"),
        (runner.expert_map_manager, "num_fused_shared_experts", 1, "fused"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert reason in str(out_of_reach(runner))


def test_experts_are_tried_before_they_are_capped(
    olmoe: Capped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running engine's own kernel, and the same one with faults that another may have."""
    (form,) = olmoe.model.kernels.values()
    assert form == "one row per kept slot"
    worker = olmoe.llm.llm_engine.model_executor.driver_worker.worker
    modules = worker.model_runner.get_model().modules()
    routed = next(m for m in modules if type(m).__name__ == "MoERunner").routed_experts
    kernel = routed.quant_method.moe_kernel.fused_experts
    stock = type(kernel).apply.paceline_stock
    try_experts(kernel, routed, K)

    def unweighted(self: Any, **given: Any) -> None:
        if given["topk_ids"].shape[1] == 1:
            given["topk_weights"] = torch.ones_like(given["topk_weights"])
        stock(self, **given)

    def first_rows(self: Any, **given: Any) -> None:
        rows = given["hidden_states"].shape[0] // 2
        cut = {n: given[n][:rows] for n in ("output", "hidden_states", "topk_weights", "topk_ids")}
        stock(self, **{**given, **cut})

    def two_slots(self: Any, **given: Any) -> None:
        if given["topk_ids"].shape[1] < K:
            raise RuntimeError("topk must be 2")
        stock(self, **given)

    for fault, said in (
        (unweighted, "outputs differ by"),
        (first_rows, "some outputs were not written"),
        (two_slots, "RuntimeError: topk must be 2"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(type(kernel).apply, "paceline_stock", fault)
            with pytest.raises(TrialFailed, match=said):
                try_experts(kernel, routed, K)


@pytest.mark.long
def test_dropped_slots_are_computed_only_if_asked_for(tmp_path: Path) -> None:
    folder, policy = make("olmoe", tmp_path), "capacity_factor=1.0,min_expert_load=0"
    kept = capped_engine(folder).prefill(policy)
    with environment(policy=UNBOUND, devices=str(DEVICES), form="weight_zero"):
        capped = Capped(start(folder))
        done = capped.prefill(policy)
        assert set(capped.model.kernels.values()) == {"dropped slots are computed with weight 0"}
        refused = capped.llm.collective_rpc("paceline_check", args=(f"{policy},expand=all",))
    assert "expand=all is not allowed with PACELINE_FORM=weight_zero" in refused[0]
    assert sum(map(sum, done["calls"])) == 2 * TOKENS * K > sum(map(sum, kept["calls"]))
    assert done["dropped"] == capped.model.describe()["dropped_computed"] == kept["dropped"]
    for (a, x), (b, y) in zip(done["answers"], kept["answers"], strict=True):
        assert a == b
        assert x == pytest.approx(y, abs=1e-4)


@pytest.mark.long
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's int8 kernel needs AMX")
def test_int8_experts_compute_the_kept_slots(tmp_path: Path) -> None:
    folder = make("qwen3_moe", tmp_path)
    settings = {"dtype": "bfloat16", "quantization": "experts_int8"}
    stock = answers(start(folder, **settings), tokens=1)
    capped = capped_engine(folder, **settings)
    assert capped.model.kernels == {"CPUExpertsInt8": "one row per kept slot"}
    assert capped.prefill(UNBOUND)["answers"] == stock
    assert capped.prefill("capacity_factor=1.0,min_expert_load=0")["dropped"] > 0


@pytest.mark.long
def test_with_prefix_caching_every_request_has_its_own_budget(tmp_path: Path) -> None:
    """Where the policy names no pool; the answer says so; a policy that only counts keeps it."""
    capped = capped_engine(make("olmoe", tmp_path), enable_prefix_caching=True)
    assert capped.model.describe()["note"] == OWN_BUDGETS  # a cap that can't bind is a cap
    for policy, pool in (
        ("capacity_factor=0.5,min_expert_load=0", "request"),
        ("capacity_factor=0.5,min_expert_load=0,mode=shadow", "batch"),
        ("capacity_factor=0.5,min_expert_load=0,pool=request", "request"),
        ("mode=observe", "batch"),
    ):
        capped.set(policy)
        found = capped.model.describe()
        assert found["fields"]["pool"] == pool
        assert (found["note"] is None) == (pool == "batch" or "pool=request" in policy)
    for policy in ("capacity_factor=0.5,pool=batch", "max_active=1"):
        (refused,) = capped.llm.collective_rpc("paceline_check", args=(policy,))
        assert "pool=batch with prefix caching" in refused


@pytest.mark.long
def test_speculated_tokens_are_capped_with_the_others(tmp_path: Path) -> None:
    """N-gram speculation: answers as without it, exact counts, few experts read for all tokens."""
    folder = make("olmoe", tmp_path)
    asked = [{"prompt_token_ids": prompt["prompt_token_ids"][:12] * 8} for prompt in prompts()[:6]]
    plain = [tokens for tokens, _ in answers(capped_engine(folder).llm, 12, asked)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    capped = capped_engine(folder, speculative_config={**ngram, "prompt_lookup_min": 1})
    for policy in (None, UNBOUND):
        capped.set(policy)
        kernel_rows.CALLS.clear()
        assert [tokens for tokens, _ in answers(capped.llm, 12, asked)] == plain
    # tokens that were speculated ran beside the others in one step
    assert max(map(sum, kernel_rows.CALLS[2:])) > len(asked) * K
    layers = len(capped.model.layers)
    for policy in ("capacity_factor=1.0,min_expert_load=0", "max_active=1"):
        capped.set(policy)
        before = capped.model.describe()
        kernel_rows.CALLS.clear()
        answers(capped.llm, 12, asked)
        after = capped.model.describe()
        dropped, offered = (after[n] - before[n] for n in ("dropped", "assignments"))
        assert 0 < dropped == offered - kernel_rows.rows()
        for rows in kernel_rows.CALLS[layers:]:
            used = rows_by_device([int(n > 0) for n in rows])
            assert policy != "max_active=1" or max(used) == 1


@pytest.mark.long
@pytest.mark.parametrize("draft", ["qwen3", "olmoe"])
def test_a_draft_model_is_left_alone(draft: str, tmp_path: Path) -> None:
    """Answers as without it, and its rows, if it has experts, are neither capped nor counted."""
    folder, asked = make("olmoe", tmp_path / "model"), prompts()[:6]
    plain = [tokens for tokens, _ in answers(capped_engine(folder).llm, 12, asked)]
    config = {"method": "draft_model", "model": make(draft, tmp_path / "draft")}
    capped = capped_engine(folder, speculative_config={**config, "num_speculative_tokens": 3})
    own = len(capped.model.layers)
    assert own == 2
    for policy in (None, UNBOUND):
        capped.set(policy)
        assert [tokens for tokens, _ in answers(capped.llm, 12, asked)] == plain
    for policy in ("capacity_factor=1.0,min_expert_load=0", "max_active=1"):
        capped.set(policy)
        before = capped.model.describe()
        kernel_rows.CALLS.clear()
        answers(capped.llm, 12, asked)
        after = capped.model.describe()
        dropped, offered = (after[n] - before[n] for n in ("dropped", "assignments"))
        assert dropped > 0
        of_draft = kernel_rows.rows() - (offered - dropped)
        # it reads every prompt, and then a token at a time
        assert of_draft == 0 if draft == "qwen3" else of_draft >= own * K * sum(LENGTHS[:6])


@pytest.mark.long
def test_chunks_preemption_and_aborts_leave_counts_exact(tmp_path: Path) -> None:
    """A full server: prompts in chunks beside decode, too little cache, requests that go away."""
    folder = make("olmoe", tmp_path)
    plain = [tokens for tokens, _ in answers(capped_engine(folder).llm, 24)]
    room = {"max_num_batched_tokens": 96, "block_size": 32, "num_gpu_blocks_override": 17}
    capped = capped_engine(folder, **room)
    engine = capped.llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, list[str]()

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = noted
    for policy in (None, UNBOUND):
        capped.set(policy)
        assert [tokens for tokens, _ in answers(capped.llm, 24)] == plain
    assert preempted
    preempted.clear()
    for policy in ("capacity_factor=1.0,min_expert_load=0", "capacity_factor=1,pool=request"):
        capped.set(policy)
        before = capped.model.describe()
        kernel_rows.CALLS.clear()
        sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, sampling)
        engine.step()
        engine.abort_request(["1", "3"])  # one of 97 tokens and one of 200, in their first chunks
        finished = []
        while engine.has_unfinished_requests():
            finished += [out.request_id for out in engine.step() if out.finished]
        after = capped.model.describe()
        dropped, offered = (after[n] - before[n] for n in ("dropped", "assignments"))
        assert 0 < dropped == offered - kernel_rows.rows()
        assert len(finished) == len(LENGTHS) - 2
    assert preempted


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"paceline: .* has no MoE layer"):
        capped_engine(make("qwen3", tmp_path))


def test_a_plan_has_a_policy_for_each_layer(tmp_path: Path) -> None:
    folder = make("qwen2_moe", tmp_path / "model")
    first = CapacityPolicy(capacity_factor=0.5, min_expert_load=0)
    plan = Plan(
        policies=(first, CapacityPolicy(mode="observe")), placements=(2,), layers=2,
        experts=EXPERTS, k=K,
    )  # fmt: skip
    plan.save(tmp_path / "plan.toml")
    with environment(plan=str(tmp_path / "plan.toml")):
        capped = Capped(start(folder))
        calls = capped.prefill("start")["calls"]
        assert sum(calls[0]) == 2 * ceil(Fraction("0.5") * TOKENS * K / 2)
        assert sum(calls[1]) == TOKENS * K
        found = capped.model.describe()
        assert found["policy"] is None
        assert found["enforced"]
        capped.set("mode=observe")
        assert not capped.model.describe()["enforced"]


@pytest.mark.long
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_other_families(family: str, eager: bool, tmp_path: Path) -> None:
    capped = capped_engine(make(family, tmp_path), dtype=dtype_of(family), eager=eager)
    off = capped.prefill(None)
    assert capped.prefill(UNBOUND)["answers"] == off["answers"]
    done = capped.prefill("capacity_factor=1.0,min_expert_load=0")
    assert done["dropped"] > 0
    for rows in done["calls"]:
        assert max(rows_by_device(rows)) <= PLACES
    assert sum(map(sum, off["calls"])) - sum(map(sum, done["calls"])) == done["dropped"]


@pytest.mark.long
def test_compiled_with_extras(tmp_path: Path) -> None:
    """Compiled, with room for extras: without a bound it is stock, and a cap drops and fills."""
    expand = "capacity_factor=1.0,expand=all,expand_limit=2,min_expert_load=0"
    with environment(policy=expand, devices=str(DEVICES)):
        capped = Capped(start(make("mixtral", tmp_path), eager=False))
        off = capped.prefill(None)
        assert sum(off["calls"][0]) == TOKENS * K
        assert capped.prefill(UNBOUND)["answers"] == off["answers"]
        drop = capped.prefill("capacity_factor=1.0,min_expert_load=0")
        fill = capped.prefill("start")
        for dropped, filled in zip(drop["calls"], fill["calls"], strict=True):
            assert max(rows_by_device(filled)) <= PLACES
            assert sum(filled) >= sum(dropped)
        assert sum(map(sum, fill["calls"])) > sum(map(sum, drop["calls"]))
        recompiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        capped.prefill("capacity_factor=0.5,min_expert_load=0")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == recompiled
