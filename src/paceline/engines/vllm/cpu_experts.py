"""vLLM's CPU experts on the kept (token, expert) pairs alone, so that a dropped pair costs no row.

No kernel for CPUs can skip an id: neither a dropped slot nor, under expert parallelism, an expert
of another rank may reach it. If every slot stays, the kernel is called as vLLM calls it. Otherwise
it gets one row per kept pair: inputs are gathered, and the outputs of a token's pairs are summed.
That holds for every kernel that takes any number of rows with any k, whatever its weights are
quantised to; `try_experts` tries it at the start. Per pair it takes about as long as a fixed number
of columns of an expert's width, whatever the hidden size, since both grow with it. So it saves time
only if enough pairs are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from paceline.engines.serving.kept_rows import run_pairs

PAIR_COST = {"amx": 200, "vec": 64}
"""Kernel -> columns of an expert's width that take as long as to gather a pair and to add it up.
benchmarks/vllm_kernel.py measured, where both ways take equally long, 45 to 90 in float32 (vec) and
80 to 260 in bfloat16 (amx), with experts of width 64 to 1,024 on one core of a Xeon."""

LITTLE_WORK = 1 << 23
"""Multiply-adds of a matrix that a layer's experts do in about half a millisecond: below it both
ways take equally long, and the rows computed may as well be the rows counted."""


@dataclass(frozen=True)
class ExpertCost:
    """Cost of a layer's experts in a CPU's kernel.

    Attributes:
        hidden: size of a token.
        width: of an expert in this process.

    >>> ExpertCost(512, 1024).skipping_pays(dropped=1000, assignments=8192)
    True
    >>> ExpertCost(192, 64).skipping_pays(dropped=1000, assignments=8192)
    False
    """

    hidden: int
    width: int
    isa: str = "vec"

    @property
    def pair_cost(self) -> int:
        """Entry of `PAIR_COST`, that of "vec" for a kernel that was never measured."""
        return PAIR_COST.get(self.isa, PAIR_COST["vec"])

    @property
    def share_that_pays(self) -> float:
        """Share of dropped pairs above which to skip them saves time.

        >>> round(ExpertCost(512, 1024).share_that_pays, 3)
        0.059
        """
        return self.pair_cost / (self.pair_cost + self.width)

    def skipping_pays(self, dropped: int, assignments: int) -> bool:
        """Return True if the kernel is quicker, or hardly slower, on the kept pairs alone.

        Args:
            dropped: number of dropped assignments.
            assignments: number of assignments of the forward.
        """
        if assignments * self.hidden * self.width <= LITTLE_WORK:
            return True
        return dropped * self.width > (assignments - dropped) * self.pair_cost


# -- patch -----------------------------------------------------------------------------------------


def patch_experts(kernel: Any, routed: Any, layer: Any, name: str) -> None:
    """Let a layer's experts leave out dropped slots; those of its class elsewhere stay as they are.

    Args:
        kernel: the layer's FusedMoEExpertsModular.
        routed: the layer's RoutedExperts.
        layer: its `CappedLayer`, None while the kernel is tried.
        name: of the layer.
    """
    owner: Any = next(cls for cls in type(kernel).__mro__ if "apply" in vars(cls))
    if not hasattr(owner.apply, "paceline_stock"):
        owner.apply = _patched(owner.apply)
    empty = torch.empty(0)
    kernel.paceline_layer, kernel.paceline_name = layer, name
    kernel.paceline_arguments = {  # as `FusedMoEKernelModularImpl` gives them on a CPU
        "activation": routed.activation,
        "global_num_experts": routed.global_num_experts,
        "a1q_scale": None,
        "a2_scale": kernel.a2_scale,
        "workspace13": empty,
        "workspace2": empty,
        "expert_tokens_meta": None,
        "apply_router_weight_on_input": routed.apply_router_weight_on_input,
    }


def _patched(apply: Any) -> Any:
    @wraps(apply)
    def capped_apply(self: Any, **given: Any) -> None:
        name = getattr(self, "paceline_name", None)
        if name is None:  # a draft model's
            apply(self, **given)
            return
        rows = {key: given.pop(key) for key in _ROWS}
        if torch.compiler.is_compiling():
            from vllm.utils.torch_utils import _encode_layer_name

            torch.ops.paceline_vllm.cpu_experts(**rows, layer=_encode_layer_name(name))
            return
        run_kept(self, given, **rows)

    capped_apply.paceline_stock = apply  # type: ignore[attr-defined]
    return capped_apply


_ROWS = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "expert_map")
"""Arguments of `apply` that a compiled graph passes on; the others never change."""


def _stock(kernel: Any) -> Any:
    """Return `apply` of a patched kernel's class as vLLM has it."""
    kind: Any = type(kernel)
    return kind.apply.paceline_stock


