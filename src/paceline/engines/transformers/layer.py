"""One attached MoE layer: counts the model's choice, routes it, runs experts on what is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.engines.transformers.discovery import Site, count_experts
from paceline.engines.transformers.execution import Execution
from paceline.engines.transformers.forwards import argument_names, bind, first_argument, stand_in
from paceline.engines.transformers.probe import Sighting
from paceline.engines.transformers.scores import Scoring, find_scoring
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.routing import Assignment, RoutingInputs, route
from paceline.routing.capacity import tokens_needed
from paceline.routing.priority import token_priorities
from paceline.routing.stats import LoadAccumulator

if TYPE_CHECKING:
    from paceline.engines.transformers.running import Running


class AttachedLayer:
    """Stands in for the forward of one experts module.

    Args:
        site: where the layer is.
        sighting: what it did with random rows.
        index: of the layer among the model's MoE layers.
        running: the policy and the running forward, shared by all layers.

    Raises:
        ValueError: naming the layer and why it can't be handled.
    """

    def __init__(self, site: Site, sighting: Sighting, index: int, running: Running) -> None:
        self.site, self.index, self._running = site, index, running
        self.name = site.name
        self.k = sighting.ids.shape[1]
        self.num_experts = count_experts(site, sighting)
        self.scoring: Scoring = find_scoring(site, sighting, self.num_experts)
        self._names = argument_names(site.experts.forward)
        self._execution = Execution(site, sighting, self.num_experts)
        self._original: Callable[..., Tensor] = site.experts.forward
        self._router_call: tuple[Tensor, Any] | None = None
        self._few = (0, 0)  # rows below which nothing is capped, elsewhere and on a CPU
        self._undo: dict[str, Callable[[], None]] = {}
        # where only the router could be tried, that the block calls its experts is seen later
        self.unproven = not sighting.ran_block
        self.set_placement(None)

    def set_placement(self, placement: ExpertPlacement | None) -> None:
        """Place the experts; statistics start anew."""
        self.placement = placement
        counted = placement or ExpertPlacement.per_expert(self.num_experts)
        with torch.inference_mode(False):  # counts go on outside of it
            self.loads = LoadAccumulator(self.name, counted, self.k, self.site.device)

    def applicable(self, policy: CapacityPolicy) -> CapacityPolicy:
        """The policy as it applies to this model; over ranks, all must ask for the same one."""
        return policy

    # -- taking the place of experts.forward ------------------------------------------------------

    def install(self) -> None:
        """Take the place of the experts' forward."""
        self._undo["experts"] = stand_in(self.site.experts, self.forward)

    def remove(self) -> None:
        """Put everything back as it was."""
        while self._undo:
            self._undo.popitem()[1]()
        self._router_call = None

    def watch_router(self, wanted: bool) -> None:
        """Keep what the router says, while a policy needs scores."""
        wanted = wanted or self.unproven
        if not wanted and "router" in self._undo:
            self._undo.pop("router")()
            self._router_call = None
        elif wanted and "router" not in self._undo:
            run = self.site.router.forward
            kept = update_wrapper(partial(self._run_router, run), run)
            self._undo["router"] = stand_in(self.site.router, kept)

    def _run_router(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        self._router_call = (first_argument(args, kwargs), out)
        return out

    # -- running ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' forward: `(hidden_states, top_k_index, top_k_weights)`, by name or not."""
        hidden, ids, weights = bind(self._names, args, kwargs) if kwargs else args
        running, rows = self._running, ids.shape[0]
        self.unproven = False
        if not running.routes or self._idle(rows, ids.is_cpu):
            self.loads.observe(ids, self._valid(rows))
            return self._original(hidden, ids, weights)
        assignment = self._route(self._inputs(ids, weights))
        with torch.no_grad():
            self.loads.add(assignment)
        if running.policy.mode != "enforce":
            return self._original(hidden, ids, weights)
        return self._compute(hidden, ids, weights, assignment)

    def check_ran(self) -> None:
        """After a forward: a router that chose experts nobody ran here means a layer out of reach.

        Raises:
            RuntimeError: naming the layer.
        """
        if self.unproven and self._router_call is not None:
            raise RuntimeError(
                f"layer {self.name} can't be handled: its router ran, but not its "
                "experts' forward (is it "
                "replaced by a kernel?); detach to go on without it."
            )

    def _route(self, inputs: RoutingInputs) -> Assignment:
        return route(inputs, self._running.policy, self.placement)

    def _compute(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, assignment: Assignment
    ) -> Tensor:
        """The experts on what was kept."""
        kept_ids, kept_weights = assignment.topk_ids, assignment.topk_weights
        if self._execution.wide_ids:
            # ids beyond the experts are the model's own zero experts: they stay as they were
            beyond = nn.functional.pad(ids >= self.num_experts, (0, kept_ids.shape[1] - self.k))
            kept_ids = torch.where(beyond, _widened(ids.long(), kept_ids), kept_ids)
            kept_weights = torch.where(beyond, _widened(weights, kept_weights), kept_weights)
        return self._execution(self._original, hidden, kept_ids, kept_weights)

    def follow(self, policy: CapacityPolicy) -> None:
        """Make ready for a policy, before it is put in force."""
        self.watch_router(policy.caps and self.scoring.rule is not None)
        loads = [self._min_expert_load(policy, device) for device in ("cuda", "cpu")]
        elsewhere, on_cpu = (tokens_needed(load, self.k, self.num_experts) for load in loads)
        self._few = elsewhere, on_cpu

    def _idle(self, rows: int, on_cpu: bool) -> bool:
        """Whether it is certain on the host that nothing will be capped."""
        if rows < self._few[on_cpu]:
            return True
        policy, context = self._running.policy, self._running.context
        return policy.phase == "prefill" and context is not None and context.is_decode

    def _min_expert_load(self, policy: CapacityPolicy, device_type: str) -> float:
        """Mean tokens an expert, of this layer's rows, below which nothing is capped."""
        return policy.resolved_min_expert_load(device_type)

    def _valid(self, rows: int) -> Tensor | None:
        context = self._running.context
        if context is None or context.rows is None:
            return None
        if context.rows == rows:
            return context.valid
        valid: Tensor | None = context.valid
        return None if valid is None else self._rows(valid, rows)

    def _inputs(self, ids: Tensor, weights: Tensor) -> RoutingInputs:
        running, rows = self._running, ids.shape[0]
        policy, context = running.policy, running.context
        scores = None
        if self.scoring.rule is not None:
            if self._router_call is None:
                raise RuntimeError(f"layer {self.name}: its experts ran before its router.")
            scores = self.scoring(*self._router_call, ids)
            self._router_call = None
        source = request = priority = decode = None
        if context is None or context.rows is None:
            if policy.pool != "batch" or policy.protect_first or policy.drop_first:
                raise RuntimeError(
                    f"layer {self.name} ran outside a forward of the attached model, so "
                    "which request, "
                    f"position and modality a token has is unknown, which {policy} needs."
                )
            valid = None
        else:
            valid = self._valid(rows)
            if policy.pool == "source" or policy.expand == "own_device":
                devices = self.num_experts if self.placement is None else self.placement.num_devices
                source = self._rows(context.source(devices), rows)
            if policy.pool == "request":
                request = self._rows(context.request, rows)
            modality = (
                {m: self._rows(t, rows) for m, t in context.modality.items()}
                if policy.drop_first
                else {}
            )
            position = self._rows(context.position, rows) if policy.protect_first else None
            priority = token_priorities(policy, modality, position)
            if policy.phase == "prefill":
                decode = self._rows(context.decode, rows)
        return RoutingInputs(
            topk_ids=ids,
            topk_weights=weights,
            scores=scores,
            valid=valid,
            token_source=source,
            token_request=request,
            token_priority=priority,
            token_decode=decode,
            num_experts=self.num_experts,
            layer=self.index,
            step=running.step.to(ids.device) if policy.keep == "random" else 0,
        )

    def _rows(self, per_token: Tensor | None, rows: int) -> Any:
        """Values [batch * length] of the rows that this layer sees.

        Raises:
            RuntimeError: if the layer sees other rows, and which ones is unknown.
        """
        context = self._running.context
        assert context is not None
        if per_token is None or per_token.shape[0] == rows:
            return per_token
        index = context.subset(rows, self.name)
        if index is not None:
            return per_token[index]
        if per_token.dtype is torch.bool and bool(per_token.all()):
            return None  # no padding anywhere, so none here
        raise RuntimeError(
            f"layer {self.name} sees {rows} rows of a batch of "
            f"{list(context.shape or ())} tokens, and "
            "which tokens they are is unknown: allowed is a batch without padding, or no policy."
        )


def _widened(given: Tensor, like: Tensor) -> Tensor:
    """[tokens, k] padded to the slots of `like`."""
    return nn.functional.pad(given, (0, like.shape[1] - given.shape[1]))
