"""One attached MoE layer: counts the model's choice, routes it, runs experts on what is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.engines.rules import ALL_MODALITIES, LayerRule, LayerTraits, layer_rule
from paceline.engines.transformers.layers.experts import Execution
from paceline.engines.transformers.layers.modules import LayerModules
from paceline.engines.transformers.layers.probe import Probe
from paceline.engines.transformers.layers.router import Scoring, find_scoring
from paceline.engines.transformers.layers.router_watch import RouterWatch
from paceline.engines.transformers.patching import StandIn, argument_names, bind, stand_in
from paceline.engines.transformers.state import Running
from paceline.engines.transformers.tokens.context import ForwardContext
from paceline.facts import Facts
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs
from paceline.routing.priority import token_priorities
from paceline.routing.route import assign
from paceline.routing.stats import LoadAccumulator
from paceline.stand_ins.compensation import Compensation
from paceline.stand_ins.identity import LayerIdentity, of_experts, of_router
from paceline.stand_ins.layer import LayerCalibration

RunExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [..., hidden], ids [tokens, slots], weights [tokens, slots]) -> [..., hidden]; an id
equal to the number of experts is left out."""

Leave: TypeAlias = Callable[[Tensor], Tensor]
"""[..., hidden] of the kept experts -> with what dropped assignments leave behind."""

ReplacedExperts: TypeAlias = Callable[[str, RunExperts, Tensor, Tensor, Tensor], Tensor]
"""Called with a layer's name, its own way to run experts, and what these are given."""


