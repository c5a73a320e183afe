"""The Transformers engine on the first eight architectures: caps hold, nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from model_runs import (
    IMPLEMENTATIONS,
    capacity,
    choices,
    counted,
    fingerprint,
    implementation,
    loads,
    model_of,
    output,
)
from torch import Tensor

from paceline import CapacityPolicy, ExpertPlacement, attach

EIGHT = tiny_models.FIRST_EIGHT
eight = pytest.mark.parametrize("name", EIGHT)


@pytest.fixture(autouse=True)
def _restored(request: pytest.FixtureRequest) -> Any:
    """Whatever a test does, the model is afterwards as it was before."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name is None:
        yield
        return
    before = fingerprint(model_of(name))
    yield
    assert fingerprint(model_of(name)) == before


@eight
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_without_a_cap_forward_and_generate_are_bit_identical(name: str, how: str) -> None:
    model, given = model_of(name), tiny_models.inputs(pad=5)
    kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    kwargs |= {"output_logits": True, "return_dict_in_generate": True}
    with implementation(model, how):
        want, generated = output(model, given), model.generate(**given, **kwargs)
        for policy in (None, "min_expert_load=0", "capacity_factor=1,mode=observe"):
            with attach(model, policy) as pace:
                assert torch.equal(output(model, given), want)
                again = model.generate(**given, **kwargs)
                assert torch.equal(again.sequences, generated.sequences)
                assert all(map(torch.equal, again.logits, generated.logits))
                stats = pace.stats().layers
            tokens = int(given["attention_mask"].sum())
            # the forward, the prompt of generate and its 3 further steps of 2 sequences
            assert [s.tokens for s in stats] == [2 * tokens + 3 * 2] * len(stats)
            assert all(s.dropped == 0 and s.forwards == 5 for s in stats)
        assert torch.equal(output(model, given), want)


@eight
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_cap_of_devices_holds_and_dropped_slots_are_not_computed(name: str, how: str) -> None:
    model, given = model_of(name), tiny_models.inputs(pad=5)
    valid = given["attention_mask"].flatten().bool()
    tokens, experts = int(valid.sum()), tiny_models.NUM_EXPERTS
    untouched = choices(model, given)
    policy = CapacityPolicy(capacity_factor=0.9, unit="device", min_expert_load=0)
    placement = ExpertPlacement.contiguous(experts, 3)
    units = torch.tensor(placement.expert_to_device)
    sizes = torch.bincount(units)
    with implementation(model, how), attach(model, policy, placement) as pace:
        counter, out = counted(model, given)
        stats = {s.name + ".experts": s for s in pace.stats().layers}
    assert out.isfinite().all()
    assert list(stats) == list(untouched)
    for i, (layer, (ids, _)) in enumerate(untouched.items()):
        k = ids.shape[1]
        cap = torch.tensor([capacity("0.9", tokens, k, int(n), experts) for n in sizes])
        rows = counter.rows(layer)
        per_unit = torch.zeros_like(sizes).index_add(0, units, rows)
        assert (per_unit <= cap).all()
        assert rows.tolist() == stats[layer].expert_loads_after
        if i == 0:  # nothing upstream has changed, so this is exact
            before = loads(ids, valid, experts)
            unit_loads = torch.zeros_like(sizes).index_add(0, units, before)
            assert torch.equal(per_unit, torch.minimum(unit_loads, cap))
            assert stats[layer].expert_loads_before == before.tolist()
            assert stats[layer].dropped == int((unit_loads - per_unit).sum()) > 0


@eight
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_nowhere_and_changes_no_real_token(name: str, side: str) -> None:
    model = model_of(name)
    plain = tiny_models.inputs(batch=1, length=24)
    ids = plain["input_ids"]
    filler = torch.zeros((1, 7), dtype=ids.dtype)
    parts, ones = ([filler, ids], [0, 1]) if side == "left" else ([ids, filler], [1, 0])
    mask = torch.cat([torch.full_like(p, on) for p, on in zip(parts, ones, strict=True)], 1)
    padded = {"input_ids": torch.cat(parts, 1), "attention_mask": mask}
    padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    policy = CapacityPolicy(capacity_factor=1, unit="expert", min_expert_load=0)
    with attach(model, policy) as pace:
        want = output(model, plain)
        alone = pace.stats().to_dict()["layers"]
        pace.reset_stats()
        got = output(model, padded)[mask.bool()]
        together = pace.stats().to_dict()["layers"]
    assert alone[0]["dropped"] > 0
    for a, b in zip(alone, together, strict=True):
        assert a["tokens"] == b["tokens"] == 24
        assert a["expert_loads_before"] == b["expert_loads_before"]
        assert a["expert_loads_after"] == b["expert_loads_after"]
    torch.testing.assert_close(got, want[0], rtol=1e-3, atol=1e-3)


