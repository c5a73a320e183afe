"""max_active in a model: what decode steps read is counted below every layer, and done by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_models
import torch
from made_up_calibration import made_up
from model_runs import IMPLEMENTATIONS, implementation, model_of, output
from row_counter import RowCounter
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from paceline import CapacityPolicy, ExpertPlacement, attach
from paceline.engines.transformers.layers import layer as attached_layer
from paceline.plan import Plan
from paceline.routing.active import rows_spared

EXPERTS, DEVICES, FEW = tiny_models.NUM_EXPERTS, 4, 32  # FEW: 8 tokens an expert, k = 2
HOST = np.repeat(np.arange(DEVICES), EXPERTS // DEVICES)
KWARGS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model() -> Any:
    found = model_of("mixtral")
    found.generation_config.pad_token_id = 0
    return found


def kept_by_hand(ids: np.ndarray, weights: np.ndarray, valid: np.ndarray, most: int) -> np.ndarray:
    """[tokens, k] bool: on each device the experts with the largest sums of weights."""
    sums = np.full(EXPERTS, -np.inf)
    for t in np.flatnonzero(valid):
        for e, w in zip(ids[t], weights[t], strict=True):
            sums[e] = w if sums[e] == -np.inf else sums[e] + w
    read = np.zeros(EXPERTS, bool)
    for device in range(DEVICES):
        mine = [e for e in range(EXPERTS) if HOST[e] == device and sums[e] > -np.inf]
        read[sorted(mine, key=lambda e: (-sums[e], e))[:most]] = True
    return read[ids] & valid[:, None]


@contextmanager
def narrowed_by_hand(model: nn.Module, most: int) -> Iterator[list[int]]:
    """An untouched model whose experts get weight 0 where the rule drops; yields what it drops."""
    dropped: list[int] = []
    changed = [block.experts for block in model.modules() if "experts" in block._modules]
    for experts in changed:

        def compute(
            hidden: Tensor, ids: Tensor, weights: Tensor, run: Any = experts.forward
        ) -> Tensor:
            if len(ids) >= FEW:
                return run(hidden, ids, weights)
            valid = np.ones(len(ids), bool)
            kept = kept_by_hand(ids.numpy(), weights.double().numpy(), valid, most)
            dropped.append(int((~kept).sum()))
            return run(hidden, ids, torch.where(torch.from_numpy(kept), weights, 0))

        experts.forward = compute
    try:
        yield dropped
    finally:
        for experts in changed:
            del experts.forward


class DecodeCounter:
    """How many experts of each device every forward of few tokens multiplies with."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.active = model, []
        self._run = model.forward

    def __enter__(self) -> DecodeCounter:
        def forward(*args: Any, **kwargs: Any) -> Any:
            counter = RowCounter(self.model)
            with counter:
                out = self._run(*args, **kwargs)
            if kwargs["input_ids"].numel() < FEW:
                for name in counter._counts:
                    read = (counter.rows(name) > 0).numpy()
                    self.active.append(np.bincount(HOST, weights=read).astype(int).tolist())
            return out

        self.model.forward = forward
        return self

    def __exit__(self, *_: Any) -> None:
        del self.model.forward


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_generate_reads_few_experts(model: Any, how: str) -> None:
    """The prompt is too large to be narrowed; every step after it is, in every layer."""
    given = tiny_models.inputs(batch=6, length=8)
    with implementation(model, how):
        with DecodeCounter(model) as free:
            model.generate(**given, **KWARGS)
        with narrowed_by_hand(model, 1) as dropped:
            want = model.generate(**given, **KWARGS)
        with DecodeCounter(model) as counter, attach(model, "max_active=1", DEVICES) as pace:
            got = model.generate(**given, **KWARGS)
            stats = pace.stats().layers
    assert torch.equal(got, want)
    assert max(map(max, free.active)) == 2  # it binds
    assert max(map(max, counter.active)) == 1
    assert sum(s.dropped for s in stats) == sum(dropped) > 0
    steps = KWARGS["max_new_tokens"] - 1
    for i, layer in enumerate(stats):
        assert (layer.forwards, layer.narrowed_forwards) == (steps + 1, steps)
        mine = np.array(counter.active[i :: len(stats)])
        prompt = np.array(layer.active_experts_after) * (steps + 1) - mine.sum(0)
        assert ((prompt > -1e-9) & (prompt < 2 + 1e-9)).all()  # the prompt's one forward
        assert layer.most_active_experts_after <= layer.most_active_experts_before


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_caches_make_no_difference(model: Any, cache: str) -> None:
    given = tiny_models.inputs(batch=6, length=8, pad=3)
    with attach(model, "max_active=1", DEVICES) as pace:
        want = model.generate(**given, **KWARGS)
        first = pace.stats()
        pace.reset_stats()
        got = model.generate(**given, **KWARGS, cache_implementation=cache)
        again = pace.stats()
    assert torch.equal(got, want)
    for layer, other in zip(again.layers, first.layers, strict=True):
        # attention over a longer cache rounds otherwise, and so do gate scores
        assert layer.gate_mass_kept == pytest.approx(other.gate_mass_kept, abs=1e-7)
        assert replace(layer, gate_mass_kept=other.gate_mass_kept) == other
    assert all(layer.narrowed_forwards == 5 for layer in first.layers)


