"""Expert parallelism in which a dropped assignment is computed and sent nowhere.

Transformers knows it as `DistributedConfig(ep_implementation="paceline")`. It has two layouts:

- the ranks share one batch (`ep_size == tp_size`): each rank runs its own experts on the rows
  routed to them and one all-reduce adds up the partial outputs;
- each rank has a batch of its own (data parallel): every kept (token, expert) pair goes to its
  expert's rank and back, with two all-to-alls. Neither contains a dropped slot.

Transformers shards experts in order and evenly. For any other placement load the whole model on
every rank and call `place_experts`. For inference: gradients don't cross ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from paceline.engines.transformers.expert_parallel.collectives import RankGroup
from paceline.engines.transformers.layers.find import EXPERT_PARALLEL, LayerModules, find_layers
from paceline.placement import ExpertPlacement
from paceline.settings import PlacementsLike, placement_for, read_placement

NAME = "paceline"
"""Of the implementation, as `DistributedConfig.ep_implementation` spells it."""


class ExpertParallel:
    """Experts of one layer that are spread over ranks.

    Args:
        experts_forward: the local experts' own forward, on local ids; ids >= their number are
            skipped where `_is_expert_parallel` is set.
        placement: expert -> rank of the group.
        group: the ranks.
        shares_batch: whether all ranks hold the same tokens.

    Attributes:
        rows_sent: rows that went to other ranks so far (dispatch only).
        bytes_sent: bytes that went to other ranks so far, in dispatch, combine and all-reduce.
        clock: called with a stage's name at its end, to time stages; None: not timed.
    """

    def __init__(
        self,
        experts_forward: Callable[..., Tensor],
        placement: ExpertPlacement,
        group: RankGroup,
        shares_batch: bool,
        layer: str = "experts",
    ) -> None:
        self.experts_forward, self.placement, self.group = experts_forward, placement, group
        self.shares_batch, self.layer = shares_batch, layer
        self.rows_sent = self.bytes_sent = 0
        self.clock: Callable[[str], None] | None = None
        # Position of an expert when all are laid out rank by rank; dropped slots come last.
        order = [expert for rank in range(group.size) for expert in placement.experts_of(rank)]
        position = torch.empty(placement.num_experts + 1, dtype=torch.int64)
        position[torch.tensor([*order, placement.num_experts])] = torch.arange(len(order) + 1)
        self._position = position
        self._first = sum(placement.sizes[: group.rank])
        self._local = placement.sizes[group.rank]

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer, over all ranks."""
        return self.placement.num_experts

    def __call__(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        add_stand_ins: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, on any rank. All ranks must call it.

        Args:
            hidden: [tokens, hidden] of this rank.
            ids: [tokens, slots] global expert ids; `num_experts` is a dropped slot.
            weights: [tokens, slots].
            add_stand_ins: where ranks share a batch, adds the stand-ins of this rank's dropped
                assignments to its part of the sum, [tokens, hidden].

        Returns:
            [tokens, hidden], exact zeros for a token without experts.

        Raises:
            ExpertParallelError: if another rank is lost, or silent for too long.
        """
        if self._position.device != ids.device:
            self._position = self._position.to(ids.device)
        shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1])
        with torch.no_grad():
            position = self._position[ids]
            if self.shares_batch:
                return self._reduced(hidden, position, weights, add_stand_ins).reshape(shape)
            return self._exchanged(hidden, position, weights).reshape(shape)

    # -- one batch for all ----------------------------------------------------------------------

    def _reduced(
        self,
        hidden: Tensor,
        position: Tensor,
        weights: Tensor,
        add_stand_ins: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        local = position - self._first
        mine = (local >= 0) & (local < self._local)
        self._tick("dispatch")
        if hidden.is_cuda and self._local:
            # no size is read back, so decode can be captured in a CUDA graph
            local = torch.where(mine, local, self._local)
            partial = self.experts_forward(hidden, local, weights.masked_fill(~mine, 0))
        else:
            token, slot = mine.nonzero(as_tuple=True)
            rows = self._run(hidden[token], local[token, slot], weights[token, slot])
            partial = torch.zeros_like(hidden).index_add_(0, token, rows.to(hidden.dtype))
        if add_stand_ins is not None:
            partial = add_stand_ins(partial)
        self._tick("experts")
        self.group.all_reduce(partial, self.layer)
        ring = 2 * (self.group.size - 1) / self.group.size  # of a ring all-reduce
        self.bytes_sent += int(ring * partial.numel() * partial.element_size())
        self._tick("combine")
        return partial

    # -- a batch per rank -----------------------------------------------------------------------

    def _exchanged(self, hidden: Tensor, position: Tensor, weights: Tensor) -> Tensor:
        slots, sizes = position.shape[1], list(self.placement.sizes)
        flat = position.reshape(-1)
        order = torch.argsort(flat)
        counts = torch.bincount(flat, minlength=self.num_experts + 1)[: self.num_experts]
        per_source = self.group.all_to_all(
            counts, sizes, [self._local] * self.group.size, self.layer
        )
        sent = torch.stack([part.sum() for part in torch.split(counts, sizes)])
        received = per_source.view(self.group.size, self._local).sum(1)
        send_sizes, receive_sizes = torch.stack([sent, received]).tolist()  # the layer's one sync
        order = order[: sum(send_sizes)]  # dropped slots are last
        token = order // slots
        rows = self.group.all_to_all(hidden[token], send_sizes, receive_sizes, self.layer)
        self._count(send_sizes, receive_sizes, hidden)
        self._tick("dispatch")
        expert = torch.arange(self._local, device=hidden.device).repeat(self.group.size)
        expert = expert.repeat_interleave(per_source, output_size=rows.shape[0])
        rows = self._run(rows, expert, rows.new_ones(rows.shape[0]))
        self._tick("experts")
        rows = self.group.all_to_all(rows, receive_sizes, send_sizes, self.layer)
        rows.mul_(weights.reshape(-1)[order].unsqueeze(1))
        out = sum_by_token(rows, order, position < self.num_experts)
        self._tick("combine")
        return out

    def _run(self, rows: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """Run the local experts, one expert per row; returns [rows, hidden]."""
        if rows.shape[0] == 0:
            return rows
        return self.experts_forward(rows, local_ids.unsqueeze(1), weights.unsqueeze(1))

    def _count(self, sent: list[int], received: list[int], hidden: Tensor) -> None:
        rank, row = self.group.rank, hidden.shape[1] * hidden.element_size()
        self.rows_sent += sum(sent) - sent[rank]
        self.bytes_sent += row * (sum(sent) - sent[rank] + sum(received) - received[rank])

    def _tick(self, stage: str) -> None:
        if self.clock is not None:
            self.clock(stage)


def sum_by_token(rows: Tensor, order: Tensor, kept: Tensor) -> Tensor:
    """Add up the rows of each token in slot order, the same on every run and device.

    Args:
        rows: [kept assignments, hidden].
        order: [kept assignments] index of each in the flattened `kept`.
        kept: [tokens, slots] bool.

    Returns:
        [tokens, hidden], exact zeros for a token without rows.
    """
    if rows.shape[0] == 0:
        return rows.new_zeros((kept.shape[0], rows.shape[1]))
    counts = kept.sum(1)
    return nn.functional.embedding_bag(
        torch.argsort(order), rows, counts.cumsum(0) - counts, mode="sum"
    )


class PacelineEP(EPImplementation):  # type: ignore[misc]
    """Expert parallelism of one experts module, as Transformers builds it."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1 and not self.shares_batch:
            raise ValueError(
                f'with ep_implementation="{NAME}", ep_size must be tp_size (one batch for all '
                f"ranks) or tp_size must be 1 (a batch per rank), got tp_size={tp_mesh.size()} and "
                f"ep_size={ep_mesh.size()}."
            )
        group = RankGroup(ep_mesh.get_group())
        placement = ExpertPlacement.contiguous(self.num_local_experts * group.size, group.size)
        self.parallel = ExpertParallel(self.experts_forward, placement, group, self.shares_batch)
        experts.__dict__[EXPERT_PARALLEL] = self.parallel
        self._experts = experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._experts.training and torch.is_grad_enabled():
            raise RuntimeError(
                f'ep_implementation="{NAME}" is for inference: call eval(), or train with "auto".'
            )
        return self.parallel(hidden_states, top_k_index, top_k_weights)


EPImplementationInterface.register(NAME, PacelineEP)


def place_experts(
    model: nn.Module,
    placement: PlacementsLike,
    *,
    batch: Literal["own", "shared"] = "own",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Spread the experts of a model that every rank has loaded whole, in any placement.

    Each rank keeps the experts that `placement` gives it, any number of them, and forgets the
    others. All else of the model stays on every rank. Call it on every rank; it can't be undone.

    Args:
        model: loaded alike on every rank, without DistributedConfig.
        placement: expert -> rank of the group, for all layers or one per layer, as for `attach`.
        batch: "own": every rank runs tokens of its own; "shared": all run the same tokens.
        group: the ranks; None: all.

    Raises:
        ValueError: if the placement doesn't fit the group or a layer, a layer's experts are no
            stacked weights, or the ranks don't agree; the model is untouched then.
        ExpertParallelError: if another rank is lost, or silent for too long.
    """
    if batch not in ("own", "shared"):
        raise ValueError(f'batch must be "own" or "shared", got {batch!r}.')
    ranks = RankGroup(group)
    ranks.agree("placement", placement)
    ranks.agree("batch", batch)
    layers = find_layers(model)
    placed = [
        (modules, _placed(modules, placement_for(placement, index, len(layers)), ranks))
        for index, modules in enumerate(layers)
    ]
    for modules, where in placed:
        keep_experts(modules.experts, where.experts_of(ranks.rank))
        local: Any = modules.experts
        parallel = ExpertParallel(local.forward, where, ranks, batch == "shared", modules.name)
        local.__dict__[EXPERT_PARALLEL] = parallel
        local.__dict__["forward"] = _forward_of(parallel)


def keep_experts(experts: nn.Module, own: Sequence[int]) -> None:
    """Remove all of a module's stacked experts but these, which get the ids 0, 1, ... in order."""
    module: Any = experts
    with torch.no_grad():
        for name, weight in list(experts.named_parameters(recurse=False)):
            index = torch.tensor(list(own), dtype=torch.int64, device=weight.device)
            module._parameters[name] = nn.Parameter(weight[index], requires_grad=False)
    module.num_experts, module._is_expert_parallel = len(own), True


def _forward_of(parallel: ExpertParallel) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return parallel(hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)

    return forward


def _placed(modules: LayerModules, placement_like: Any, group: RankGroup) -> ExpertPlacement:
    """Return the placement of a layer's experts on ranks.

    Raises:
        ValueError: if they can't go there, or anywhere.
    """
    name, experts = modules.name, modules.experts
    count, weights = getattr(experts, "num_experts", None), list(experts.parameters(recurse=False))
    if getattr(experts, "_is_expert_parallel", False):
        raise ValueError(f"layer {name} is spread over ranks already.")
    stacked = all(weight.dim() >= 2 and weight.shape[0] == count for weight in weights)
    if not isinstance(count, int) or not weights or not stacked:
        raise ValueError(
            f"layer {name} ({type(experts).__name__}) can't be spread: its experts are no stacked "
            "weights [experts, ...]."
        )
    placement = read_placement(placement_like, count, name)
    if placement is None:
        placement = ExpertPlacement.contiguous(count, group.size)
    if placement.num_devices != group.size:
        raise ValueError(
            f"placement must have one device per rank, {group.size}, got {placement.num_devices}."
        )
    return placement
