"""The custom operators: what torch.compile can't look into, so that state is read on every run.

No `from __future__ import annotations` here: vLLM reads the schema from the annotations.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from paceline.engines.vllm import cpu_experts

LIBRARY = Library("paceline_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]


def _layer_of(name: Any) -> Any:
    """The capped layer of this name in the running model, None where it has none."""
    resolved = _resolve_layer_name(name)
    if not resolved:
        return None
    return get_forward_context().no_compile_layers[resolved].router.paceline_layer


def _cap(
    weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: LayerNameType
) -> None:
    """Mark the dropped slots of [tokens, k] `ids` and zero their `weights`, in place."""
    capped = _layer_of(layer)
    if capped is not None:
        capped.cap(weights, ids, hidden, logits)


def _expand(
    weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: LayerNameType, slots: int
) -> tuple[Tensor, Tensor]:
    """[tokens, slots] weights and ids: what is kept, and extras in the slots after the first k."""
    return expanded(_layer_of(layer), weights, ids, hidden, logits, slots)


def _expand_fake(
    weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: LayerNameType, slots: int
) -> tuple[Tensor, Tensor]:
    shape = (ids.shape[0], slots)
    return weights.new_empty(shape), ids.new_empty(shape)


def _cpu_experts(
    output: Tensor,
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    activation: str,
    isa: str,
    weighs_inputs: bool,
    layer: LayerNameType,
) -> None:
    cpu_experts.fused_experts(output, hidden, w13, w2, w13_bias, w2_bias, weights, ids,
                              expert_map, activation, isa, weighs_inputs)  # fmt: skip
    capped = _layer_of(layer)
    if capped is not None and capped.stand_ins is not None:
        capped.stand_ins.add(output, hidden)


def _nothing(*args: Any) -> None:
    """What an operator that only writes to its arguments gives."""


def expanded(
    layer: Any, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, slots: int
) -> tuple[Tensor, Tensor]:
    """[tokens, slots] weights and ids of a layer; None, a draft model's: its own, widened."""
    if layer is None:
        return widened(weights, slots, 0), widened(ids, slots, -1)
    return layer.expand(weights, ids, hidden, logits, slots)  # type: ignore[no-any-return]


def widened(tensor: Tensor, slots: int, fill: float) -> Tensor:
    """A copy [tokens, slots] of a tensor [tokens, k], the further slots filled."""
    wide = tensor.new_full((tensor.shape[0], slots), fill)
    wide[:, : tensor.shape[1]] = tensor
    return wide


def _register() -> None:
    direct_register_custom_op(
        "cap", _cap, mutates_args=["weights", "ids"], fake_impl=_nothing, target_lib=LIBRARY
    )
    direct_register_custom_op("expand", _expand, fake_impl=_expand_fake, target_lib=LIBRARY)
    direct_register_custom_op(
        "cpu_experts",
        _cpu_experts,
        mutates_args=["output"],
        fake_impl=_nothing,
        target_lib=LIBRARY,
        dispatch_key="CPU",
    )


if not hasattr(torch.ops.paceline_vllm, "cap"):
    _register()
