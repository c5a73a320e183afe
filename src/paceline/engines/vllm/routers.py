"""Capped routers, and the custom operators behind which torch.compile does not look.

A compiled graph calls the operators in every forward, so they read the state that is in force then.
No `from __future__ import annotations` here: vLLM reads the operators' schemas from annotations.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from paceline.engines.serving.capped_layer import widen
from paceline.engines.vllm.cpu_experts import run_kept

LIBRARY = Library("paceline_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def capped_class(router: Any) -> Any:
    """Return a subclass of one of vLLM's router classes that an existing router can be given.

    Its objects have `paceline_layer`, the `CappedLayer` (None until the model is loaded, and for
    draft models), `paceline_name` of their MoE layer, `paceline_slots`, ids per token after
    expansion (0 if nothing can expand), and `logical_ids` [tokens, k] that were chosen last, before
    EPLB replaces them by ids of replicas.
    """

    class Capped(router):  # type: ignore[misc]
        paceline_layer: Any = None
        paceline_name: str = ""
        paceline_slots: int = 0
        logical_ids: Tensor | None = None

        @property
        def routing_method_type(self) -> Any:
            """Method for which no kernel routes by itself, except on a CPU."""
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
            if not torch.compiler.is_compiling():  # without a graph an operator only costs time
                if slots:
                    return _expand_with(
                        self.paceline_layer, weights, ids, hidden_states, router_logits, slots
                    )
                if self.paceline_layer is not None:
                    self.paceline_layer.cap(weights, ids, hidden_states, router_logits)
                return weights, ids
            name = _encode_layer_name(self.paceline_name)
            if slots:
                return torch.ops.paceline_vllm.expand(  # type: ignore[no-any-return]
                    weights, ids, hidden_states, router_logits, name, slots
                )
            torch.ops.paceline_vllm.cap(weights, ids, hidden_states, router_logits, name)
            return weights, ids

    Capped.__name__ = Capped.__qualname__ = f"Capped{router.__name__}"
    return Capped


def is_capped(router: Any) -> bool:
    """Return True if a router passes its choice through the cap."""
    return hasattr(router, "paceline_layer")


# -- operators -------------------------------------------------------------------------------------


def _layer_of(name: Any) -> Any:
    """Return the capped layer of this name in the running model, None if it has none."""
    resolved = _resolve_layer_name(name)
    if not resolved:
        return None
    return get_forward_context().no_compile_layers[resolved].router.paceline_layer


def _cap(
    weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: LayerNameType
) -> None:
    capped = _layer_of(layer)
    if capped is not None:
        capped.cap(weights, ids, hidden, logits)


def _expand(
    weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: LayerNameType, slots: int
) -> tuple[Tensor, Tensor]:
    return _expand_with(_layer_of(layer), weights, ids, hidden, logits, slots)


def _expand_with(
    layer: Any, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, slots: int
) -> tuple[Tensor, Tensor]:
    """Return [tokens, slots] weights and ids; `layer` is None for a draft model's layer."""
    if layer is None:
        return widen(weights, slots, 0), widen(ids, slots, -1)
    return layer.expand(weights, ids, hidden, logits, slots)  # type: ignore[no-any-return]


def _expand_fake(
    weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: LayerNameType, slots: int
) -> tuple[Tensor, Tensor]:
    shape = (ids.shape[0], slots)
    return weights.new_empty(shape), ids.new_empty(shape)


def _cpu_experts(
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    layer: LayerNameType,
) -> None:
    runner = get_forward_context().no_compile_layers[_resolve_layer_name(layer)]
    kernel = runner.routed_experts.quant_method.moe_kernel.fused_experts
    run_kept(kernel, kernel.paceline_arguments, output, hidden_states, w1, w2,
             topk_weights, topk_ids, expert_map)  # fmt: skip


def _return_nothing(*args: Any) -> None:
    """Return nothing, as an operator does that only writes to its arguments."""


if not hasattr(torch.ops.paceline_vllm, "cap"):
    direct_register_custom_op(
        "cap", _cap, mutates_args=["weights", "ids"], fake_impl=_return_nothing, target_lib=LIBRARY
    )
    direct_register_custom_op("expand", _expand, fake_impl=_expand_fake, target_lib=LIBRARY)
    direct_register_custom_op(
        "cpu_experts", _cpu_experts, mutates_args=["output"], fake_impl=_return_nothing,
        target_lib=LIBRARY, dispatch_key="CPU",
    )  # fmt: skip
