"""Time a whole model under several policies: time to first token, and tokens a second.

On ranks each process serves prompts of its own and hosts a part of the experts. Run directly, the
devices are emulated: every layer's experts run one device after the other, and the time of all but
the slowest is taken off again. The gain is set beside Amdahl's bound, from the share of experts:

    bound = 1 / (1 - share + share * busiest loads with the policy / busiest loads without)
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.emulated import Played, play
from paceline.bench.spread import ratios, shuffled, spread
from paceline.engines.transformers import attach
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy


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


def random_model(
    hidden: int = 768,
    intermediate: int = 512,
    layers: int = 6,
    experts: int = 32,
    k: int = 4,
    hot: int = 16,
    share: float = 0.8,
    vocabulary: int = 4096,
    seed: int = 0,
) -> Any:
    """A mid-size random OLMoE whose routers send `share` of their load to the first `hot` experts.

    One coordinate of every embedding is the same and stays so, which lets a router have a constant
    preference; how strong it has to be is found layer by layer on random tokens.
    """
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(seed)
    config = OlmoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        num_experts=experts,
        num_experts_per_tok=k,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    model: Any = OlmoeForCausalLM(config).eval()
    tokens = torch.randint(1, vocabulary, (2, 128))
    with torch.inference_mode(False), torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.2
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(std=hidden**-0.5)
            layer.mlp.gate.weight[:, 0] = 0.0
            # else what all tokens of a random sequence have in common decides alone
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.experts.down_proj.mul_(0.1)
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.experts.down_proj[:, 0] = 0.0
        for layer in model.model.layers:
            _prefer(model, layer.mlp.gate, tokens, slice(0, hot), share, k)
    return model


def random_model_named(name: str) -> Any:
    """The model of a name: "random", or "random:hidden,intermediate,experts,k,layers".

    Raises:
        ValueError: if it is neither.
    """
    if name == "random":
        return random_model()
    sizes = name.removeprefix("random:").split(",")
    if len(sizes) == 5 and all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        hidden, intermediate, experts, k, layers = map(int, sizes)
        if hidden % 64 == 0 and k <= experts // 2:
            return random_model(hidden, intermediate, layers, experts, k, experts // 2)
    raise ValueError(
        f"model {name!r} is not allowed: it is random, or random:hidden,intermediate,experts,k,"
        "layers with hidden a multiple of 64 and k at most half of the experts."
    )


def _prefer(model: Any, gate: Any, tokens: Tensor, hot: slice, share: float, k: int) -> None:
    """Give a router the constant preference that sends `share` of its load to the `hot` experts."""
    seen: list[Tensor] = []
    hook = gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    model.model(input_ids=tokens)
    hook.remove()
    logits = seen[0] @ gate.weight.T
    is_hot = torch.zeros(logits.shape[1])
    is_hot[hot] = 1
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        chosen = torch.topk(logits + middle * is_hot, k, dim=-1).indices
        low, high = (middle, high) if float(is_hot[chosen].mean()) < share else (low, middle)
    gate.weight[hot, 0] = high / seen[0][:, 0].mean()


# -- serving ---------------------------------------------------------------------------------------


def serve(
    model: Any, prompt: Tensor, new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Greedy decoding of [batch, length] prompts: seconds to the first token, and of the rest."""
    # renamed in Transformers 5.2x
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    start = clock()
    with torch.inference_mode():
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
    policies: Mapping[str, CapacityPolicy | None],
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
        for turn in range(-1, rounds):  # the first turn is not counted
            for name in shuffled(list(policies), turn):
                pace.policy = policies[name] or CapacityPolicy(mode="observe")
                pace.reset_stats()
                clocks = [_ExpertClock(layer.parallel) for layer in pace._layers]  # type: ignore[attr-defined]
                dist.barrier()
                with _all(clocks):
                    first, rest = serve(model, prompt, new_tokens)
                spent = torch.tensor(
                    [first, rest, sum(c.prefill for c in clocks)], dtype=torch.float64
                )
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                loads = torch.tensor([c.rows for c in clocks], dtype=torch.float64)  # [layers]
                busiest, total = loads.clone(), loads.clone()
                dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
                dist.all_reduce(total)
                if turn >= 0:
                    _add(results[name], spent.tolist(), int(busiest.sum()), int(total.sum()))
                    progress()
    return results


