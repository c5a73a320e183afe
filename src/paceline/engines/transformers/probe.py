"""Run a MoE layer once on random rows, to see whether it follows the seam and what it chooses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.engines.transformers.discovery import Site
from paceline.engines.transformers.forwards import (
    argument_names,
    bind,
    first_argument,
    replaced_forward,
    undisturbed,
)
from paceline.text import shortened

PROBE_ROWS = 64


@dataclass(frozen=True, eq=False)
class Sighting:
    """What a layer did with random rows.

    Attributes:
        router_input: [rows, hidden] what the router was given.
        logits: [rows, classes] the router's own logits (or probabilities), None where it returns
            none.
        ids: [rows, k] chosen experts.
        weights: [rows, k] their weights.
        hidden: [rows, hidden] what the experts were given.
        ran_block: whether the whole block ran (else the router alone).
    """

    router_input: Tensor
    logits: Tensor | None
    ids: Tensor
    weights: Tensor
    hidden: Tensor
    ran_block: bool


def observe(site: Site, seed: int = 0) -> Sighting:
    """Run the block (or, where it needs more than hidden states, its router) on random rows.

    Leaves the random state, hooks and buffers as they were, and computes no expert.

    Raises:
        ValueError: naming the layer and why it doesn't follow the seam.
    """
    reason = "its forward couldn't be run on random rows"
    with torch.no_grad(), undisturbed(site.block):
        sizes = _hidden_sizes(site)
        for run in (_run_block, _run_router):
            for size in sizes:
                rows = _random_rows(site, size, seed)
                try:
                    sighting = run(site, rows)
                except _NotTheSeam as error:
                    raise ValueError(f"layer {site.name} can't be handled: {error}.") from None
                except Exception as error:  # another size, or the router alone, may work
                    reason = f"its forward couldn't be run on random rows ({_short(error)})"
                    continue
                if run is _run_block and sighting.logits is not None:
                    spread = float(sighting.logits.float().std())
                    if (
                        0 < spread < 0.5 or spread > 4
                    ):  # tell scoring rules apart, without saturating
                        sighting = run(site, rows * (2 / spread))
                return sighting
    raise ValueError(f"layer {site.name} ({type(site.block).__name__}) can't be handled: {reason}.")


class _NotTheSeam(Exception):
    """The block ran, but not as the seam wants."""


def _run_block(site: Site, rows: Tensor) -> Sighting:
    calls: list[tuple[Any, ...]] = []
    seen: list[tuple[Any, Any]] = []
    names = argument_names(site.experts.forward)

    def no_experts(*args: Any, **kwargs: Any) -> Tensor:
        args = bind(names, args, kwargs)
        calls.append(args)
        return torch.zeros_like(args[0])

    router_forward = site.router.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = router_forward(*args, **kwargs)
        seen.append((first_argument(args, kwargs), out))
        return out

    with replaced_forward(site.experts, no_experts), replaced_forward(site.router, watched):
        extra = {}
        if "input_ids" in inspect.signature(site.block.forward).parameters:
            count = rows.shape[1]
            extra["input_ids"] = torch.arange(count, device=rows.device).remainder(64)[None]
        site.block(rows, **extra)
    if not calls:
        raise _NotTheSeam("its forward doesn't call its experts (is it replaced by a kernel?)")
    if len(calls) > 1:
        raise _NotTheSeam(f"its forward calls its experts {len(calls)} times")
    if len(calls[0]) != 3:
        raise _NotTheSeam(
            f"its experts are called with {len(calls[0])} arguments instead of hidden "
            "states, chosen "
            "experts and their weights"
        )
    hidden, ids, weights = calls[0]
    _check_choice(ids, weights)
    if ids.shape[0] * hidden.shape[-1] != hidden.numel():
        raise _NotTheSeam(
            f"{ids.shape[0]} rows of choices don't match hidden states {list(hidden.shape)}"
        )
    if not seen:
        raise _NotTheSeam("its forward doesn't call its router")
    router_input, out = seen[-1]
    return Sighting(_flat(router_input), find_logits(out, ids), ids, weights, _flat(hidden), True)


def _run_router(site: Site, rows: Tensor) -> Sighting:
    """The router alone: for a block that is a whole decoder layer."""
    out: Any = None
    for shaped in (rows[0], rows):
        try:
            out = site.router(shaped)
            break
        except Exception:
            if shaped is rows:
                raise
    tensors = out if isinstance(out, (tuple, list)) else (out,)
    ids = [
        t for t in tensors if isinstance(t, Tensor) and not t.is_floating_point() and t.dim() == 2
    ]
    if len(ids) != 1:
        raise _NotTheSeam("its router doesn't return the chosen experts")
    weights = [
        t for t in tensors if isinstance(t, Tensor) and t is not ids[0] and t.shape == ids[0].shape
    ]
    if len(weights) != 1:
        raise _NotTheSeam("its router doesn't return the weights of the chosen experts")
    _check_choice(ids[0], weights[0])
    return Sighting(rows[0], find_logits(out, ids[0]), ids[0], weights[0], rows[0], False)


def _check_choice(ids: Any, weights: Any) -> None:
    if not isinstance(ids, Tensor) or not isinstance(weights, Tensor):
        raise _NotTheSeam("its experts are not given tensors of chosen experts and weights")
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype is torch.bool:
        raise _NotTheSeam(
            f"its experts are given choices of shape {list(ids.shape)} and {ids.dtype}, "
            "not expert ids "
            "[tokens, k]"
        )
    ordered = ids.sort(1).values
    if ids.shape[1] > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any(1).all()):
        raise _NotTheSeam(
            "its experts are given the same expert twice in every row, so no choice of experts"
        )
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise _NotTheSeam(
            f"its experts are given weights of shape {list(weights.shape)} for choices of shape "
            f"{list(ids.shape)}"
        )


def find_logits(out: Any, ids: Tensor) -> Tensor | None:
    """[rows, classes] a router's first float output with a row a token and more classes than k."""
    for t in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2:
            flat = _flat(t)
            if flat.shape[0] == ids.shape[0] and flat.shape[1] > ids.shape[1]:
                return flat
    return None


def _hidden_sizes(site: Site) -> list[int]:
    """What the hidden size may be, likeliest first."""
    sizes = [p.shape[-1] for p in site.router.parameters() if p.dim() == 2]
    sizes += [p.shape[-1] for p in site.experts.parameters() if p.dim() == 3]
    config = getattr(site.block, "config", None)
    sizes += [getattr(config, "hidden_size", 0)]
    return [size for size in dict.fromkeys(sizes) if isinstance(size, int) and size > 0]


def _random_rows(site: Site, size: int, seed: int) -> Tensor:
    """[1, rows, size] in the dtype that the block computes in."""
    floats = [
        p.dtype for p in site.block.parameters() if p.is_floating_point() and p.element_size() > 1
    ]
    low = [d for d in floats if d in (torch.bfloat16, torch.float16)]
    dtype = low[0] if low else floats[0] if floats else torch.float32
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((1, PROBE_ROWS, size), generator=rng).to(site.device, dtype)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _short(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}".split("\n")[0], 160)
