"""One attached MoE layer: counts the model's choice, routes it, runs experts on what is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.engines.rules import ALL_MODALITIES, LayerRule, LayerTraits, layer_rule
from paceline.engines.transformers.layers.experts import ExpertRunner
from paceline.engines.transformers.layers.find import LayerModules
from paceline.engines.transformers.layers.probe import Probe, find_scoring
from paceline.engines.transformers.layers.router import RouterObserver, Scoring
from paceline.engines.transformers.layers.weights import weights_present
from paceline.engines.transformers.patching import Patch, patch_method
from paceline.engines.transformers.recompute import is_recomputing
from paceline.engines.transformers.state import AttachedState
from paceline.engines.transformers.tokens.arguments import argument_names, positional
from paceline.engines.transformers.tokens.context import ForwardContext
from paceline.facts import Facts
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs
from paceline.routing.ranking import token_priorities
from paceline.routing.route import assign
from paceline.routing.stats import LoadAccumulator
from paceline.stand_ins.calibration_file import LayerCalibration
from paceline.stand_ins.compensation import Compensation
from paceline.stand_ins.identity import LayerIdentity, expert_fingerprints, router_fingerprint

RunExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [..., hidden], ids [tokens, slots], weights [tokens, slots]) -> [..., hidden]; an id
equal to the number of experts is left out."""

ReplacedExperts: TypeAlias = Callable[[str, RunExperts, Tensor, Tensor, Tensor], Tensor]
"""Called with a layer's name, its own way to run experts, and the arguments of that."""

