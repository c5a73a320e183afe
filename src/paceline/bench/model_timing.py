"""Time a whole model under several policies: time to first token, and tokens a second.

On ranks each process serves prompts of its own and hosts a part of the experts. Run directly, the
devices are emulated: every layer's experts run one device after the other, and the time of all but
the slowest is taken off again. The gain is set beside Amdahl's bound, from the share of experts:

    bound = 1 / (1 - share + share * busiest loads with the policy / busiest loads without)
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.emulated import Experts, Played, play
from paceline.bench.spread import ratios, shuffled, spread
from paceline.bench.workload import Compared
from paceline.engines.transformers import attach
from paceline.placement import ExpertPlacement


@dataclass
class Served:
    """Timings of one policy, a value a round.

    Attributes:
        first: seconds to the first token (prefill).
        decode: seconds of the tokens after it.
        expert_time: seconds of the busiest device's experts in the prefill.
        busiest: rows of the busiest device, summed over layers, of the prefill.
        total: rows of all devices.
    """

    first: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    expert_time: list[float] = field(default_factory=list)
    busiest: int = 0
    total: int = 0


# -- serving ---------------------------------------------------------------------------------------


def serve(
    model: Any, prompt: Tensor, new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Greedy decoding of [batch, length] prompts: seconds to the first token, and of the rest."""
    # renamed in Transformers 5.2x
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    start = clock()
    with torch.no_grad():
        out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        first = clock()
        for _ in range(new_tokens - 1):
            out = model(input_ids=token, use_cache=True, **{cache: out.past_key_values})
            token = out.logits[:, -1:].argmax(-1)
    return first - start, clock() - first


def serve_on_ranks(
    model: Any,
    prompt: Tensor,
    policies: Mapping[str, Compared],
    new_tokens: int,
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Served]:
    """Time a model whose experts are spread over ranks (`place_experts`, or DistributedConfig).

    Args:
        model: this rank's part.
        prompt: [batch, length] token ids of this rank.
        policies: label -> policy; None is no cap.
        new_tokens: of each prompt.
        rounds: each runs every policy once.
        progress: called after each policy of each round.
    """
    results = {name: Served() for name in policies}
    with attach(model) as pace:
        clock = _ExpertClock(pace.layers)
        pace.replace_experts(clock)
        for turn in range(-1, rounds):  # the first turn is not counted
            for name in shuffled(list(policies), turn):
                pace.policy = policies[name]
                pace.reset_stats()
                clock.reset()
                dist.barrier()
                first, rest = serve(model, prompt, new_tokens)
                spent = torch.tensor([first, rest, clock.seconds], dtype=torch.float64)
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                loads = torch.tensor(list(clock.rows.values()), dtype=torch.float64)  # [layers]
                busiest, total = loads.clone(), loads.clone()
                dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
                dist.all_reduce(total)
                if turn >= 0:
                    _add(results[name], spent.tolist(), int(busiest.sum()), int(total.sum()))
                    progress()
    return results


class _ExpertClock:
    """Times this rank's experts of every layer, and counts their rows, in a prefill.

    Attributes:
        seconds: of all layers together.
        rows: of each layer.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self.reset()

    def reset(self) -> None:
        """Start anew with the next forward."""
        self.seconds = 0.0
        self.rows = dict.fromkeys(self._layers, 0)
        self._seen: set[str] = set()

    def __call__(
        self, layer: str, run: Experts, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        if layer in self._seen:  # a decode step
            return run(hidden, ids, weights)
        self._seen.add(layer)
        start = time.perf_counter()
        out = run(hidden, ids, weights)
        self.seconds += time.perf_counter() - start
        self.rows[layer] = hidden.shape[0]
        return out


def _add(result: Served, spent: list[float], busiest: int, total: int) -> None:
    result.first.append(spent[0])
    result.decode.append(spent[1])
    result.expert_time.append(spent[2])
    result.busiest, result.total = busiest, total


# -- emulated devices ------------------------------------------------------------------------------


def serve_emulated(
    model: Any,
    prompt: Tensor,
    policies: Mapping[str, Compared],
    placements: Sequence[ExpertPlacement],
    new_tokens: int,
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Served]:
    """Time a model on one process that plays every device; row i of B lives on device i * D // B.

    Each device is taken to do its share of what isn't experts: that time is divided by D. Timed
    in processor time of the one thread, which other programs of the machine hardly change.

    Args:
        model: the whole of it.
        prompt: [batch, length] token ids.
        policies: label -> policy, or one a layer; None is no cap.
        placements: expert -> device, of each layer.
        new_tokens: of each prompt.
        rounds: each runs every policy once.
        progress: called after each policy of each round.
    """
    devices = max(placement.num_devices for placement in placements)
    results = {name: Served() for name in policies}
    with attach(model, None, list(placements), token_source="sequence") as pace:
        where = dict(zip(pace.layers, placements, strict=True))
        played: dict[str, list[Played]] = {}

        def run_by_device(
            layer: str, run: Experts, hidden: Tensor, ids: Tensor, weights: Tensor
        ) -> Tensor:
            out, forward = play(run, hidden, ids, weights, where[layer])
            played.setdefault(layer, []).append(forward)
            return out

        pace.replace_experts(run_by_device)
        for turn in range(-1, rounds):
            for name in shuffled(list(policies), turn):
                pace.policy = policies[name]
                played.clear()
                first, rest = serve(model, prompt, new_tokens, time.thread_time)
                prefill = [forwards[0] for forwards in played.values()]
                later = [forward for forwards in played.values() for forward in forwards[1:]]
                spent = [
                    _emulated(first, prefill, devices),
                    _emulated(rest, later, devices),
                    sum(max(forward.seconds) for forward in prefill),
                ]
                if turn >= 0:
                    busiest = sum(max(forward.rows) for forward in prefill)
                    total = sum(sum(forward.rows) for forward in prefill)
                    _add(results[name], spent, busiest, total)
                    progress()
    return results


def _emulated(wall: float, forwards: Sequence[Played], devices: int) -> float:
    spent = sum(sum(forward.seconds) for forward in forwards)
    return (wall - spent) / devices + sum(max(forward.seconds) for forward in forwards)


def summary(
    results: Mapping[str, Served], tokens: int, new_tokens: int, sequences: int
) -> list[dict[str, Any]]:
    """One JSON-able row a policy, compared with the first one, which has no cap."""
    base = next(iter(results.values()))
    share = spread(base.expert_time)["median"] / spread(base.first)["median"]
    rows = []
    for name, result in results.items():
        bound = 1 / (1 - share + share * result.busiest / base.busiest)
        faster = ratios(base.first, result.first)
        row: dict[str, Any] = {
            "policy": name,
            "first_token_seconds": spread(result.first),
            "prefill_tokens_a_second": spread([tokens / t for t in result.first]),
            "busiest_rows": result.busiest,
            "busiest_share": result.busiest / max(1, result.total),
            "rows": result.total,
            "expert_share": share,
            "bound": bound,
            "speedup": faster,
            "share_of_bound": {key: value / bound for key, value in faster.items()},
        }
        if new_tokens > 1:
            decoded = sequences * (new_tokens - 1)
            row["decode_tokens_a_second"] = spread([decoded / t for t in result.decode])
            row["decode_speedup"] = ratios(base.decode, result.decode)
        rows.append(row)
    return rows