def test_continuous_batching_reads_few_experts() -> None:
    """Its fabricated rows want nothing, and every step of three requests is narrowed."""
    model = tiny_models.build("olmoe")
    asked = [
        tiny_models.inputs(batch=1, length=n, seed=n)["input_ids"][0].tolist() for n in (10, 13, 16)
    ]
    read: list[list[int]] = []

    def watch(_: str, inputs: Any, a: Any) -> None:
        if bool(a.max_active_applies):
            valid = torch.ones(len(a.kept), dtype=torch.bool)
            valid = (valid if inputs.valid is None else inputs.valid).numpy()
            weights = inputs.topk_weights.double().numpy()
            kept = kept_by_hand(inputs.topk_ids.numpy(), weights, valid, 1)
            assert np.array_equal(a.kept.numpy(), kept)
            read.append(a.active_after.tolist())

    with attach(model, "max_active=1", DEVICES) as pace:
        pace.watch(watch)
        model.generate_batch(
            inputs=asked,
            generation_config=GenerationConfig(**KWARGS, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
        )
        stats = pace.stats().layers
    steps = KWARGS["max_new_tokens"] - 1
    assert [s.narrowed_forwards for s in stats] == [steps] * 3
    assert len(read) == 3 * steps
    assert max(map(max, read)) == 1
    assert all(s.dropped for s in stats)


def test_padding_is_no_reason_to_read_an_expert(model: Any) -> None:
    """One row among padding: what the same tokens alone get."""
    alone = tiny_models.inputs(batch=2, length=5)
    padded = {
        "input_ids": torch.nn.functional.pad(alone["input_ids"], (9, 0)),
        "attention_mask": torch.nn.functional.pad(alone["attention_mask"], (9, 0)),
    }
    with attach(model, "max_active=1", DEVICES) as pace:
        want = output(model, alone)
        before = pace.stats()
        pace.reset_stats()
        got = output(model, padded)
        assert [layer.dropped for layer in pace.stats().layers] == [
            layer.dropped for layer in before.layers
        ]
    assert sum(layer.dropped for layer in before.layers) > 0
    torch.testing.assert_close(got[:, 9:], want)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(
    "policy",
    ["max_active=1", pytest.param("max_active=0.5,capacity_factor=1.0", marks=pytest.mark.full)],
)
def test_compiled_with_any_number_of_tokens(policy: str) -> None:
    """One graph as T changes, on either side of the threshold; counts and outputs as eager."""
    model = tiny_models.build("mixtral", num_hidden_layers=1)
    model.set_experts_implementation("grouped_mm")
    batches = [tiny_models.inputs(batch=b, length=n, pad=2) for b, n in ((2, 6), (3, 5), (4, 20))]
    torch._dynamo.reset()
    with attach(model, policy, DEVICES) as pace:
        want = [output(model, given) for given in batches]
        eager = pace.stats()
    with attach(model, policy, DEVICES) as pace:
        compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
        got = [output(compiled, given) for given in batches]
        assert pace.stats() == eager
    torch._dynamo.reset()
    assert eager.layers[0].narrowed_forwards == 2
    assert eager.layers[0].capped_forwards == 2 + ("capacity" in policy)
    for a, b, given in zip(got, want, batches, strict=True):
        real = given["attention_mask"].bool()
        torch.testing.assert_close(a[real], b[real])


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_dropped_assignments_leave_their_stand_ins(model: Any, how: str) -> None:
    given, seen = tiny_models.inputs(batch=3, length=5), {}
    found = made_up(model)
    with implementation(model, how):
        with attach(model, "max_active=1", DEVICES) as pace:
            plain = output(model, given)
            loads = pace.stats()
        with attach(model, "max_active=1,compensate=true", DEVICES, calibration=found) as pace:
            pace.watch(lambda name, inputs, a: seen.update({name: (inputs, a)}))
            blocks = {name: model.get_submodule(name).experts for name in pace.layers}
            caught: dict[str, tuple[Tensor, Tensor]] = {}
            hooks = [
                experts.register_forward_hook(
                    lambda _, args, out, name=name: caught.update({name: (args[0], out)})
                )
                for name, experts in blocks.items()
            ]
            full = output(model, given)
            first = pace.stats().layers[0]
            for hook in hooks:
                hook.remove()
    assert not torch.allclose(plain, full)
    assert first.dropped == loads.layers[0].dropped > 0  # the same choice, and the same loads
    assert first.expert_loads_after == loads.layers[0].expert_loads_after
    name = next(iter(blocks))
    inputs, a = seen[name]
    x, out = caught[name]
    layer = next(one for one in found.layers if one.name == name)
    with torch.no_grad():
        kept = blocks[name](x, inputs.topk_ids, torch.where(a.kept, inputs.topk_weights, 0))
    left = torch.zeros_like(kept)
    for t, j in a.dropped_slots.nonzero().tolist():
        e = int(inputs.topk_ids[t, j])
        inner = layer.down[e].float() @ (x[t] - layer.mean[e].float())
        gives = layer.bias[e].float() + layer.up[e].float() @ inner
        left[t] += inputs.topk_weights[t, j] * gives
    torch.testing.assert_close(out, kept + left, rtol=1e-4, atol=1e-5)


def test_shadow_and_observe_change_nothing(model: Any) -> None:
    given = tiny_models.inputs(batch=3, length=5)
    want = output(model, given)
    with attach(model, "max_active=1", DEVICES) as pace:
        output(model, given)
        enforced = pace.stats().layers[0]
    with attach(model, "max_active=1,mode=shadow", DEVICES) as pace:
        assert torch.equal(output(model, given), want)
        shadowed = pace.stats().layers[0]
        pace.policy, _ = "max_active=1,mode=observe", pace.reset_stats()
        assert torch.equal(output(model, given), want)
        observed = pace.stats().layers[0]
    assert shadowed.dropped == enforced.dropped > 0
    assert shadowed.active_experts_after == enforced.active_experts_after
    assert observed.narrowed_forwards == observed.dropped == 0
    assert observed.active_experts_after == observed.active_experts_before
    assert observed.active_experts_before == shadowed.active_experts_before


def test_a_cap_that_drops_nothing_changes_no_bit(model: Any) -> None:
    """All tokens of one sequence alike: each wants the same two experts, of two devices."""
    given = {"input_ids": torch.full((1, 1), 7), "attention_mask": torch.ones(1, 1).long()}
    want = output(model, given)
    for seed in range(20):
        host = np.random.default_rng(seed).permutation(HOST).tolist()
        with attach(model, "max_active=1", ExpertPlacement.explicit(host)) as pace:
            got = output(model, given)
            if not any(layer.dropped for layer in pace.stats().layers):
                assert torch.equal(got, want)
                return
    pytest.fail("every placement dropped something")


@pytest.mark.parametrize(
    ("batch", "length", "ruled"), [(1, 3, 0), (1, 6, 1), (8, 8, 0)], ids=["few", "more", "many"]
)
def test_where_it_does_not_bind_nothing_is_routed(
    model: Any, batch: int, length: int, ruled: int
) -> None:
    """3 tokens of 2 choices want at most 6 of a device's 8 experts; 64 tokens are too many.

    6 may want more, and whether they do is seen before anything is routed.
    """
    given = {"input_ids": tiny_models.inputs(batch=batch, length=length)["input_ids"]}
    want = output(model, given)
    with (
        patch.object(attached_layer, "assign", wraps=attached_layer.assign) as route,
        attach(model, "max_active=6", 1) as pace,
    ):
        got = output(model, given)
        layers = pace.stats().layers
        assert route.call_count == sum(layer.dropped > 0 for layer in layers)
        assert [layer.narrowed_forwards for layer in layers] == [ruled] * 3
    if not route.call_count:
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "policy",
    ["max_active=3", "capacity_factor=0.5,max_active=3", "max_active=3,mode=shadow"],
)
def test_steps_that_are_not_routed_count_as_if_they_were(model: Any, policy: str) -> None:
    """A watcher has every step routed; nothing else may differ, tokens and statistics."""
    found = []
    for watched in (False, True):
        with attach(model, policy, 1) as pace:
            if watched:
                pace.watch(lambda *_: None)
            outputs = []
            for seed in range(12):
                rng = torch.Generator().manual_seed(seed)
                ids = torch.randint(1, 60, (1, 2 + seed % 5), generator=rng)
                mask = torch.ones_like(ids)
                mask[0, 0] = seed % 3  # 0: padding
                given = {"input_ids": ids, "attention_mask": mask.clamp(max=1)}
                outputs.append(output(model, given))
            found.append((outputs, pace.stats().layers))
    for got, want in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(got, want)
    for quick, routed in zip(found[0][1], found[1][1], strict=True):
        assert 0 < quick.dropped < quick.assignments
        mine, theirs = quick.to_dict(), routed.to_dict()
        assert mine.pop("gate_mass_kept") == pytest.approx(theirs.pop("gate_mass_kept"), abs=1e-9)
        assert mine == theirs


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 2, 0.4, 0.75])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 3, 5), (8,), (7, 0, 2)])
def test_rows_spared_is_what_can_not_bind(sizes: tuple[int, ...], most: float, k: int) -> None:
    """So many tokens never want more than a device may read, and one more can."""
    host = [d for d, n in enumerate(sizes) for _ in range(n)]
    placement = ExpertPlacement.explicit(host, num_devices=len(sizes))
    spared = rows_spared(most, placement, k)
    places = [n if most >= n else (most if most >= 1 else -int(-most * n // 1)) for n in sizes]

    def worst(rows: int) -> bool:
        wanted = [min(n, rows * min(k, n)) for n in sizes]
        return any(w > p for w, p in zip(wanted, places, strict=True))

    if spared < 100:
        assert not worst(spared)
        assert worst(spared + 1)
    else:
        assert not worst(1000)


def test_layers_may_differ_and_a_plan_keeps_it(model: Any, tmp_path: Path) -> None:
    given = tiny_models.inputs(batch=3, length=5)
    policies = (CapacityPolicy(max_active=1), CapacityPolicy(), CapacityPolicy(max_active=0.5))
    Plan(policies, (DEVICES,)).save(tmp_path / "plan.toml")
    with attach(model, plan=Plan.load(tmp_path / "plan.toml")) as pace:
        output(model, given)
        assert pace.policies[0] == policies[0]
        assert pace.policies[2].max_active == 0.5
        assert [s.narrowed_forwards for s in pace.stats().layers] == [1, 0, 1]
        assert all(n <= 1 for n in pace.stats().layers[2].active_experts_after)


@pytest.mark.parametrize(
    ("policy", "placement", "said"),
    [
        ("max_active=1", None, "max_active must allow fewer experts .* got 1: it can never bind"),
        ("max_active=2", DEVICES, "than a device hosts, here 2 of 8 at most, got 2"),
        ("max_active=1,pool=request", DEVICES, 'pool must be .* got "request"'),
        ("max_active=1,compensate=true", DEVICES, "needs a calibration"),
        ("max_active=1,pool=source", DEVICES, "needs to know the device .* token_source"),
    ],
)
def test_what_can_not_be_is_one_sentence(
    model: Any, policy: str, placement: int | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        attach(model, policy, placement)


def test_a_router_of_unknown_scores_can_follow_it() -> None:
    """It goes by the weights alone, so nothing must be known of scores."""
    model = model_of("gpt_oss")
    with attach(model, "max_active=1", DEVICES) as pace:
        output(model, tiny_models.inputs(batch=2, length=4))
        assert all(max(s.active_experts_after) <= 1 for s in pace.stats().layers)


def test_a_cap_that_never_applied_says_why(model: Any) -> None:
    with attach(model, "max_active=1", DEVICES) as pace:
        output(model, tiny_models.inputs(batch=4, length=20))
        with pytest.warns(UserWarning, match="all had 8 tokens per expert"):
            pace.stats()
