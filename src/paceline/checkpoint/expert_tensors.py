"""The tensors of a checkpoint that change when the experts of a layer change places.

Found from names and shapes alone, since a checkpoint may be larger than memory. Experts are below
a component `experts`, numbered (`experts.7.down_proj.weight`) or stacked (first dimension E), or
are 3-dimensional tensors beside a router; the router is a component `gate` or `router`. A tensor
that concerns experts and fits none of these is refused, never left as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Shapes = Mapping[str, tuple[int, ...]]

_NUMBERED = re.compile(r"(?P<before>(?:.*\.)?experts\.(?:expert_)?)(?P<number>\d+)(?P<after>\..+)")
_ROUTERS = ("gate", "router", "moe_statics")
_OF_EXPERTS = re.compile(r"expert|router|e_score|tid2eid|balancing")  # in a tensor's name
_SHARED = re.compile(r"shared?_|_shared")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component

Kind = Literal["rename", "rows", "columns", "blocks", "values"]
"""Kinds of change of a tensor: the number in its name; the first E rows (dimension 0) or columns
(dimension 1) change places; E equal blocks of rows do; or it holds expert ids itself."""


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer in a checkpoint.

    Attributes:
        name: module that holds experts and router, as the checkpoint names it.
        tensors: every tensor that changes with the experts, and how.

    >>> ExpertLayer("layers.0.mlp", 2, {"layers.0.mlp.gate.weight": "rows"}).num_experts
    2
    """

    name: str
    num_experts: int
    tensors: Mapping[str, Kind]


def renamed(name: str, place_of: Sequence[int]) -> str:
    """Return the name of a numbered expert's tensor once expert e is number `place_of[e]`.

    >>> renamed("layers.0.mlp.experts.1.up_proj.weight", [1, 0])
    'layers.0.mlp.experts.0.up_proj.weight'
    """
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return name
    return f"{found['before']}{place_of[int(found['number'])]}{found['after']}"


def find_expert_layers(shapes: Shapes, hidden_layers: int | None = None) -> list[ExpertLayer]:
    """Find the layers with experts, in order.

    Args:
        shapes: of every tensor of the checkpoint, by name.
        hidden_layers: layers of the model; layers after them (for multi-token prediction) are in no
            placement and are left out. None: unknown.

    Raises:
        ValueError: if there is none, or the form of a tensor is unknown.

    >>> experts = {f"layers.0.mlp.experts.{e}.w.weight": (4, 4) for e in range(2)}
    >>> find_expert_layers(experts | {"layers.0.mlp.gate.weight": (2, 4)})[0].name
    'layers.0.mlp'
    """
    blocks = sorted(_blocks(shapes), key=_natural)
    inside = [b for b in blocks if hidden_layers is None or _layer_number(b) < hidden_layers]
    if not inside:
        raise ValueError("the checkpoint has no routed experts: it is a dense model.")
    stacks = sorted({_NUMBER.split(block, maxsplit=1)[0] for block in inside})
    if len(stacks) > 1:
        raise ValueError(
            f"the checkpoint has experts under {' and '.join(stacks)}: which of them a plan is for "
            "is unknown."
        )
    return [_layer(block, shapes, [b for b in blocks if b != block]) for block in inside]


def _blocks(shapes: Shapes) -> set[str]:
    """Find the modules with experts and a router."""
    scored: dict[str, set[int]] = {}  # module with a router -> rows of the router's tensors
    for name, shape in shapes.items():
        parts = _parts(name)
        for i, part in enumerate(parts[:-1]):
            if part in _ROUTERS and len(shape) == 2:
                scored.setdefault(".".join(parts[:i]), set()).add(shape[0])
    blocks = set()
    for name, shape in shapes.items():
        if _SHARED.search(name):
            continue
        parts = _parts(name)
        if "experts" in parts[:-1]:
            blocks.add(".".join(parts[: parts.index("experts")]))
        elif len(shape) == 3:
            # stacked beside the router, as in moe.up_proj.weight beside moe.gate.weight
            above = {".".join(parts[:-1]), ".".join(parts[:-2])}
            blocks |= {module for module in above if shape[0] in scored.get(module, ())}
    return blocks