def run_kept(
    kernel: Any,
    arguments: dict[str, Any],
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
) -> None:
    """Run patched experts on the kept pairs, and add the stand-ins of the dropped ones.

    Args:
        kernel: with `paceline_layer`.
        arguments: further ones of its `apply`.
        output: [tokens, hidden], written to; exact zeros for a token without kept pairs.
        hidden_states: [tokens, hidden].
        w1, w2: weights of the local experts, in the kernel's form.
        topk_weights: [tokens, slots] float32.
        topk_ids: [tokens, slots] int32 experts; negative: dropped.
        expert_map: [experts] int32 local id of each expert, negative for another rank's; None:
            all are local.
    """
    stock = _stock(kernel)

    def experts(output: Tensor, hidden: Tensor, weights: Tensor, ids: Tensor) -> None:
        stock(
            kernel, output=output, hidden_states=hidden, w1=w1, w2=w2,
            topk_weights=weights.contiguous(), topk_ids=ids.contiguous(), expert_map=None,
            **arguments,
        )  # fmt: skip

    run_pairs(experts, output, hidden_states, topk_weights, topk_ids, expert_map)
    layer = kernel.paceline_layer
    if layer is not None and layer.stand_ins is not None:
        layer.stand_ins.add(output, hidden_states)


# -- trial -----------------------------------------------------------------------------------------


class TrialFailed(ValueError):
    """Experts that don't compute the kept pairs alone when they get one row per pair."""


def try_experts(kernel: Any, routed: Any, k: int) -> None:
    """Compare a layer's own experts on the kept pairs with all pairs, dropped ones at weight 0.

    Random rows, of which one keeps nothing and one everything. Where all pairs together give no
    finite number, as made-up weights may, nothing is compared.

    Args:
        kernel: patched by `patch_experts`.
        routed: the layer's RoutedExperts.
        k: experts per token.

    Raises:
        TrialFailed: saying what came.
    """
    dtype, rng = kernel.moe_config.in_dtype, torch.Generator().manual_seed(0)
    hidden = torch.randn(_TRIED, kernel.moe_config.hidden_dim, generator=rng).to(dtype)
    here = torch.arange(routed.global_num_experts)
    local = here
    if routed.expert_map is not None:
        here = (routed.expert_map >= 0).nonzero().flatten()
        local = routed.expert_map[here]
    chosen = torch.rand(_TRIED, len(here), generator=rng).topk(min(k, len(here))).indices
    weights = torch.rand(chosen.shape, generator=rng)
    dropped = torch.rand(chosen.shape, generator=rng) < 0.4
    dropped[0], dropped[1] = True, False
    arguments = {"w1": routed.w13_weight, "w2": routed.w2_weight}
    weights = weights.masked_fill(dropped, 0)
    wanted, got = torch.full((2, *hidden.shape), _UNWRITTEN, dtype=dtype)
    try:
        _stock(kernel)(
            kernel, output=wanted, hidden_states=hidden.clone(), topk_weights=weights.clone(),
            topk_ids=local[chosen].int(), expert_map=None, **arguments, **kernel.paceline_arguments,
        )  # fmt: skip
        run_kept(
            kernel, kernel.paceline_arguments, got, hidden.clone(), topk_weights=weights,
            topk_ids=here[chosen].int().masked_fill(dropped, -1), expert_map=routed.expert_map,
            **arguments,
        )  # fmt: skip
    except Exception as raised:  # whatever a kernel raises is an answer
        why = f"{type(raised).__name__}: {str(raised).strip() or 'no reason'}"
        raise TrialFailed(why) from raised
    if bool(((wanted == _UNWRITTEN) | (got == _UNWRITTEN)).any()):
        raise TrialFailed("some outputs were not written")
    known = torch.isfinite(wanted)  # made-up weights may give anything
    if not bool(known.any()):
        return
    error = float((got[known].double() - wanted[known].double()).abs().max())
    most = _ROUNDINGS * torch.finfo(dtype).eps * float(wanted[known].double().abs().max())
    if not error <= most:  # NaN too
        raise TrialFailed(f"outputs differ by {error:.2g} where rounding explains {most:.2g}")


_TRIED, _ROUNDINGS = 24, 8
_UNWRITTEN = 12352.0  # exact in bfloat16 and float16; no output of tried experts