AddStandIns: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`Compensation` without its last argument."""


class AttachedLayer:
    """A MoE layer whose experts' forward is patched.

    Args:
        index: of the layer among the model's MoE layers.
        state: that all layers share.
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
        state: AttachedState,
        placement: ExpertPlacement | None,
    ) -> None:
        self.modules, self.index, self._state = modules, index, state
        self.name, self.num_experts, self.placement = modules.name, num_experts, placement
        self.k = found.ids.shape[1]
        self.scoring: Scoring = find_scoring(modules, found, num_experts)
        self.runner = ExpertRunner(modules, found, num_experts)
        self.compensation: Compensation | None = None
        self.router = RouterObserver(modules, state)
        # where only the router could be probed, a forward shows whether the block calls its experts
        self.ran_block = found.ran_block
        self._names = argument_names(modules.experts.forward)
        self._like = found.hidden[:0]
        self._original: Callable[..., Tensor] = modules.experts.forward
        self._replaced: ReplacedExperts | None = None
        self._patch: Patch | None = None
        self._method: Any = None  # the experts' forward while it is patched
        self._block_forward = modules.block.__dict__.get("forward")
        self._block_hook: RemovableHandle | None = None
        self._placement = placement or ExpertPlacement.per_expert(num_experts)
        with torch.inference_mode(False):  # counts go on outside of it
            self.loads = LoadAccumulator(self.name, self._placement, self.k, modules.device)

    @property
    def own_experts(self) -> Sequence[int]:
        """The experts that this process holds, in the order of its module."""
        return range(self.num_experts)

    def identity(self) -> LayerIdentity:
        """Return the layer's sizes and the fingerprints of its weights."""
        own = self.own_experts
        experts = expert_fingerprints(self.modules.experts, len(own))
        router = router_fingerprint(self.modules.router)
        known = dict(zip(own, experts, strict=True))
        return LayerIdentity(self.name, self.k, self.num_experts, router, known)

    def row_cost(self) -> float:
        """Return the cost of one token: weights per expert times experts per token."""
        weights = sum(weight.numel() for weight in self.modules.experts.parameters())
        return weights / len(self.own_experts) * self.k

    def compensate(self, found: LayerCalibration) -> None:
        """Give the layer stand-ins, which policies with compensate=True add for what is dropped."""
        self.compensation = Compensation(found, self.stand_in_experts, self._like)

    @property
    def stand_in_experts(self) -> Sequence[int] | None:
        """Experts whose stand-ins are added on this rank; None: all."""
        return None

    # -- policies ---------------------------------------------------------------------------------

    def applicable(self, policy: CapacityPolicy) -> CapacityPolicy:
        """Return the policy as it applies to this layer."""
        return policy

    def agree(self, name: str, value: Any) -> None:
        """Check that a value is the same on all ranks."""

    def traits(self, modalities: Collection[str] = ALL_MODALITIES) -> LayerTraits:
        """Return the properties on which the choice of a policy depends."""
        return LayerTraits(
            name=self.name,
            k=self.k,
            placement=self._placement,
            chosen_scores=self.scoring.rule is not None,
            all_scores=self.scoring.expands,
            scores_reason=self.scoring.reason,
            calibrated=self.compensation is not None,
            calibration_option="attach with calibration=FOLDER",
            knows_source=self._state.labels.source is not None,
            source_option='attach with token_source="sequence", a tensor or a function',
            modalities=modalities,
            modalities_reason="this model reads text alone",
        )

    def rule(self, policy: CapacityPolicy) -> LayerRule:
        """Return the policy's rule for this layer."""
        return layer_rule(policy, self.traits())

    # -- the patch of experts.forward -------------------------------------------------------------

    def install(self) -> None:
        """Patch the experts' forward."""
        experts = self.modules.experts
        self._patch = patch_method(experts, self._state.switch, self.forward)
        self._method = experts.__dict__["forward"]

    def ensure_called(self) -> None:
        """Observe block and router where something stands in the patch's way.

        Whatever wraps the patch calls it, and what replaces it doesn't: only a forward tells. This
        is called before every forward, as the model may be changed at any time.
        """
        modules = self.modules
        block, experts = modules.block, modules.experts
        if (
            block._modules.get("experts") is experts
            and experts.__dict__.get("forward") is self._method
            and block.__dict__.get("forward") is self._block_forward
        ):
            return
        with self._state.changing:
            if self._patch is None or not self._state.switch.on:
                return
            if self._block_hook is None:
                self._block_hook = block.register_forward_pre_hook(self._expect_experts)
            self.router.ensure()

    def _expect_experts(self, *_: Any) -> None:
        """Note that the block has begun, whose experts must run before the forward ends."""
        if self._state.switch.on:
            self._state.threads.current.router[self.name] = None

    def remove(self) -> None:
        """Restore the modules."""
        self.router.undo()
        if self._block_hook is not None:
            self._block_hook.remove()
            self._block_hook = None
        if self._patch is not None:
            self._patch.undo()
            self._patch = None

    def replace_experts(self, replaced: ReplacedExperts | None) -> None:
        """Replace the way to run experts; None: the layer's own again."""
        self._replaced = replaced

    # -- a forward --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the experts; arguments are `(hidden_states, top_k_index, top_k_weights)`."""
        state = self._state
        if not state.switch.on:
            return self._original(*args, **kwargs)
        hidden, ids, weights = positional(self._names, args, kwargs) if kwargs else args
        thread = state.threads.current
        router = thread.router.pop(self.name, None) if thread.router else None
        context, counts = thread.context, True
        if context is None and is_recomputing():
            context = state.repeated_tokens(self.index, self.name, ids)
            if context is None:
                return self._run(hidden, ids, weights)
            counts = False
        elif context is None or context.rows is None:
            context = state.unknown_tokens(self.index, self.name, ids.shape[0], ids.device)
        if context.calls is None or not counts:
            return self._forward(context, hidden, ids, weights, router, counts)
        context.calls.note(self.index, ids, context)
        out = self._forward(context, hidden, ids, weights, router, counts)
        if thread.context is None:
            context.calls.finish(out)
        return out

    def _forward(
        self,
        context: ForwardContext,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        router: tuple[Tensor, Any] | None,
        counts: bool,
    ) -> Tensor:
        """Run the experts on what the policy keeps.

        Args:
            router: input and output of the layer's router, None if nobody observed it.
            counts: False where a backward repeats the forward, which was counted before.
        """
        rule: LayerRule = context.rules[self.index]
        watchers, rows = context.watchers if counts else (), ids.shape[0]
        if not watchers:
            if not rule.routes or rule.stays_out(context, rows, ids.is_cpu):
                if counts:
                    valid: Tensor | None = context.valid
                    if context.rows != rows:
                        valid = context.rows_of(valid, rows, self.name)
                    self.loads.observe(ids, valid)
                if self._replaced is None:
                    return self._original(hidden, ids, weights)
                return self._run(hidden, ids, weights)
            if not self.runner.wide_ids and rule.is_within_limits(context, ids):
                if counts:
                    self.loads.observe(ids, None, self._gate_mass(rule, ids, weights, router))
                return self._run(hidden, ids, weights)
        facts = rule.facts
        if watchers:
            facts = Facts.union(facts, *(asked for _, asked in watchers))
        enforces = rule.routes and rule.policy.mode == "enforce"
        # a graph of what nobody uses would be missing when a backward repeats the forward
        with nullcontext() if enforces else torch.no_grad():
            inputs = self._inputs(context, facts, rule, hidden, ids, weights, router)
            assignment = self._route(inputs, rule.policy)
        if counts:
            self._count(rule, watchers, inputs, assignment)
        if not enforces or _keeps_choice(assignment, ids):
            return self._run(hidden, ids, weights)
        compensation = None
        if self.compensation is not None and rule.policy.compensate:
            compensation = partial(
                self.compensation, on_distance=self.loads.add_distance if counts else None
            )
        return self._run_kept(hidden, ids, weights, assignment, compensation)

    def _count(
        self,
        rule: LayerRule,
        watchers: Sequence[tuple[Any, Facts]],
        inputs: RoutingInputs,
        assignment: Assignment,
    ) -> None:
        with torch.no_grad():
            if rule.routes:
                self.loads.add(assignment)
            else:
                self.loads.observe(inputs.topk_ids, inputs.valid)
            for entry in watchers:
                if entry in self._state.watchers:  # else it has ended meanwhile
                    entry[0](self.name, inputs, assignment)

    def _gate_mass(
        self, rule: LayerRule, ids: Tensor, weights: Tensor, router: tuple[Tensor, Any] | None
    ) -> Tensor:
        """Return the [tokens, k] gate mass of the model's choice, as `route` would count it."""
        if self.scoring.rule is None or not rule.needs_scores or router is None:
            return weights
        return self.scoring(*router, ids.shape[0]).gather(1, ids)

    def _route(self, inputs: RoutingInputs, policy: CapacityPolicy) -> Assignment:
        return assign(inputs, policy, self._placement)

    def _run(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run the experts on the model's own choice."""
        if self._replaced is None:
            return self._original(hidden, ids, weights)
        return self._replaced(self.name, self.runner, hidden, ids, weights)

    def _run_kept(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        assignment: Assignment,
        compensation: AddStandIns | None,
    ) -> Tensor:
        """Run the experts on what was kept, and add stand-ins for what was dropped."""
        kept_ids, kept_weights = assignment.topk_ids, assignment.topk_weights
        if self.runner.wide_ids:
            # ids beyond the experts are the model's own zero experts: they stay as they were
            extra = kept_ids.shape[1] - self.k
            beyond = nn.functional.pad(ids >= self.num_experts, (0, extra))
            kept_ids = torch.where(beyond, nn.functional.pad(ids.long(), (0, extra)), kept_ids)
            kept_weights = torch.where(beyond, nn.functional.pad(weights, (0, extra)), kept_weights)
        if self._replaced is None:
            out = self.runner(hidden, kept_ids, kept_weights)
        else:
            out = self._replaced(self.name, self.runner, hidden, kept_ids, kept_weights)
        if compensation is None:
            return out
        return compensation(out, hidden, ids, weights, assignment.dropped_slots)

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
        """Return the inputs of `route`, with those facts alone that somebody needs."""
        rows, policy = ids.shape[0], rule.policy

        def of_layer(per_token: Tensor | None) -> Any:
            return context.rows_of(per_token, rows, self.name)

        scores = source = position = norms = None
        if self.scoring.rule is not None and (rule.needs_scores or facts.scores):
            if router is None:
                raise RuntimeError(f"layer {self.name}: its experts ran before its router.")
            # scores decide; a gradient flows through them into the weights of extras alone
            with nullcontext() if rule.facts.all_scores else torch.no_grad():
                scores = self.scoring(*router, rows)
        if facts.source:
            source = of_layer(context.source(self._placement.num_devices))
        modality = context.modality_of(rows, self.name) if facts.modality else {}
        if modality is None and policy.drop_first and policy.mode == "enforce":
            raise RuntimeError(
                f"layer {self.name}: it is unknown which tokens are of an image in a forward on "
                f'embeddings alone, but "{policy}" needs it: give the forward input_ids or '
                "mm_token_type_ids, or attach token_modality."
            )
        if facts.position:
            position = of_layer(context.position)
        if policy.keep == "contribution" and self.compensation is not None:
            norms = self.compensation.norms(hidden, policy.compensate)
        valid, step = context.valid, context.step
        return RoutingInputs(
            topk_ids=ids,
            topk_weights=weights,
            scores=scores,
            valid=valid if context.rows == rows else of_layer(valid),
            token_source=source,
            token_request=of_layer(context.request) if facts.request else None,
            token_priority=token_priorities(policy, modality, position),
            token_decode=of_layer(context.decode) if facts.decode else None,
            expert_norms=norms,
            num_experts=self.num_experts,
            layer=self.index,
            step=step.to(ids.device) if isinstance(step, Tensor) else step,
        )


def identities(model: nn.Module, layers: Sequence[AttachedLayer]) -> list[LayerIdentity]:
    """Return the sizes and fingerprints of a model's layers, wherever their weights are now."""
    found = []
    for layer in layers:
        with weights_present(model, layer.name):
            found.append(layer.identity())
    return found


def _keeps_choice(assignment: Assignment, ids: Tensor) -> bool:
    """Return True if the host knows, without waiting, that just the model's choice is kept."""
    kept = assignment.kept
    on_host = kept.is_cpu and type(kept) is Tensor and not torch.compiler.is_compiling()
    return on_host and kept.shape == ids.shape and bool(kept.all())