class _ExpertClock:
    """Times the experts of one spread layer, and counts their rows, in its first forward."""

    def __init__(self, parallel: Any) -> None:
        self._parallel, self.prefill, self.rows, self._calls = parallel, 0.0, 0, 0

    def __enter__(self) -> _ExpertClock:
        self._forward = self._parallel.experts_forward

        def timed(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            start = time.perf_counter()
            out: Tensor = self._forward(hidden, ids, weights)
            if self._calls == 0:
                self.prefill, self.rows = time.perf_counter() - start, hidden.shape[0]
            self._calls += 1
            return out

        self._parallel.experts_forward = timed
        return self

    def __exit__(self, *_: Any) -> None:
        self._parallel.experts_forward = self._forward


@contextmanager
def _all(clocks: list[_ExpertClock]) -> Iterator[None]:
    for clock in clocks:
        clock.__enter__()
    try:
        yield
    finally:
        for clock in clocks:
            clock.__exit__()


def _add(result: Served, spent: list[float], busiest: int, total: int) -> None:
    result.first.append(spent[0])
    result.decode.append(spent[1])
    result.expert_time.append(spent[2])
    result.busiest, result.total = busiest, total


# -- emulated devices ------------------------------------------------------------------------------


def serve_emulated(
    model: Any,
    prompt: Tensor,
    policies: Mapping[str, CapacityPolicy | None],
    placement: ExpertPlacement,
    new_tokens: int,
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Served]:
    """Time a model on one process that plays every device; row i of B lives on device i * D // B.

    Each device is taken to do its share of what isn't experts: that time is divided by D. Timed
    in processor time of the one thread, which other programs of the machine hardly change.
    """
    results = {name: Served() for name in policies}
    with attach(model, None, placement, token_source="sequence") as pace:
        players = [_Player(layer, placement) for layer in pace._layers]
        for player in players:
            player.install()
        for turn in range(-1, rounds):
            for name in shuffled(list(policies), turn):
                pace.policy = policies[name] or CapacityPolicy(mode="observe")
                for player in players:
                    player.reset()
                first, rest = serve(model, prompt, new_tokens, time.thread_time)
                prefill = [player.calls[0] for player in players]
                later = [call for player in players for call in player.calls[1:]]
                spent = [
                    _emulated(first, prefill, placement.num_devices),
                    _emulated(rest, later, placement.num_devices),
                    sum(max(call.seconds) for call in prefill),
                ]
                if turn >= 0:
                    busiest = sum(max(call.rows) for call in prefill)
                    _add(results[name], spent, busiest, sum(sum(call.rows) for call in prefill))
                    progress()
    return results


def _emulated(wall: float, calls: list[Played], devices: int) -> float:
    spent = sum(sum(call.seconds) for call in calls)
    return (wall - spent) / devices + sum(max(call.seconds) for call in calls)


class _Player:
    """Runs the experts of one attached layer device by device, each timed."""

    def __init__(self, layer: Any, placement: ExpertPlacement) -> None:
        self._layer, self._placement = layer, placement
        self.reset()

    def reset(self) -> None:
        self.calls: list[Played] = []

    def install(self) -> None:
        """Take the place of the experts' forward inside the attached layer."""
        original = self._layer._original

        def run(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            out, played = play(original, hidden, ids, weights, self._placement)
            self.calls.append(played)
            return out

        self._layer._original = run
        self._layer._compute = lambda hidden, ids, weights, assignment: run(
            hidden, assignment.topk_ids, assignment.topk_weights
        )


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
