"""Whole models that decode with few active experts: tokens per second, experts read, and quality.

    python benchmarks/active_models.py --json benchmarks/results/active_models.json

A random model of OLMoE's shape, as many of its layers as the memory bears, in bfloat16, generates
on one device with `generate`; its quality means nothing. The demo model, which is trained, decodes
held-out text token by token through its cache with the same share of its experts read: its time
means little, as its experts are small. In both all policies take turns; time is processor time of
one thread. Experts and bytes read are counted below the engine, in steps that are not timed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from active_experts import sequences
from decode_models import WeightsRead, random_model, random_stand_ins
from torch import Tensor

from paceline import attach
from paceline.batches import Batch
from paceline.bench.timing import prepare_machine, ratios, shuffled, spread, turns
from paceline.bench.workload import SHAPES
from paceline.demo.assets import domains, load_calibration, load_model, read_text
from paceline.evaluation.perplexity import Losses, change
from paceline.files import to_json, write_text
from paceline.stand_ins.calibration_file import Calibration
from paceline.system_info import system_info

SHARES = (1, 2 / 3, 1 / 2)
"""Of the experts that a step reads without a cap; 1 is a cap that hardly ever binds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6, help="of the random model")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="generated per sequence")
    parser.add_argument("--sequences", type=int, default=16, help="of each text for quality")
    parser.add_argument("--only", choices=["quality", "speed"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # all sequences are our own
    data: dict[str, Any] = {"schema": "paceline-active-models/1", "rows": []}
    data |= {"process": prepare_machine(), **system_info()}

    def keep(rows: list[dict[str, Any]]) -> None:
        data["rows"] += rows
        for row in rows:
            print(line_of(row), flush=True)
        write_text(options.json, to_json(data), private=False)

    for batch in options.batches if options.only != "speed" else ():
        keep(quality_of_demo(batch, max(batch, options.sequences)))
    if options.only == "quality":
        return
    model = random_model(SHAPES["olmoe"], options.layers, torch.bfloat16)
    found = random_stand_ins(model)
    for batch in options.batches:
        keep(speed_of_random(model, found, batch, options.rounds, options.tokens))


def line_of(row: Mapping[str, Any]) -> str:
    """Write a row as a line of the terminal."""
    line = (
        f"{row['model']:22} batch {row['batch']:3} {row['policy']:28} "
        f"experts {row['experts_read']:.1f} of {row['experts_read_before']:.1f}, "
        f"{row['tokens_per_second']['median']:.2f} tokens/s, "
        f"ratio {row['ratio']['median']:.3f} ({row['ratio']['min']:.3f} to "
        f"{row['ratio']['max']:.3f}), bytes {row['bound']:.3f}"
    )
    if "perplexity_change" in row:
        changed = row["perplexity_change"]
        line += f", perplexity {changed['mean']:+.2%} ± {changed['standard_error']:.2%}"
    return line


def policies(experts_read: float, stand_ins: tuple[bool, ...]) -> Iterator[str]:
    """Iterate over caps to these shares of the experts read; alone, and with stand-ins."""
    for share in SHARES:
        for with_stand_ins in stand_ins:
            yield f"max_active={round(share * experts_read)}" + (
                ",compensate=true" if with_stand_ins else ""
            )


@contextmanager
def under(model: Any, policy: str, found: Calibration) -> Iterator[Any]:
    """Attach the model on one device inside the block; "untouched" doesn't."""
    if policy == "untouched":
        yield None
        return
    stand_ins = found if "compensate" in policy else None
    with attach(model, policy, 1, calibration=stand_ins) as pace:
        yield pace


# -- speed -----------------------------------------------------------------------------------------


def speed_of_random(
    model: Any, found: Calibration, batch: int, rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """Measure tokens per second of `generate` under each policy."""
    prompt = torch.randint(1, 512, (batch, 8), generator=torch.Generator().manual_seed(3))
    before, bytes_before = read_in_step(model, prompt)
    names = ["untouched", *policies(before, (True,))]
    read: dict[str, tuple[float, float]] = {"untouched": (before, bytes_before)}
    for name in names[1:]:
        with under(model, name, found):
            read[name] = read_in_step(model, prompt)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name, counts in turns(names, rounds):
        with under(model, name, found):
            spent = seconds_of_decode(model, prompt, tokens)
        if counts:
            seconds[name].append(spent / (batch * (tokens - 1)))
    label = f"random OLMoE, {model.num_parameters() / 1e9:.1f}B bf16"
    return rows_of(label, batch, seconds, read)


def seconds_of_decode(model: Any, prompt: Tensor, tokens: int) -> float:
    """Time `generate` from the end of the prompt's forward on, in processor time."""
    ends: list[float] = []
    hook = model.register_forward_hook(lambda *_: ends.append(time.thread_time()))
    model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    hook.remove()
    return ends[-1] - ends[0]


@torch.no_grad()
def read_in_step(model: Any, prompt: Tensor) -> tuple[float, float]:
    """Count experts per layer, and bytes of all weights, read in a decode step."""
    cache = model(input_ids=prompt, use_cache=True).past_key_values
    with WeightsRead(model) as read:
        model(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True)
    return read.most_experts(), float(read.bytes)


def rows_of(
    model: str,
    batch: int,
    seconds: Mapping[str, list[float]],
    read: Mapping[str, tuple[float, float]],
) -> list[dict[str, Any]]:
    """Compare each policy with the untouched model; seconds are per token."""
    before, bytes_before = read["untouched"]
    return [
        {
            "model": model,
            "batch": batch,
            "policy": name,
            "experts_read_before": before,
            "experts_read": read[name][0],
            "bound": bytes_before / read[name][1],
            "tokens_per_second": spread([1 / spent for spent in seconds[name]]),
            "ratio": ratios(seconds["untouched"], seconds[name]),
        }
        for name in seconds
    ]


# -- quality ---------------------------------------------------------------------------------------


def quality_of_demo(batch: int, count: int, prompt: int = 32, length: int = 64) -> list[Any]:
    """Judge the demo model in real decode of held-out text, `batch` sequences of a text at once."""
    model, tokenizer = load_model()
    found = load_calibration()
    texts = {}
    for name in domains():
        text = read_text(name)
        texts[name] = text[len(text) // 2 :]
    groups = [
        Batch(part, (name,) * batch)
        for name, ids in sequences(tokenizer, texts, count, prompt + length + 1).items()
        for part in torch.split(ids, batch)
    ]
    before, read = read_of_groups(model, groups, prompt, None, found)
    names = ["untouched", *policies(before, (False, True))]
    reads = {"untouched": (before, read)}
    for name in names[1:]:
        reads[name] = read_of_groups(model, groups, prompt, name, found)
    losses = {name: Losses() for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn, group in enumerate(groups):
        for name in shuffled(names, turn):
            sums, spent = decode(model, group, prompt, name, found)
            losses[name].add(Batch(group.ids[:, prompt:], group.sources), sums)
            seconds[name].append(spent / (batch * length))
    rows = rows_of("demo, 6.5M float32", batch, seconds, reads)
    for row in rows[1:]:
        row["perplexity_change"] = change(losses["untouched"], losses[row["policy"]]).to_dict()
    return rows


def read_of_groups(
    model: Any, groups: list[Batch], prompt: int, policy: str | None, found: Calibration
) -> tuple[float, float]:
    """Compute the mean of `read_in_step` over the prompts' ends."""
    totals = [0.0, 0.0]
    for group in groups:
        with under(model, policy or "untouched", found):
            for index, value in enumerate(read_in_step(model, group.ids[:, :prompt])):
                totals[index] += value / len(groups)
    return totals[0], totals[1]


@torch.inference_mode()
def decode(
    model: Any, group: Batch, prompt: int, policy: str, found: Calibration
) -> tuple[list[float], float]:
    """Decode token by token: [rows] losses after the uncapped prompt, and seconds of steps."""
    ids, total = group.ids, torch.zeros(len(group.ids), dtype=torch.float64)
    cache = model(input_ids=ids[:, :prompt], use_cache=True).past_key_values
    spent = 0.0
    with under(model, policy, found):
        for t in range(prompt, ids.shape[1] - 1):
            start = time.thread_time()
            out = model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            spent += time.thread_time() - start
            loss = torch.nn.functional.cross_entropy(
                out.logits[:, -1].float(), ids[:, t + 1], reduction="none"
            )
            total += loss.double()
    return total.tolist(), spent


if __name__ == "__main__":
    main()
