"""Probe of a MoE layer: one run on random rows shows its structure and which experts it chooses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engines.scoring import find_rule
from paceline.engines.transformers.layers.find import (
    EXPERT_PARALLEL,
    LayerModules,
    spread_over_ranks,
)
from paceline.engines.transformers.layers.router import RouterLinear, Scoring, logits_of
from paceline.engines.transformers.patching import replaced_forward, undisturbed
from paceline.engines.transformers.tokens.arguments import (
    argument_names,
    first_argument,
    positional,
)
from paceline.text import shortened

PROBE_ROWS = 64


@dataclass(frozen=True, eq=False)
class Probe:
    """Inputs and outputs of a layer that ran on random rows.

    Attributes:
        router_input: [rows, hidden] input of the router.
        logits: [rows, classes] the router's own logits (or probabilities), None where it returns
            none.
        logits_at: where they are among the tensors of its output.
        ids: [rows, k] chosen experts.
        weights: [rows, k] their weights.
        hidden: [rows, hidden] input of the experts.
        ran_block: whether the whole block ran (else the router alone).
    """

    router_input: Tensor
    logits: Tensor | None
    logits_at: int
    ids: Tensor
    weights: Tensor
    hidden: Tensor
    ran_block: bool


def probe(modules: LayerModules, seed: int = 0) -> Probe:
    """Run the block (or, where it needs more than hidden states, its router) on random rows.

    Leaves the random state, hooks and buffers as they were, and computes no expert.

    Raises:
        ValueError: naming the layer and why it can't be handled.
    """
    reason = "its forward couldn't be run on random rows"
    with torch.no_grad(), undisturbed(modules.block):
        sizes = _hidden_sizes(modules)
        for run in (_run_block, _run_router):
            for size in sizes:
                rows = _random_rows(modules, size, seed)
                try:
                    found = run(modules, rows)
                except _OtherStructure as error:
                    raise ValueError(f"layer {modules.name} can't be handled: {error}.") from None
                except Exception as error:  # another size, or the router alone, may work
                    reason = f"its forward couldn't be run on random rows ({_line(error)})"
                    continue
                if run is _run_block and found.logits is not None:
                    spread = float(found.logits.float().std())
                    # tell scoring rules apart, without saturating
                    if 0 < spread < 0.5 or spread > 4:
                        found = run(modules, rows * (2 / spread))
                return found
    raise ValueError(
        f"layer {modules.name} ({type(modules.block).__name__}) can't be handled: {reason}."
    )


def count_experts(modules: LayerModules, found: Probe) -> int:
    """Return how many experts of a layer compute something: by its module, else by its weights.

    Raises:
        ValueError: if that is unknown.
    """
    if spread_over_ranks(modules.experts):
        return int(modules.experts.__dict__[EXPERT_PARALLEL].num_experts)
    stated = getattr(modules.experts, "num_experts", None)
    stacked = [p.shape[0] for p in modules.experts.parameters() if p.dim() == 3]
    if isinstance(stated, int):
        count = stated
    elif stacked:
        count = min(stacked)
    elif isinstance(modules.experts, (nn.ModuleList, nn.ModuleDict)):
        count = len(modules.experts)
    elif found.logits is not None:
        count = found.logits.shape[1]
    else:
        raise ValueError(
            f"layer {modules.name} can't be handled: how many experts it has is unknown."
        )
    if getattr(modules.experts, "_is_expert_parallel", False):
        raise ValueError(
            f"layer {modules.name} can't be handled: its experts are spread over ranks (expert "
            "parallelism) by an implementation that doesn't skip dropped slots; load the model "
            'with DistributedConfig(..., ep_implementation="paceline").'
        )
    if found.logits is not None and found.logits.shape[1] < count:
        raise ValueError(
            f"layer {modules.name} can't be handled: its router scores "
            f"{found.logits.shape[1]} of {count} experts."
        )
    return count


class _OtherStructure(Exception):
    """The block ran, but its structure is not that of a MoE layer."""


def _run_block(modules: LayerModules, rows: Tensor) -> Probe:
    """Run the whole block, its experts replaced by zeros."""
    calls: list[tuple[Any, ...]] = []
    seen: list[tuple[Any, Any]] = []
    names = argument_names(modules.experts.forward)

    def no_experts(*args: Any, **kwargs: Any) -> Tensor:
        args = positional(names, args, kwargs)
        calls.append(args)
        return torch.zeros_like(args[0])

    router_forward = modules.router.forward

    def observed(*args: Any, **kwargs: Any) -> Any:
        out = router_forward(*args, **kwargs)
        seen.append((first_argument(args, kwargs), out))
        return out

    with replaced_forward(modules.experts, no_experts), replaced_forward(modules.router, observed):
        extra = {}
        if "input_ids" in inspect.signature(modules.block.forward).parameters:
            count = rows.shape[1]
            extra["input_ids"] = torch.arange(count, device=rows.device).remainder(64)[None]
        modules.block(rows, **extra)
    if not calls:
        raise _OtherStructure("its forward doesn't call its experts (is it replaced by a kernel?)")
    if len(calls) > 1:
        raise _OtherStructure(f"its forward calls its experts {len(calls)} times")
    if len(calls[0]) != 3:
        raise _OtherStructure(
            f"its experts are called with {len(calls[0])} arguments instead of hidden states, "
            "chosen experts and their weights"
        )
    hidden, ids, weights = calls[0]
    _check_choice(ids, weights)
    if ids.shape[0] * hidden.shape[-1] != hidden.numel():
        raise _OtherStructure(
            f"{ids.shape[0]} rows of choices don't match hidden states {list(hidden.shape)}"
        )
    if not seen:
        raise _OtherStructure("its forward doesn't call its router")
    router_input, out = seen[-1]
    logits, at = _find_logits(out, ids, weights)
    return Probe(_flat(router_input), logits, at, ids, weights, _flat(hidden), True)


def _run_router(modules: LayerModules, rows: Tensor) -> Probe:
    """Run the router alone: for a block that is a whole decoder layer."""
    out: Any = None
    for shaped in (rows[0], rows):
        try:
            out = modules.router(shaped)
            break
        except Exception:
            if shaped is rows:
                raise
    tensors = out if isinstance(out, (tuple, list)) else (out,)
    ids = [
        t for t in tensors if isinstance(t, Tensor) and not t.is_floating_point() and t.dim() == 2
    ]
    if len(ids) != 1:
        raise _OtherStructure("its router doesn't return the chosen experts")
    weights = [
        t for t in tensors if isinstance(t, Tensor) and t is not ids[0] and t.shape == ids[0].shape
    ]
    if len(weights) != 1:
        raise _OtherStructure("its router doesn't return the weights of the chosen experts")
    _check_choice(ids[0], weights[0])
    logits, at = _find_logits(out, ids[0], weights[0])
    return Probe(rows[0], logits, at, ids[0], weights[0], rows[0], False)


def _check_choice(ids: Any, weights: Any) -> None:
    if not isinstance(ids, Tensor) or not isinstance(weights, Tensor):
        raise _OtherStructure("its experts are not given tensors of chosen experts and weights")
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype is torch.bool:
        raise _OtherStructure(
            f"its experts are given choices of shape {list(ids.shape)} and {ids.dtype}, not "
            "expert ids [tokens, k]"
        )
    ordered = ids.sort(1).values
    if ids.shape[1] > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any(1).all()):
        raise _OtherStructure(
            "its experts are given the same expert twice in every row, so no choice of experts"
        )
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise _OtherStructure(
            f"its experts are given weights of shape {list(weights.shape)} for choices of shape "
            f"{list(ids.shape)}"
        )


def _find_logits(out: Any, ids: Tensor, weights: Tensor) -> tuple[Tensor | None, int]:
    """Return a router's first float output [tokens, classes], more than k classes, and its place.

    Where a token goes to every expert its logits have k classes too: then the first such output
    that isn't the weights.
    """
    rows, k = ids.shape
    tensors = out if isinstance(out, (tuple, list)) else (out,)
    known = [(logits_of(out, at, rows), at) for at in range(len(tensors))]
    shaped = [(t, at) for t, at in known if t is not None and t.shape[1] >= k]
    wider = [(t, at) for t, at in shaped if t.shape[1] > k]
    others = [(t, at) for t, at in shaped if not torch.equal(t.float(), weights.float())]
    return next(iter(wider or others), (None, 0))


@torch.no_grad()
def find_scoring(modules: LayerModules, found: Probe, num_experts: int) -> Scoring:
    """Find the scoring rule of a layer, from its probe."""

    def unknown(reason: str) -> Scoring:
        return Scoring(None, False, reason, num_experts)

    if found.logits is None:
        return unknown("its router returns no logits")
    if float(found.logits.float().std(1).max()) == 0:
        return unknown("its router gives all experts the same logit")
    judged = found
    if found.ids.shape[1] == 1 and _constant(found.weights):
        # one expert with weight 1 is proportional to anything: look at two of them
        two = _with_two(modules)
        if two is None:
            return unknown("one expert per token, always weighted alike, hides the scoring rule")
        judged = two
    assert judged.logits is not None
    rule, expands = find_rule(judged.logits, judged.ids, judged.weights, num_experts)
    if rule is None:
        return unknown("its weights are proportional to no known scoring function of its logits")
    reason = "its weights carry a factor of each expert, so an extra's is unknown"
    linear = _linear(modules, found)
    return Scoring(rule, expands, "" if expands else reason, num_experts, found.logits_at, linear)


def _constant(weights: Tensor) -> bool:
    return float((weights - weights.flatten()[0]).abs().max()) < 1e-6


_TOP_K_NAMES = ("top_k", "num_experts_per_tok", "k", "topk", "moe_top_k")


def _with_two(modules: LayerModules) -> Probe | None:
    """Probe the same layer with two experts per token, if its router or block can be set so."""
    for holder in (modules.router, modules.block):
        for name in _TOP_K_NAMES:
            former = holder.__dict__.get(name)
            if former != 1 or isinstance(former, bool):
                continue
            setattr(holder, name, 2)
            try:
                found = probe(modules)
                if found.ids.shape[1] == 2:
                    return found
            except ValueError:
                pass
            finally:
                setattr(holder, name, former)
    return None


def _linear(modules: LayerModules, found: Probe) -> RouterLinear | None:
    """Return the router's linear map, if its logits are just that, rounded or not.

    A model that is in float32 now may be moved to half precision while it is attached.
    """
    logits, router = found.logits, modules.router
    assert logits is not None
    matrices = [
        (name, module)
        for name, module in router.named_modules()
        for p in module.parameters(recurse=False)
        if p.dim() > 1
    ]
    if len(matrices) != 1:  # none, or an adapter's beside it
        return None
    name, holder = matrices[0]
    weight = holder._parameters.get("weight")
    if weight is None or weight.shape != (logits.shape[1], found.router_input.shape[1]):
        return None
    linear = RouterLinear(modules, router, holder, name)
    return linear if linear.explains(found.router_input, logits) else None


# -- random rows -----------------------------------------------------------------------------------


def _hidden_sizes(modules: LayerModules) -> list[int]:
    """Return possible hidden sizes, likeliest first."""
    sizes = [p.shape[-1] for p in modules.router.parameters() if p.dim() == 2]
    sizes += [p.shape[-1] for p in modules.experts.parameters() if p.dim() == 3]
    config = getattr(modules.block, "config", None)
    sizes += [getattr(config, "hidden_size", 0)]
    return [size for size in dict.fromkeys(sizes) if isinstance(size, int) and size > 0]


def _random_rows(modules: LayerModules, size: int, seed: int) -> Tensor:
    """Return [1, rows, size] random rows in the dtype that the block computes in."""
    floats = [
        p.dtype
        for p in modules.block.parameters()
        if p.is_floating_point() and p.element_size() > 1
    ]
    low = [d for d in floats if d in (torch.bfloat16, torch.float16)]
    dtype = low[0] if low else floats[0] if floats else torch.float32
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((1, PROBE_ROWS, size), generator=rng).to(modules.device, dtype)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _line(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}".split("\n")[0], 160)
