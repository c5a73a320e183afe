"""Pools decide for themselves whether they are capped, and no request feels its neighbours."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agrees, run
from hypothesis import assume, given, settings
from strategies import Case, cases
from test_route_invariants import INT64_MAX, genuine, take_rows, with_policy

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, route

EVERY_POOL = pytest.mark.parametrize("pool", ["batch", "source", "request"])


@settings(max_examples=3 * settings().max_examples)
@given(cases(pool="request"))
def test_9_a_request_gets_alone_what_it_gets_in_company(case: Case) -> None:
    """Dropping all the other requests from the forward changes nothing for this one."""
    everybody = run(case)
    request = case.inputs.token_request
    assert request is not None
    for label in request.unique():
        rows = torch.nonzero(request == label)[:, 0]
        alone = run(take_rows(case, rows))
        assert torch.equal(alone.kept, everybody.kept[rows])
        assert torch.equal(alone.topk_ids, everybody.topk_ids[rows])
        torch.testing.assert_close(
            alone.topk_weights, everybody.topk_weights[rows], rtol=0, atol=0, equal_nan=True
        )


@given(cases(pool="request", expansion=False, mode="enforce", min_expert_load=0))
def test_9_the_bound_of_request_pools(case: Case) -> None:
    """A unit gets at most what one batch pool gives, plus one assignment a request."""
    a = run(case)
    batch = run(with_policy(case, pool="batch"))
    assume(bool((batch.capacity < INT64_MAX // 2).all()))
    request, valid = case.inputs.token_request, case.inputs.valid
    assert request is not None
    requests = (request if valid is None else request[valid]).unique().numel()
    assert (a.loads_after.sum(0) <= batch.capacity[0] + requests).all()


@given(cases(pool="request", mode="enforce"))
def test_a_request_is_capped_by_its_own_tokens_alone(case: Case) -> None:
    """Whether there are enough tokens for a cap is asked of each request, and of nobody else."""
    a = run(case)
    request, valid = case.inputs.token_request, case.inputs.valid
    assert request is not None
    minimum = case.policy.resolved_min_expert_load("cpu")
    k = case.inputs.topk_ids.shape[1]
    for pool, label in enumerate(sorted((request if valid is None else request[valid]).unique())):
        mine = request == label
        tokens = int((mine if valid is None else mine & valid).sum())
        few = tokens * k < minimum * a.num_experts
        decode = case.inputs.token_decode
        if case.policy.phase == "prefill" and decode is not None:
            few |= bool(decode[mine if valid is None else mine & valid].all())
        assert bool((a.capacity[pool] == INT64_MAX).all()) == few or case.policy.factor > 10**20


@EVERY_POOL
@given(case=cases(phase="prefill"))
def test_a_pool_of_only_decode_tokens_is_left_alone(pool: str, case: Case) -> None:
    """Whatever other pools hold: each of its tokens has the model's own choice, and no extras."""
    needed = {"source": case.inputs.token_source, "request": case.inputs.token_request}
    label, decode = needed.get(pool), case.inputs.token_decode
    assume(decode is not None and (pool == "batch" or label is not None))
    a = run(with_policy(case, pool=pool))
    real, k = genuine(case, a.num_experts), case.inputs.topk_ids.shape[1]
    valid = case.inputs.valid
    rows = torch.ones_like(decode) if valid is None else valid
    for one in label[rows].unique() if label is not None else [None]:
        mine = rows if one is None else rows & (label == one)
        if decode[mine].all():
            assert torch.equal(a.kept[mine][:, :k], real[mine])
            assert not a.kept[mine][:, k:].any()


def spread(tokens: int) -> RoutingInputs:
    """Two requests (and sources): the first of 2 tokens, the second of all others, all on 0."""
    label = (torch.arange(tokens) >= 2).long()
    return RoutingInputs(
        topk_ids=torch.zeros(tokens, 1, dtype=torch.int64), topk_weights=torch.ones(tokens, 1),
        token_request=label, token_source=label, token_decode=label == 0, num_experts=4,
    )  # fmt: skip


def test_pools_by_hand() -> None:
    """Two tokens beside ten: the two are 0.5 an expert, all are 3."""
    limit = [{True: "capped", False: "free"}[b] for b in (True, False)]
    placement = ExpertPlacement.explicit([0, 1, 0, 1])
    for pool, minimum, phase, want in (
        ("request", 0.5, "all", "capped capped"),
        ("request", 0.6, "all", "free capped"),
        ("request", 2.5, "all", "free capped"),
        ("request", 2.6, "all", "free free"),
        ("source", 2.6, "all", "capped capped"),
        ("source", 3, "all", "capped capped"),
        ("source", 3.1, "all", "free free"),
        ("source", 3, "prefill", "free capped"),
        ("request", 0, "prefill", "free capped"),
    ):
        policy = CapacityPolicy(
            capacity_factor=0.5, keep="first", pool=pool, min_expert_load=minimum, phase=phase
        )
        a = route(spread(12), policy, placement)
        said = [limit[bool(row[0] == INT64_MAX)] for row in a.capacity[:2]]
        assert " ".join(said) == want, (pool, minimum, phase)
        kept = [int(part.sum()) for part in a.kept[:, 0].split([2, 10])]
        assert kept == [
            n if s == "free" else -(-n // 4) for n, s in zip((2, 10), said, strict=True)
        ]


@settings(max_examples=2 * settings().max_examples)
@given(cases(expansion=True, pool="request", plain=True, phase="prefill"))
def test_only_capped_pools_expand(case: Case) -> None:
    assert_agrees(case)
