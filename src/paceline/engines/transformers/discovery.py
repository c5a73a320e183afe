"""Find a model's Mixture-of-Experts layers by what they do, not by a list of architectures.

The seam that nearly all architectures of Transformers share: a block with a child `experts`,
called as `experts(hidden_states, top_k_index, top_k_weights)`, and a sibling `gate` or `router`
whose output holds the logits of all experts. Every layer is run once on random rows, with the
experts replaced by nothing, so that a block that only looks like the seam is refused instead of
silently left alone.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engines.transformers.forwards import (
    argument_names,
    bind,
    replaced_forward,
    undisturbed,
)

PROBE_ROWS = 64
_ROUTER_NAMES = ("gate", "router")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_CLASS = re.compile(r"(?<!Shared)Experts?(?!Parallel)")


EXPERT_PARALLEL = "_paceline_ep"
"""Where an experts module keeps its `ExpertParallel`, if it has one."""


def spread_over_ranks(experts: nn.Module) -> bool:
    """Whether Paceline's expert parallelism brings these experts their tokens."""
    return EXPERT_PARALLEL in experts.__dict__


@dataclass(frozen=True, eq=False)
class Site:
    """One MoE layer as found: where it is, before anything is known of what it computes."""

    name: str
    block: nn.Module
    experts: nn.Module
    router: nn.Module

    @property
    def device(self) -> torch.device:
        """Where the experts are."""
        return next(iter(self.experts.parameters())).device


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


def find_sites(model: nn.Module) -> list[Site]:
    """The MoE layers of a model, in order.

    Raises:
        ValueError: if there is none (a dense model), or one that doesn't follow the seam.
    """
    sites = []
    for name, block in model.named_modules():
        experts = block._modules.get("experts")
        if experts is None:
            continue
        routers = [block._modules[n] for n in _ROUTER_NAMES if block._modules.get(n) is not None]
        if not routers:
            raise ValueError(
                f"layer {name} ({type(block).__name__}) can't be handled: it has experts, but no "
                "child named gate or router that chooses them."
            )
        if not any(True for _ in experts.parameters()):
            raise ValueError(
                f"layer {name} ({type(block).__name__}) can't be handled: its experts "
                "have no weights."
            )
        if any(p.is_meta for m in (experts, routers[0]) for p in m.parameters()):
            raise ValueError(
                f"layer {name} can't be handled: weights are on the meta device (offloaded, or not "
                "loaded yet)."
            )
        sites.append(Site(name, block, experts, routers[0]))
    _refuse_leftovers(model, sites)
    return sites


def _refuse_leftovers(model: nn.Module, sites: list[Site]) -> None:
    """Nothing that looks like experts may be left out silently."""
    covered = {id(m) for site in sites for m in site.block.modules()}
    for name, module in model.named_modules():
        if id(module) not in covered and _EXPERT_CLASS.search(type(module).__name__):
            raise ValueError(
                f"layer {name} ({type(module).__name__}) can't be handled: it has experts "
                "that are not "
                "called as experts(hidden_states, top_k_index, top_k_weights) beside a "
                "gate or router."
            )
    if sites:
        return
    count = _configured_experts(getattr(model, "config", None))
    if count > 1:
        raise ValueError(
            f"{type(model).__name__} can't be handled: its config names {count} experts, "
            "but no layer "
            "has experts called as experts(hidden_states, top_k_index, top_k_weights)."
        )
    raise ValueError(
        f"{type(model).__name__} has no Mixture-of-Experts layer: it is a dense model."
    )


def _configured_experts(config: Any) -> int:
    """Experts a config or one of its parts names, 0 for none."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    counts = [getattr(part, key, None) for part in parts for key in _EXPERT_COUNTS]
    return max((c for c in counts if isinstance(c, int)), default=0)


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
        seen.append((args[0] if args else next(iter(kwargs.values())), out))
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


def count_experts(site: Site, sighting: Sighting) -> int:
    """Experts of a layer that compute something: what its module says, else its weights.

    Raises:
        ValueError: if that is unknown.
    """
    if spread_over_ranks(site.experts):
        return int(site.experts.__dict__[EXPERT_PARALLEL].num_experts)
    stated = getattr(site.experts, "num_experts", None)
    stacked = [p.shape[0] for p in site.experts.parameters() if p.dim() == 3]
    if isinstance(stated, int):
        count = stated
    elif stacked:
        count = min(stacked)
    elif isinstance(site.experts, (nn.ModuleList, nn.ModuleDict)):
        count = len(site.experts)
    elif sighting.logits is not None:
        count = sighting.logits.shape[1]
    else:
        raise ValueError(f"layer {site.name} can't be handled: how many experts it has is unknown.")
    if getattr(site.experts, "_is_expert_parallel", False):
        raise ValueError(
            f"layer {site.name} can't be handled: its experts are spread over ranks "
            "(expert parallelism) by "
            "an implementation that doesn't skip dropped slots; load the model with "
            "DistributedConfig(..., "
            'ep_implementation="paceline").'
        )
    if sighting.logits is not None and sighting.logits.shape[1] < count:
        raise ValueError(
            f"layer {site.name} can't be handled: its router scores {sighting.logits.shape[1]} of "
            f"{count} experts."
        )
    return count


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
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return text if len(text) <= 160 else text[:157] + "..."
