"""Routing where experts are spread over ranks: which ranks decide, over which tokens.

Ranks that share a batch all see the same tokens and decide alike, each for itself. Ranks with a
batch of their own decide for their own tokens (`pool="source"`, no collective), or, with
`pool="batch"`, gather the choices of all ranks, not their tokens, decide for all alike and take
their own rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from paceline.engines.rules import load_per_rank
from paceline.engines.transformers.expert_parallel.implementation import ExpertParallel
from paceline.policy import CapacityPolicy, registered_keeps
from paceline.routing import Assignment, RoutingInputs
from paceline.routing.limits import Budget
from paceline.routing.route import assign

Decision: TypeAlias = Literal["alone", "for its share", "together"]


def decision_of(policy: CapacityPolicy, parallel: ExpertParallel) -> Decision:
    """Return how a rank decides: alone, for its share of the tokens, or together with all ranks.

    Ranks that share a batch decide alike, each for itself; so does a rank for requests, which are
    its own. With one batch per rank, a rank sees a share of an expert's tokens and decides for that
    (pool="source"), or all decide together (pool="batch").
    """
    if parallel.shares_batch or not policy.caps or policy.pool == "request":
        return "alone"
    return "together" if policy.pool == "batch" else "for its share"


def route_on_rank(
    inputs: RoutingInputs, policy: CapacityPolicy, parallel: ExpertParallel
) -> Assignment:
    """Return this rank's assignment of its tokens; all ranks must call it alike.

    Args:
        policy: the same on all ranks.
        parallel: how the layer's experts are spread.
    """
    decision, placement = decision_of(policy, parallel), parallel.placement
    if decision == "together":
        return route_together(inputs, policy, parallel)
    if decision == "for its share":
        policy = policy_for_share(policy, parallel.group.size, inputs.topk_ids.device.type)
    return assign(inputs, policy, placement)


@lru_cache(maxsize=64)
def policy_for_share(policy: CapacityPolicy, ranks: int, device_type: str) -> CapacityPolicy:
    """Return the policy for one rank, which sees about one in `ranks` of an expert's tokens."""
    enough = policy.resolved_min_expert_load(device_type)
    return policy.replace(min_expert_load=load_per_rank(enough, ranks))


def route_together(
    inputs: RoutingInputs,
    policy: CapacityPolicy,
    parallel: ExpertParallel,
) -> Assignment:
    """Decide for the tokens of all ranks alike, in rank order, and return this rank's rows.

    Sends per token, to every rank: 4 bytes for each id, weight and score, and 4 for flags; with
    norms of each assignment, 4 bytes for each of these too.

    Raises:
        ValueError: if the policy ranks by a registered metric of inputs that are not sent.
    """
    if policy.keep in registered_keeps():
        raise ValueError(
            f"pool must be source with keep={policy.keep} and a batch per rank, where a registered "
            "metric knows this rank's tokens alone, got pool=batch."
        )
    ids = inputs.topk_ids.long()
    in_range = (ids >= 0) & (ids < parallel.num_experts)  # what is no expert must not become one
    rows = ids.shape[0]
    scores = inputs.scores if policy.expand is not None else None
    chosen = inputs.topk_scores
    if scores is None and inputs.scores is not None:
        chosen = inputs.scores.float().gather(1, torch.where(in_range, ids, 0))
    known = scores if scores is not None else chosen
    weights = inputs.topk_weights
    columns = [torch.where(in_range, ids, -1).int(), _bits(weights)]
    columns += [] if known is None else [_bits(known)]
    norms = inputs.expert_norms
    of_each = norms is not None and norms.dim() == 2  # else all ranks know them
    if norms is not None and of_each:
        own = norms if policy.expand is not None else norms.gather(1, torch.where(in_range, ids, 0))
        columns += [_bits(own)]
    columns += [_flags(inputs).unsqueeze(1)]
    packed, sizes = parallel.group.all_gather(
        torch.cat(columns, 1), f"the routing of {parallel.layer}"
    )
    parallel.bytes_sent += (
        (parallel.group.size - 1) * rows * packed.shape[1] * packed.element_size()
    )
    ids, all_weights, *rest, flags = torch.split(packed, [part.shape[1] for part in columns], 1)
    all_scores = None if known is None else rest[0].contiguous().view(torch.float32)
    if of_each:
        norms = rest[-1].contiguous().view(torch.float32)
        if policy.expand is None:
            norms = _spread(norms, ids, parallel.num_experts)
    flags = flags[:, 0]
    together = assign(
        RoutingInputs(
            topk_ids=ids.long(),
            topk_weights=all_weights.contiguous().view(torch.float32).to(weights.dtype),
            scores=all_scores if scores is not None else None,
            topk_scores=all_scores if scores is None else None,
            valid=(flags & 1).bool(),
            token_decode=(flags & 2).bool(),
            token_priority=(flags >> 2).long(),
            token_source=torch.arange(len(sizes), device=flags.device).repeat_interleave(
                torch.tensor(sizes, device=flags.device), output_size=sum(sizes)
            ),
            expert_norms=norms,
            num_experts=parallel.num_experts,
            layer=inputs.layer,
            step=inputs.step,
        ),
        policy,
        parallel.placement,
    )
    start = sum(sizes[: parallel.group.rank])
    return rows_of_rank(together, slice(start, start + rows), inputs)


def rows_of_rank(assignment: Assignment, rows: slice, inputs: RoutingInputs) -> Assignment:
    """Return a rank's part of a common assignment: its rows and counts, with the common capacities.

    Args:
        assignment: over all ranks' tokens, of one pool.
    """
    common = assignment.budget
    own = Assignment(
        topk_ids=assignment.topk_ids[rows],
        topk_weights=assignment.topk_weights[rows],
        kept=assignment.kept[rows],
        num_experts=assignment.num_experts,
        budget=Budget(inputs, common.policy, common.placement),
        bounded_ids=assignment.bounded_ids[rows],
    )
    # of all ranks, not of these rows
    own.capacity = assignment.capacity
    own.max_active_applies = assignment.max_active_applies
    return own


def _spread(values: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Return [tokens, experts] with values [tokens, k] at the experts `ids`, zeros elsewhere."""
    table = values.new_zeros((len(values), experts + 1))
    return table.scatter(1, torch.where(ids < 0, experts, ids).long(), values)[:, :experts]


def _bits(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32)


def _flags(inputs: RoutingInputs) -> Tensor:
    """Return [tokens] int32: valid, decode and priority of each token in one number."""
    rows, device = inputs.topk_ids.shape[0], inputs.topk_ids.device
    flags = torch.ones(rows, dtype=torch.int32, device=device)
    if inputs.valid is not None:
        flags = inputs.valid.int()
    if inputs.token_decode is not None:
        flags = flags | (inputs.token_decode.int() << 1)
    if inputs.token_priority is not None:
        flags = flags | (inputs.token_priority.clamp(-128, 127).int() << 2)
    return flags