def _layer(block: str, shapes: Shapes, others: list[str]) -> ExpertLayer:
    near = _near(block, shapes, others)
    numbered = {n: m for n in near if (m := _NUMBERED.fullmatch(n)) is not None}
    inside = {n: s for n, s in near.items() if _is_below(n, block) and n not in numbered}
    router = {n: s for n, s in inside.items() if _first(n, block) in _ROUTERS}
    stacked = {n: s for n, s in inside.items() if _first(n, block) == "experts"}
    if not stacked and not numbered:
        stacked = {n: s for n, s in inside.items() if n not in router and len(s) == 3}
    count = _count(block, numbered.values(), stacked, router)
    rows = _router_rows(block, router, count)
    tensors: dict[str, Kind] = {
        name: "rename" for name, match in numbered.items() if int(match["number"]) < count
    }
    for name, shape in near.items():
        kind: Kind | None = None
        if name in stacked:
            kind = _stacked_kind(name, shape, count)
        elif name in router or (name not in numbered and _concerns_experts(name, block)):
            kind = _router_kind(name, shape, count, rows)
        if kind is not None:
            tensors[name] = kind
    return ExpertLayer(block, count, tensors)


def _near(block: str, shapes: Shapes, others: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a block's decoder layer, without other blocks and shared experts."""
    layer = _decoder_layer(block)
    return {
        name: shape
        for name, shape in shapes.items()
        if _is_below(name, layer)
        and not _SHARED.search(name)
        and not any(_is_below(name, other) for other in others)
    }


def _concerns_experts(name: str, block: str) -> bool:
    """Check if a tensor outside the router is named like one of its own, as mlp.expert_bias is."""
    layer = _decoder_layer(block)
    return _OF_EXPERTS.search(name[len(layer) :]) is not None


def _count(
    block: str,
    numbered: Iterable[re.Match[str]],
    stacked: Shapes,
    router: Shapes,
) -> int:
    """Count the experts of a block: their numbers, or the first dimension of stacked ones."""
    by_tensor: dict[str, set[int]] = {}
    for match in numbered:
        by_tensor.setdefault(match["before"] + match["after"], set()).add(int(match["number"]))
    counts = {len(numbers) for numbers in by_tensor.values()}
    if any(numbers != set(range(len(numbers))) for numbers in by_tensor.values()):
        counts.add(0)
    if counts & {shape[0] for shape in router.values()} and 0 not in counts:
        counts = {min(counts)}  # the others are the router's experts that compute nothing
    counts |= {shape[0] for shape in stacked.values() if len(shape) >= 3}
    if not counts:  # experts in one matrix, one after the other
        counts = {shape[0] for shape in router.values() if len(shape) == 2}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"{block} can't be reordered: how many experts it has is not clear from its tensors "
            f"({sorted(counts)})."
        )
    return counts.pop()


def _router_rows(block: str, router: Shapes, count: int) -> int:
    """Count the rows of the router's scores: the experts, or more where it also scores others."""
    # a matrix with the experts in its columns is in a form that isn't known
    rows = {s[0] for s in router.values() if len(s) == 2 and (s[0] == count or s[1] != count)}
    more = [r for r in rows if count < r <= 2 * count]
    if count in rows:
        return count
    if not more:
        raise ValueError(
            f"{block} can't be reordered: no tensor of a gate or router in it has a row for each "
            f"of its {count} experts."
        )
    return min(more)  # experts that compute nothing come after the others


def _stacked_kind(name: str, shape: tuple[int, ...], count: int) -> Kind | None:
    if shape and shape[0] == count:
        return "rows"
    if len(shape) == 2 and shape[0] % count == 0 and re.search(r"experts\.mlp\.(w1|v1|w2)$", name):
        return "blocks"
    if len(shape) <= 1:
        return None  # one for all experts
    raise ValueError(f"{name} {list(shape)} can't be reordered: its form is not known.")


def _router_kind(name: str, shape: tuple[int, ...], count: int, rows: int) -> Kind | None:
    if name.endswith("tid2eid"):
        return "values"
    if shape and shape[0] in (count, rows):
        return "rows"
    if shape in ((1, count), (1, rows)):
        return "columns"
    if count in shape:
        raise ValueError(f"{name} {list(shape)} can't be reordered: its form is not known.")
    return None


def _decoder_layer(block: str) -> str:
    """Return the name up to its last number: the decoder layer."""
    numbers = list(_NUMBER.finditer(block))
    return block[: numbers[-1].end()] if numbers else block


def _is_below(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _first(name: str, block: str) -> str:
    """Return the component of a name right below a module."""
    return _parts(name[len(block) + 1 :] if block else name)[0]


def _parts(name: str) -> list[str]:
    return name.split(".")


def _natural(name: str) -> list[tuple[int, str]]:
    """Make a sort key with numbers as numbers."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]


def _layer_number(block: str) -> int:
    found = _NUMBER.search(block)
    return int(found.group()) if found else 0
