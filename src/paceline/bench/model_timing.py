"""Time a whole model under several policies: time to first token, and tokens per second.

On ranks each process serves prompts of its own and hosts a part of the experts. Run directly, the
devices are emulated: every layer's experts run one device after the other, and the time of all but
the slowest is subtracted. The gain is set beside Amdahl's bound, from the share of experts:

    bound = 1 / (1 - share + share * busiest loads with the policy / busiest loads without)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from paceline.bench.comparison import Compared
from paceline.bench.emulated import Experts, Played, play
from paceline.bench.timing import Spread, ratios, share_of, spread, turns
from paceline.engines.transformers import attach
from paceline.engines.transformers.tokens.arguments import cache_name
from paceline.placement import ExpertPlacement


@dataclass
class ModelTimings:
    """Timings of one policy, a value per round.

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

    def add(self, spent: Sequence[float], busiest: int, total: int) -> None:
        """Add a round: seconds of first token, decode and experts, and rows."""
        for times, seconds in zip((self.first, self.decode, self.expert_time), spent, strict=True):
            times.append(seconds)
        self.busiest, self.total = busiest, total


class ModelRow(BaseModel):
    """Result of one policy beside no cap; rows are summed over layers."""

    policy: str
    first_token_seconds: Spread
    prefill_tokens_a_second: Spread
    busiest_rows: int
    busiest_share: float
    rows: int
    expert_share: float
    bound: float
    speedup: Spread
    share_of_bound: Spread
    decode_tokens_a_second: Spread | None = None
    decode_speedup: Spread | None = None


# -- serving ---------------------------------------------------------------------------------------


def serve(
    model: Any, prompt: Tensor, new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Decode [batch, length] prompts greedily: seconds to the first token, and of the rest."""
    cache = cache_name(model.forward)
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
) -> dict[str, ModelTimings]:
    """Time a model whose experts are spread over ranks (`place_experts`, or DistributedConfig).

    `model` is this rank's part, `prompt` [batch, length] token ids of its own.
    """
    results = {name: ModelTimings() for name in policies}
    with attach(model) as pace:
        clock = _ExpertClock(pace.layers)
        pace.replace_experts(clock)
        for name, counts in turns(policies, rounds):
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
            if counts:
                results[name].add(spent.tolist(), int(busiest.sum()), int(total.sum()))
                progress()
    return results


class _ExpertClock:
    """Clock of this rank's experts in a prefill, and counter of their rows."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self.reset()

    def reset(self) -> None:
        """Reset seconds and rows before the next forward."""
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


# -- emulated devices ------------------------------------------------------------------------------


def serve_emulated(
    model: Any,
    prompt: Tensor,
    policies: Mapping[str, Compared],
    placements: Sequence[ExpertPlacement],
    new_tokens: int,
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, ModelTimings]:
    """Time a model on one process that plays every device; row i of B is on device i * D // B.

    The time of everything but experts is divided by D, as if the devices shared it. Times are of
    the one thread's processor, which other programs of the machine hardly change.
    `prompt` are [batch, length] token ids, `placements` one per layer.
    """
    devices = max(placement.num_devices for placement in placements)
    results = {name: ModelTimings() for name in policies}
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
        for name, counts in turns(policies, rounds):
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
            if counts:
                busiest = sum(max(forward.rows) for forward in prefill)
                total = sum(sum(forward.rows) for forward in prefill)
                results[name].add(spent, busiest, total)
                progress()
    return results


def _emulated(wall: float, forwards: Sequence[Played], devices: int) -> float:
    spent = sum(sum(forward.seconds) for forward in forwards)
    return (wall - spent) / devices + sum(max(forward.seconds) for forward in forwards)


def compare_models(
    results: Mapping[str, ModelTimings], tokens: int, new_tokens: int, sequences: int
) -> list[ModelRow]:
    """Compare every policy with the first one, which has no cap.

    `tokens` are those of all prompts; `sequences` those of all ranks, `new_tokens` of each.
    """
    base = next(iter(results.values()))
    share = spread(base.expert_time)["median"] / spread(base.first)["median"]
    rows = []
    for name, result in results.items():
        bound = 1 / (1 - share + share * result.busiest / base.busiest)
        faster = ratios(base.first, result.first)
        decode: dict[str, Spread] = {}
        if new_tokens > 1:
            decoded = sequences * (new_tokens - 1)
            decode["decode_tokens_a_second"] = spread([decoded / t for t in result.decode])
            decode["decode_speedup"] = ratios(base.decode, result.decode)
        rows.append(
            ModelRow(
                policy=name,
                first_token_seconds=spread(result.first),
                prefill_tokens_a_second=spread([tokens / t for t in result.first]),
                busiest_rows=result.busiest,
                busiest_share=result.busiest / max(1, result.total),
                rows=result.total,
                expert_share=share,
                bound=bound,
                speedup=faster,
                share_of_bound=share_of(faster, bound),
                **decode,
            )
        )
    return rows


# -- a model without a download --------------------------------------------------------------------


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
    """Build a random OLMoE whose routers send `share` of their load to the first `hot` experts.

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
            # otherwise the part that all tokens of a random sequence share alone decides
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.experts.down_proj.mul_(0.1)
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.experts.down_proj[:, 0] = 0.0
        for layer in model.model.layers:
            _prefer(model, layer.mlp.gate, tokens, slice(0, hot), share, k)
    return model


def random_model_named(name: str) -> Any:
    """Build the model of a name: "random", or "random:hidden,intermediate,experts,k,layers".

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
        "model must be random, or random:hidden,intermediate,experts,k,layers with hidden a "
        f"multiple of 64 and k at most half of the experts, got {name!r}."
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
