"""An attached MoE layer whose experts are spread over ranks: who decides, over which tokens.

Ranks that share a batch all see the same tokens and decide alike, each for itself. Ranks with a
batch of their own decide for their own tokens (`pool="source"`, no collective), or, with
`pool="batch"`, gather the choices of all ranks, not their tokens, decide for all alike and take
their own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.engines.transformers.discovery import (
    EXPERT_PARALLEL,
    Site,
    spread_over_ranks,
)
from paceline.engines.transformers.expert_parallel import ExpertParallel
from paceline.engines.transformers.layer import AttachedLayer
from paceline.engines.transformers.probe import Sighting, observe
from paceline.keeps import registered_keeps
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs, route
from paceline.routing.budget import Budget

if TYPE_CHECKING:
    from paceline.engines.transformers.running import Running


class ParallelLayer(AttachedLayer):
    """Stands in for the forward of an experts module that is spread over ranks."""

    def __init__(self, site: Site, sighting: Sighting, index: int, running: Running) -> None:
        super().__init__(site, sighting, index, running)
        self.parallel: ExpertParallel = site.experts.__dict__[EXPERT_PARALLEL]
        self.parallel.layer = site.name
        if self._execution.wide_ids:
            raise ValueError(
                f"layer {site.name} can't be handled: its router names experts that no rank has."
            )
        self.set_placement(None)

    def set_placement(self, placement: ExpertPlacement | None) -> None:
        """The experts are where they are: any other placement is an error.

        Raises:
            ValueError: if `placement` is another one.
        """
        parallel = self.site.experts.__dict__[EXPERT_PARALLEL]
        if placement not in (None, parallel.placement):
            raise ValueError(
                f"placement is not where the experts of layer {self.name} are: expert -> rank is "
                f"{list(parallel.placement.expert_to_device)}; allowed is that, or None."
            )
        super().set_placement(parallel.placement)

    def applicable(self, policy: CapacityPolicy) -> CapacityPolicy:
        """The same policy on all ranks; with a batch a rank, a pool not named is "source"."""
        own_batches = not self.parallel.shares_batch
        if policy.caps and own_batches and "pool" not in policy.model_fields_set:
            policy = policy.replace(pool="source")
        self.parallel.link.agree("policy", str(policy))
        return policy

    def _idle(self, rows: int, on_cpu: bool) -> bool:
        if not self.parallel.shares_batch and self._running.policy.pool == "batch":
            return False  # with a common budget no rank may decide alone to stay out
        return super()._idle(rows, on_cpu)

    def _min_expert_load(self, policy: CapacityPolicy, device_type: str) -> float:
        # an expert gets tokens of all ranks, about as many from each
        enough = super()._min_expert_load(policy, device_type)
        return enough if self.parallel.shares_batch else _a_rank(enough, self.parallel.link.size)

    def _route(self, inputs: RoutingInputs) -> Assignment:
        policy = self._running.policy
        if self.parallel.shares_batch:
            return route(inputs, policy, self.placement)
        if policy.pool != "batch":
            policy = own_share(policy, self.parallel.link.size, inputs.topk_ids.device.type)
            return route(inputs, policy, self.placement)
        return route_together(inputs, policy, self.parallel, self.placement)

    def _compute(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, assignment: Assignment
    ) -> Tensor:
        # no shortcut where nothing is kept: the other ranks wait for this one's part
        return self._original(hidden, assignment.topk_ids, assignment.topk_weights)


def parallel_layers(
    model: nn.Module,
    sites: list[Site],
    running: Running,
    policy: Any,
    placement: Any,
    token_source: Any,
) -> list[AttachedLayer]:
    """The layers of a model whose experts are spread over ranks, all of which must call this alike.

    Raises:
        ValueError: if the ranks differ in what they ask for, or only some layers are spread.
    """
    for site in sites:
        if not spread_over_ranks(site.experts):
            raise ValueError(f"layer {site.name} is not spread over ranks, as other layers are.")
    parallel: ExpertParallel = sites[0].experts.__dict__[EXPERT_PARALLEL]
    parallel.link.agree("placement", placement)
    parallel.link.agree("policy", str(policy))
    if not parallel.shares_batch:
        if token_source is not None:
            raise ValueError(
                "token_source is not allowed where every rank has a batch of its own: a token "
                "lives on its rank."
            )
        rank = parallel.link.rank
        running.token_source = lambda batch, length, device: torch.full(
            (batch * length,), rank, device=device
        )
    with gathered(model):
        return [ParallelLayer(site, observe(site), i, running) for i, site in enumerate(sites)]


@lru_cache(maxsize=64)
def _a_rank(enough: float, ranks: int) -> float:
    return float(Fraction(str(enough)) / ranks)


@lru_cache(maxsize=64)
def own_share(policy: CapacityPolicy, ranks: int, device_type: str) -> CapacityPolicy:
    """The policy for one rank's tokens: it sees about one in `ranks` of an expert's tokens."""
    enough = policy.resolved_min_expert_load(device_type)
    return policy.replace(min_expert_load=_a_rank(enough, ranks))


def route_together(
    inputs: RoutingInputs,
    policy: CapacityPolicy,
    parallel: ExpertParallel,
    placement: ExpertPlacement | None,
) -> Assignment:
    """Decide for the tokens of all ranks alike, in rank order, and take this rank's rows.

    Sends per token, to every rank: 4 bytes for each id, weight and score, and 4 for flags.

    Raises:
        ValueError: if the policy ranks by a registered metric of inputs that are not sent.
    """
    if policy.keep in registered_keeps():
        raise ValueError(
            f'keep={policy.keep!r} with pool="batch" and a batch a rank: a registered metric knows '
            'only this rank\'s tokens; allowed is pool="source".'
        )
    rows = inputs.topk_ids.shape[0]
    scores = inputs.scores if policy.expand is not None else None
    chosen = inputs.topk_scores
    if scores is None and inputs.scores is not None:
        chosen = inputs.scores.float().gather(1, inputs.topk_ids.long())
    known = scores if scores is not None else chosen
    weights = inputs.topk_weights
    columns = [inputs.topk_ids.int(), _bits(weights)]
    columns += [] if known is None else [_bits(known)]
    columns += [_flags(inputs).unsqueeze(1)]
    packed, sizes = parallel.link.all_gather(
        torch.cat(columns, 1), f"the routing of {parallel.layer}"
    )
    parallel.bytes_sent += (parallel.link.size - 1) * rows * packed.shape[1] * packed.element_size()
    ids, all_weights, *rest, flags = torch.split(packed, [part.shape[1] for part in columns], 1)
    all_scores = None if known is None else rest[0].contiguous().view(torch.float32)
    flags = flags[:, 0]
    together = route(
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
            num_experts=parallel.num_experts,
            layer=inputs.layer,
            step=inputs.step,
        ),
        policy,
        placement,
    )
    start = sum(sizes[: parallel.link.rank])
    return rows_of(together, slice(start, start + rows), inputs)


def rows_of(assignment: Assignment, rows: slice, inputs: RoutingInputs) -> Assignment:
    """A rank's part of a common assignment: its rows and counts, beside the common capacities.

    Args:
        assignment: over all ranks' tokens, of one pool.
        rows: this rank's.
        inputs: this rank's.
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
    own.capacity = assignment.capacity  # of all ranks, not of these rows
    return own


def _bits(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32)


def _flags(inputs: RoutingInputs) -> Tensor:
    """[tokens] int32: valid, decode and priority of each token."""
    rows, device = inputs.topk_ids.shape[0], inputs.topk_ids.device
    flags = torch.ones(rows, dtype=torch.int32, device=device)
    if inputs.valid is not None:
        flags = inputs.valid.int()
    if inputs.token_decode is not None:
        flags = flags | (inputs.token_decode.int() << 1)
    if inputs.token_priority is not None:
        flags = flags | (inputs.token_priority.clamp(-128, 127).int() << 2)
    return flags


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Weights that FSDP has spread over ranks are whole inside, so that layers can be looked at."""
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "unshard") and hasattr(module, "reshard"):
                sharded: Any = module
                sharded.unshard()
                stack.callback(sharded.reshard)
        yield
