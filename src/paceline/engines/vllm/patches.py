"""The seam: every router that vLLM makes for a MoE layer passes its choice through the cap."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import layer as moe_layer
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name

from paceline.engines.vllm import cpu_experts
from paceline.engines.vllm import routers as operators

COMPILE_MARK = "paceline-1"
"""Part of the key of vLLM's compile cache: a graph with the cap's operators is another graph."""


@lru_cache(maxsize=64)
def capped_class(router: Any) -> Any:
    """A subclass of one of vLLM's classes of routers, whose objects can take it.

    Its objects have `paceline_layer`, what caps them (None until the model is loaded, and for draft
    models), `paceline_name` of their MoE layer, `paceline_slots`, ids a token after expansion (0
    where nothing can expand), and `logical_ids` [tokens, k] chosen last, before EPLB's replicas.
    """

    class Capped(router):  # type: ignore[misc]
        paceline_layer: Any = None
        paceline_name: str = ""
        paceline_slots: int = 0
        logical_ids: Tensor | None = None

        @property
        def routing_method_type(self) -> Any:
            """Off the CPU no kernel may route by itself."""
            known = super().routing_method_type
            return known if current_platform.is_cpu() else RoutingMethodType.Custom

        def _apply_eplb_mapping(self, topk_ids: Tensor) -> Tensor:
            if self.eplb_state is not None:
                self.logical_ids = topk_ids
            return super()._apply_eplb_mapping(topk_ids)  # type: ignore[no-any-return]

        def _select_experts(
            self, hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            weights, ids = super()._select_experts(hidden_states, router_logits, *args, **kwargs)
            if not self.paceline_name:
                return weights, ids
            slots = self.paceline_slots
            if not torch.compiler.is_compiling():  # no graph is made: an operator would only cost
                if slots:
                    return operators.expanded(
                        self.paceline_layer, weights, ids, hidden_states, router_logits, slots
                    )
                if self.paceline_layer is not None:
                    self.paceline_layer.cap(weights, ids, hidden_states, router_logits)
                return weights, ids
            name = _encode_layer_name(self.paceline_name)
            if slots:
                wide: tuple[Tensor, Tensor] = torch.ops.paceline_vllm.expand(
                    weights, ids, hidden_states, router_logits, name, slots
                )
                return wide
            torch.ops.paceline_vllm.cap(weights, ids, hidden_states, router_logits, name)
            return weights, ids

    Capped.__name__ = Capped.__qualname__ = f"Capped{router.__name__}"
    return Capped


def is_capped(router: Any) -> bool:
    """Whether a router passes its choice through the cap."""
    return hasattr(router, "paceline_layer")


def _take(router: Any) -> Any:
    """Give a router the capped class; what is no BaseRouter stays, and is refused later."""
    if isinstance(router, BaseRouter) and not is_capped(router):
        kind: Any = type(router)
        router.__class__ = capped_class(kind)
    return router


def install(slots_of: Callable[[Any], int]) -> None:
    """Wrap what makes routers and layers, and the CPU's experts; twice is once.

    Args:
        slots_of: (MoE runner) -> ids a token after expansion, 0 for no expansion.
    """
    if getattr(moe_layer.create_fused_moe_router, "paceline", False):
        return
    create = moe_layer.create_fused_moe_router

    @wraps(create)
    def create_fused_moe_router(*args: Any, **kwargs: Any) -> Any:
        return _take(create(*args, **kwargs))

    create_fused_moe_router.paceline = True  # type: ignore[attr-defined]
    moe_layer.create_fused_moe_router = create_fused_moe_router

    init = MoERunner.__init__

    @wraps(init)
    def runner_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        router = _take(self.router)
        if is_capped(router):
            router.paceline_name = self.layer_name
            router.paceline_slots = slots_of(self)

    MoERunner.__init__ = runner_init
    VllmConfig.compute_hash = _marked(VllmConfig.compute_hash)
    # of experts whose layer isn't capped; see `CappedModel`
    CPUUnquantizedExperts.paceline_layer, CPUUnquantizedExperts.paceline_name = None, ""
    CPUUnquantizedExperts.apply = _cpu_apply(CPUUnquantizedExperts.apply)


def _marked(compute_hash: Any) -> Any:
    @wraps(compute_hash)
    def marked(self: Any, *args: Any, **kwargs: Any) -> str:
        return f"{compute_hash(self, *args, **kwargs)}-{COMPILE_MARK}"

    return marked


def _cpu_apply(apply: Any) -> Any:
    @wraps(apply)
    def capped_apply(self: Any, **given: Any) -> None:
        if self._use_zentorch:
            apply(self, **given)
            return
        arguments = (
            given["output"], given["hidden_states"], given["w1"], given["w2"],
            self.w1_bias, self.w2_bias, given["topk_weights"], given["topk_ids"],
            given["expert_map"], given["activation"].value, self.isa,
            given["apply_router_weight_on_input"],
        )  # fmt: skip
        if torch.compiler.is_compiling():
            name = _encode_layer_name(self.paceline_name)
            torch.ops.paceline_vllm.cpu_experts(*arguments, name)
            return
        cpu_experts.fused_experts(*arguments)
        layer = self.paceline_layer
        if layer is not None and layer.stand_ins is not None:
            layer.stand_ins.add(given["output"], given["hidden_states"])

    return capped_apply
