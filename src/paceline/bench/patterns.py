"""Synthetic routing whose loads are exact: the workloads W0 to W7 of Megatron-LM#7488.

Each isolates one cause of imbalance. A pattern says how many assignments every expert gets; tokens
are then dealt so that each has k distinct experts, and shuffled over the devices that hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.bench.workload import Shape, Workload, softmax_gate
from paceline.placement import ExpertPlacement
from paceline.routing import RoutingInputs

TITLES = (
    "balanced",
    "hot experts",
    "hot device",
    "hot experts spread over devices",
    "ragged sources",
    "experts and a device without load",
    "rotating hot device",
    "burst",
)

BURST = 4
"""Steps from one burst of W7 to the next; the last of them is the burst."""


@dataclass(frozen=True)
class Pattern:
    """One of the workloads, in one step of a run.

    Attributes:
        number: 0 to 7, an index of `TITLES`.
        step: from 0; of W6 and W7.
    """

    number: int
    step: int = 0

    def __str__(self) -> str:
        """Return such as "W6, rotating hot device, step 2"."""
        return f"W{self.number}, {TITLES[self.number]}, step {self.step}"


def named_pattern(text: str) -> Pattern:
    """Return the pattern of a name: W0 to W7, with ":STEP" for another step than the first.

    Raises:
        ValueError: if there is none.

    >>> str(named_pattern("W6:2"))
    'W6, rotating hot device, step 2'
    """
    name, _, step = text.partition(":")
    known = {f"W{number}": number for number in range(len(TITLES))}
    if name.upper() not in known or not (step or "0").isdigit():
        raise ValueError(f"workload must be W0 to W{len(TITLES) - 1}, or W6:STEP, got {text!r}.")
    return Pattern(known[name.upper()], int(step or 0))


def expert_loads(
    pattern: Pattern, k: int, tokens: int, peak_to_mean: float, placement: ExpertPlacement
) -> list[int]:
    """Return the exact number of assignments of each expert, [E]; their sum is tokens * k.

    The hot experts of W1 to W3, W6 and W7 share `peak_to_mean` times an average device's load:
    all experts of a device; in W1 half of them, and in W3 as many, spread over the devices.

    Args:
        k: experts per token.
        tokens: of all devices.
        peak_to_mean: of the hot experts together, 1 to the number of devices.

    Raises:
        ValueError: if an expert would get more assignments than there are tokens.

    >>> expert_loads(Pattern(2), 1, 16, 2, ExpertPlacement.contiguous(4, 2))
    [8, 8, 0, 0]
    """
    if not 1 <= peak_to_mean <= placement.num_devices:
        raise ValueError(
            f"peak_to_mean must be 1 to {placement.num_devices}, the devices, got {peak_to_mean}."
        )
    every = range(placement.num_experts)
    none = set(_unused(placement)) if pattern.number == 5 else set()
    hot = _hot(pattern, placement)
    others = [expert for expert in every if expert not in none and expert not in hot]
    total = tokens * k
    share = round(peak_to_mean * total / placement.num_devices) if hot else 0
    share = share if others else total
    loads = [0] * placement.num_experts
    for experts, amount in ((hot, share), (others, total - share)):
        for index, expert in enumerate(experts):
            loads[expert] = amount // len(experts) + (index < amount % len(experts))
    if max(loads) > tokens:
        raise ValueError(
            f"W{pattern.number} is not possible with k={k}, {placement.num_devices} devices and "
            f"peak_to_mean={peak_to_mean}: {tokens} tokens can't give an expert {max(loads)} "
            "assignments."
        )
    return loads


def pattern_workloads(
    pattern: Pattern,
    shape: Shape,
    tokens: int,
    peak_to_mean: float,
    placement: ExpertPlacement,
    sources: int,
) -> list[Workload]:
    """Return the tokens of every source, `tokens` each; in W4 the first has most.

    Args:
        sources: devices that hold tokens of their own.

    Raises:
        ValueError: as `expert_loads` does.
    """
    rows = tokens * sources
    loads = expert_loads(pattern, shape.k, rows, peak_to_mean, placement)
    runs = torch.repeat_interleave(torch.arange(shape.experts), torch.tensor(loads))
    # a run of at most `rows` equal entries never comes back to the same token
    ids = runs.view(shape.k, rows).T
    drawn = torch.Generator().manual_seed(1_000 * pattern.number + pattern.step)
    ids = ids[torch.randperm(rows, generator=drawn)].contiguous()
    weights = torch.rand(ids.shape, generator=drawn).sort(dim=1, descending=True).values
    weights /= weights.sum(dim=1, keepdim=True)
    hidden = torch.randn((rows, shape.hidden), generator=drawn)
    compute = softmax_gate(
        torch.zeros((shape.experts, shape.hidden)), torch.zeros(shape.experts), shape.k
    )
    found, start = [], 0
    for size in source_sizes(pattern, tokens, sources):
        part = slice(start, start + size)
        choice = RoutingInputs(
            topk_ids=ids[part],
            topk_weights=weights[part],
            topk_scores=weights[part],
            num_experts=shape.experts,
        )

        def gate(own: torch.Tensor, choice: RoutingInputs = choice) -> RoutingInputs:
            compute(own)  # costs what a gate costs
            return choice

        label = f"{shape.name}, {pattern}"
        found.append(Workload(label, hidden[part].clone(), gate, shape, str(pattern)))
        start += size
    return found


def source_sizes(pattern: Pattern, tokens: int, sources: int) -> list[int]:
    """Return the tokens of each source; alike, or in W4 as N : N - 1 : ... : 1.

    >>> source_sizes(Pattern(4), 6, 3)
    [9, 6, 3]
    """
    if pattern.number != 4:
        return [tokens] * sources
    rows, parts = tokens * sources, sources * (sources + 1) // 2
    ends = [rows * sum(range(sources - n, sources + 1)) // parts for n in range(sources)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _hot(pattern: Pattern, placement: ExpertPlacement) -> Sequence[int]:
    """Return the experts that share the hot load; none: all are alike."""
    number, devices = pattern.number, placement.num_devices
    device = pattern.step % devices if number == 6 else 0
    own = placement.experts_of(device)
    if number == 1:
        return own[: (len(own) + 1) // 2]
    if number == 3:  # as many as the device has, one of each device in turn
        hosted = [placement.experts_of(d) for d in range(devices)]
        turns = [e[i] for i in range(max(map(len, hosted))) for e in hosted if i < len(e)]
        return turns[: len(own)]
    if number in (2, 6) or (number == 7 and pattern.step % BURST == BURST - 1):
        return own
    return ()


def _unused(placement: ExpertPlacement) -> Sequence[int]:
    """Return the experts of the last device, and the last expert of any other with several."""
    last = placement.num_devices - 1
    others = [placement.experts_of(device) for device in range(last)]
    return [*placement.experts_of(last), *[own[-1] for own in others if len(own) > 1]]