class AttachedLayer:
    """Stands in for the forward of one experts module.

    Args:
        modules: of the layer.
        found: what it did with random rows.
        num_experts: of the layer.
        index: of the layer among the model's MoE layers.
        running: what all layers share.
        placement: of the experts; None: every expert is a device of its own.

    Raises:
        ValueError: naming the layer and why it can't be handled.
    """

    def __init__(
        self,
        modules: LayerModules,
        found: Probe,
        num_experts: int,
        index: int,
        running: Running,
        placement: ExpertPlacement | None,
    ) -> None:
        self.modules, self.index, self._running = modules, index, running
        self.name, self.num_experts, self.placement = modules.name, num_experts, placement
        self.k = found.ids.shape[1]
        self.scoring: Scoring = find_scoring(modules, found, num_experts)
        self._names = argument_names(modules.experts.forward)
        self._like = found.hidden[:0]
        self._execution = Execution(modules, found, num_experts)
        self._original: Callable[..., Tensor] = modules.experts.forward
        self._replaced: ReplacedExperts | None = None
        self.compensation: Compensation | None = None
        self._stand_in: StandIn | None = None
        self.router_watch = RouterWatch(modules, running)
        # where only the router could be tried, that the block calls its experts is seen later
        self.ran_block = found.ran_block
        self._placement = placement or ExpertPlacement.per_expert(num_experts)
        with torch.inference_mode(False):  # counts go on outside of it
            self.loads = LoadAccumulator(self.name, self._placement, self.k, modules.device)

    @property
    def own_experts(self) -> Sequence[int]:
        """The experts that this process holds, in the order of its module."""
        return range(self.num_experts)

    def identity(self) -> LayerIdentity:
        """Which layer it is, by its weights."""
        own = self.own_experts
        experts = of_experts(self.modules.experts, len(own))
        router = of_router(self.modules.router)
        known = dict(zip(own, experts, strict=True))
        return LayerIdentity(self.name, self.k, self.num_experts, router, known)

    def row_cost(self) -> float:
        """What the layer computes for a token: weights of an expert times experts a token."""
        weights = sum(weight.numel() for weight in self.modules.experts.parameters())
        return weights / len(self.own_experts) * self.k

    def compensate(self, found: LayerCalibration) -> None:
        """Have dropped assignments leave their stand-ins, where a policy asks for it."""
        self.compensation = Compensation(found, self.leaving_experts, self._like)

    @property
    def leaving_experts(self) -> Sequence[int] | None:
        """Whose stand-ins are added here; None: all."""
        return None

    # -- following a policy -----------------------------------------------------------------------

    def applicable(self, policy: CapacityPolicy) -> CapacityPolicy:
        """The policy as it applies to this layer."""
        return policy

    def agree(self, name: str, value: Any) -> None:
        """Over ranks, check that all mean the same."""

    def rule(self, policy: CapacityPolicy) -> LayerRule:
        """What a policy means for this layer."""
        return layer_rule(policy, self.traits())

    def traits(self, modalities: Collection[str] = ALL_MODALITIES) -> LayerTraits:
        """Return what the layer's policies depend on.

        Args:
            modalities: that the model or the user can tell apart.
        """
        return LayerTraits(
            name=self.name,
            k=self.k,
            placement=self._placement,
            chosen_scores=self.scoring.rule is not None,
            all_scores=self.scoring.expands,
            scores_reason=self.scoring.reason,
            calibrated=self.compensation is not None,
            calibration_option="attach with calibration=FOLDER",
            knows_source=self._running.labels.source is not None,
            source_option='attach with token_source="sequence", a tensor or a function',
            modalities=modalities,
            modalities_reason="this model reads text alone",
        )

    # -- taking the place of experts.forward ------------------------------------------------------

    def install(self) -> None:
        """Take the place of the experts' forward."""
        self._stand_in = stand_in(self.modules.experts, self._running.switch, self.forward)

    def remove(self) -> None:
        """Put everything back as it was."""
        self.router_watch.undo()
        if self._stand_in is not None:
            self._stand_in.undo()
            self._stand_in = None

    # -- running ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' forward: `(hidden_states, top_k_index, top_k_weights)`, by name or not."""
        running = self._running
        if not running.switch.on:
            return self._original(*args, **kwargs)
        hidden, ids, weights = bind(self._names, args, kwargs) if kwargs else args
        here, rows = running.threads.here, ids.shape[0]
        router = here.router.pop(self.name, None) if here.router else None
        context = here.context
        if context is None or context.rows is None:
            context = running.unknown_tokens(self.index, self.name, rows, ids.device)
        rule: LayerRule = context.rules[self.index]
        watchers = context.watchers
        if not watchers and (not rule.routes or rule.stays_out(context, rows, ids.is_cpu)):
            valid = context.valid if context.rows == rows else self._valid(context, rows)
            self.loads.observe(ids, valid)
            if self._replaced is None:
                return self._original(hidden, ids, weights)
            return self._run(hidden, ids, weights)
        if not watchers and not self._execution.wide_ids and rule.is_within_limits(context, ids):
            self.loads.observe(ids, None, self._mass(rule, ids, weights, router))
            return self._run(hidden, ids, weights)
        facts = (
            rule.facts
            if not watchers
            else Facts.union(rule.facts, *(asked for _, asked in watchers))
        )
        inputs = self._inputs(context, facts, rule, hidden, ids, weights, router)
        assignment = self._route(inputs, rule.policy)
        with torch.no_grad():
            if rule.routes:
                self.loads.add(assignment)
            else:
                self.loads.observe(ids, inputs.valid)
            for entry in watchers:
                if entry in running.watchers:  # else it has ended meanwhile
                    entry[0](self.name, inputs, assignment)
        if not rule.routes or rule.policy.mode != "enforce" or _known_whole(assignment, ids):
            return self._run(hidden, ids, weights)
        leave: Leave | None = None
        if rule.policy.compensate and self.compensation is not None:
            leave = partial(
                self.compensation,
                hidden=hidden,
                ids=ids,
                weights=weights,
                dropped=assignment.dropped_slots,
                tell=self.loads.add_distance,
            )
        return self._run_kept(hidden, ids, weights, assignment, leave)

    def _mass(
        self, rule: LayerRule, ids: Tensor, weights: Tensor, router: tuple[Tensor, Any] | None
    ) -> Tensor:
        """[tokens, k] gate mass of the model's choice, as routing is told it."""
        if self.scoring.rule is None or not rule.needs_scores or router is None:
            return weights
        return self.scoring(*router, ids.shape[0]).gather(1, ids)

    def _route(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        return assign(inputs, policy, self._placement)

    def replace_experts(self, replaced: ReplacedExperts | None) -> None:
        """Have experts computed by something else; None: by the layer itself again."""
        self._replaced = replaced

    def _run(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts on the model's own choice."""
        if self._replaced is None:
            return self._original(hidden, ids, weights)
        return self._replaced(self.name, self._run_some, hidden, ids, weights)

    def _run_kept(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        assignment: Assignment,
        leave: Leave | None,
    ) -> Tensor:
        """The experts on what was kept, and what dropped assignments leave."""
        kept_ids, kept_weights = assignment.topk_ids, assignment.topk_weights
        if self._execution.wide_ids:
            # ids beyond the experts are the model's own zero experts: they stay as they were
            beyond = nn.functional.pad(ids >= self.num_experts, (0, kept_ids.shape[1] - self.k))
            kept_ids = torch.where(beyond, _widened(ids.long(), kept_ids), kept_ids)
            kept_weights = torch.where(beyond, _widened(weights, kept_weights), kept_weights)
        if self._replaced is None:
            out = self._run_some(hidden, kept_ids, kept_weights)
        else:
            out = self._replaced(self.name, self._run_some, hidden, kept_ids, kept_weights)
        return out if leave is None else leave(out)

    def _run_some(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._execution(self._original, hidden, ids, weights)

    # -- what routing is told ---------------------------------------------------------------------

    def _valid(self, context: ForwardContext, rows: int) -> Tensor | None:
        valid: Tensor | None = context.valid
        if valid is None or context.rows == rows:
            return valid
        own: Tensor | None = context.rows_of(valid, rows, self.name)
        return own

    def _inputs(
        self,
        context: ForwardContext,
        facts: Facts,
        rule: LayerRule,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        router: tuple[Tensor, Any] | None,
    ) -> RoutingInputs:
        rows, policy = ids.shape[0], rule.policy

        def told(per_token: Tensor | None) -> Any:
            return context.rows_of(per_token, rows, self.name)

        scores = source = position = None
        # not every policy ranks by scores, but all with a factor are told what share they kept
        if self.scoring.rule is not None and (rule.needs_scores or facts.scores):
            if router is None:
                raise RuntimeError(f"layer {self.name}: its experts ran before its router.")
            scores = self.scoring(*router, rows)
        if facts.source:
            devices = self.num_experts if self.placement is None else self.placement.num_devices
            source = told(context.source(devices))
        modality = context.modality_of(rows, self.name) if facts.modality else {}
        if modality is None and policy.drop_first and policy.mode == "enforce":
            raise RuntimeError(
                f"layer {self.name}: which tokens are of an image is unknown in a forward on "
                f'embeddings alone, which "{policy}" needs: give the forward input_ids or '
                "mm_token_type_ids, or attach token_modality."
            )
        if facts.position:
            position = told(context.position)
        norms = None
        if policy.keep == "contribution" and self.compensation is not None:
            norms = self.compensation.norms(hidden, policy.compensate)
        step = context.step
        return RoutingInputs(
            topk_ids=ids,
            topk_weights=weights,
            scores=scores,
            valid=self._valid(context, rows),
            token_source=source,
            token_request=told(context.request) if facts.request else None,
            token_priority=token_priorities(policy, modality, position),
            token_decode=told(context.decode) if facts.decode else None,
            expert_norms=norms,
            num_experts=self.num_experts,
            layer=self.index,
            step=step.to(ids.device) if isinstance(step, Tensor) else step,
        )


def _known_whole(assignment: Assignment, ids: Tensor) -> bool:
    """Whether the host knows, without waiting, that just the model's choice is kept, all of it."""
    kept = assignment.kept
    host = kept.is_cpu and type(kept) is Tensor and not torch.compiler.is_compiling()
    return host and kept.shape == ids.shape and bool(kept.all())


def _widened(given: Tensor, like: Tensor) -> Tensor:
    """[tokens, k] padded to the slots of `like`."""
    return nn.functional.pad(given, (0, like.shape[1] - given.shape[1]))