@eight
def test_shadow_changes_nothing_and_counts_what_enforce_drops(name: str) -> None:
    model, given = model_of(name), tiny_models.inputs(pad=5)
    want = output(model, given)
    policy = CapacityPolicy(capacity_factor=1, min_expert_load=0, mode="shadow")
    with attach(model, policy, 4) as pace:
        assert torch.equal(output(model, given), want)
        shadow = pace.stats().layers[0]
        pace.policy = policy.replace(mode="enforce")
        pace.reset_stats()
        assert not torch.equal(output(model, given), want)
        enforced = pace.stats().layers[0]
    assert shadow == enforced
    assert shadow.dropped > 0


@eight
def test_extras_get_the_weight_that_the_model_would_give_them(name: str) -> None:
    """Oracle: the model's own router, told to choose all experts."""
    model, given = model_of(name), tiny_models.inputs(pad=5)
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    first = next(n for n, _ in model.named_modules() if n.endswith("experts"))
    experts, router = model.get_submodule(first), _routers(model)[0]
    entered: list[Tensor] = []
    hook = router.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    original = experts.forward

    def spy(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen["last"] = (hidden, ids, weights)
        return original(hidden, ids, weights)

    experts.__dict__["forward"] = spy
    try:
        with attach(model, "capacity_factor=1,expand=all,expand_limit=2,min_expert_load=0") as pace:
            output(model, given)
            stats = pace.stats().layers[0]
        hidden, ids, weights = seen["last"]  # kept pairs, one expert a row
    finally:
        del experts.__dict__["forward"]
        hook.remove()
    k, router.top_k = router.top_k, tiny_models.NUM_EXPERTS
    try:
        with torch.no_grad():
            all_weights, all_ids = _choice(router(entered[-1]))
            router.top_k = k
            own_weights, own_ids = _choice(router(entered[-1]))
    finally:
        router.top_k = k
    # what the model would weigh every expert, on the scale of each token's own choice
    every = torch.zeros_like(all_weights).scatter(1, all_ids, all_weights)
    scale = own_weights.sum(1) / every.gather(1, own_ids).sum(1)
    every = every * scale.unsqueeze(1)
    flat = entered[-1].reshape(-1, entered[-1].shape[-1])
    token = (hidden[:, None] == flat[None]).all(-1).long().argmax(1)
    genuine = (own_ids[token] == ids).any(1)
    assert stats.extras == int((~genuine).sum()) > 0
    torch.testing.assert_close(weights[:, 0], every[token, ids[:, 0]], rtol=1e-4, atol=1e-6)


def _choice(out: Any) -> tuple[Tensor, Tensor]:
    """Weights and ids among a router's outputs, whose order differs between versions."""
    ids = next(t for t in out if not t.is_floating_point())
    return next(t for t in reversed(out) if t.is_floating_point() and t.shape == ids.shape), ids


def _routers(model: Any) -> list[Any]:
    return [m for n, m in model.named_modules() if n.split(".")[-1] in ("gate", "router")]


@eight
def test_the_policy_may_change_between_forwards_and_stays_when_it_is_refused(name: str) -> None:
    model, given = model_of(name), tiny_models.inputs()
    want = output(model, given)
    with attach(model, "capacity_factor=0.5,min_expert_load=0") as pace:
        capped = output(model, given)
        assert not torch.equal(capped, want)
        pace.policy = None
        assert torch.equal(output(model, given), want)
        pace.policy = "capacity_factor=0.5,min_expert_load=0"
        assert torch.equal(output(model, given), capped)
        with pytest.raises(ValueError, match="token_source"):
            pace.policy = "capacity_factor=1,pool=source"
        assert torch.equal(output(model, given), capped)
        assert pace.policy.capacity_factor == 0.5
    assert torch.equal(output(model, given), want)


@eight
def test_requests_are_independent(name: str) -> None:
    """pool="request": what a request gets doesn't depend on who shares the forward."""
    model = model_of(name)
    both, other = tiny_models.inputs(seed=1), tiny_models.inputs(seed=9)
    mixed = {k: torch.stack([both[k][0], other[k][1]]) for k in both}
    with attach(model, "capacity_factor=1,pool=request,min_expert_load=0") as pace:
        a, b = output(model, both), output(model, mixed)
        assert pace.stats().layers[0].dropped > 0
        torch.testing.assert_close(a[0], b[0], rtol=1e-3, atol=1e-3)
        pace.policy = "capacity_factor=1,min_expert_load=0"
        a, b = output(model, both), output(model, mixed)
    assert (a[0] - b[0]).abs().max() > 1e-2  # one budget for all: it does
