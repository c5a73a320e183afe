"""Stand-ins on a model of another recipe: train a small one, calibrate, judge.

DeepSeek-V3's architecture: sigmoid router, balanced by a bias on the choice instead of a loss
(Wang et al., arXiv 2408.15664), renormalised weights, one shared expert, latent attention; 16
experts of which a token takes 2, twice as wide as the demo model's, another seed. The texts and the
tokenizer are the demo's. It is not kept.

    python examples/train_demo_model.py prepare
    python research/second_model.py train --minutes 30 --folder .demo-build/second
    python research/second_model.py judge --folder .demo-build/second \\
      --out research/results/second_model.json
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from paceline import CapacityPolicy, attach
from paceline.batches import Sampling, cut, separate
from paceline.calibration.collect import calibrate
from paceline.cli.output import progress
from paceline.demo.assets import domains, load_model, read_text
from paceline.evaluation.perplexity import change, run_policy
from paceline.evaluation.results import Balance
from paceline.files import to_json, write_text
from paceline.system_info import system_info

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from calibrate_demo_model import training_texts

SEED, WINDOW, ROWS, DEVICES = 7, 256, 6, 8
BIAS_RATE = 1e-3  # a step, towards experts with less than the mean load
POLICIES = (
    "capacity_factor=1",
    "capacity_factor=0.75",
    "capacity_factor=0.5",
    "capacity_factor=1,unit=expert",
)
app = typer.Typer(add_completion=False, help=__doc__)


def config() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=6000, hidden_size=192, intermediate_size=384, moe_intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3, n_routed_experts=16,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=0,
        q_lora_rank=None, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64,
        routed_scaling_factor=1.0, norm_topk_prob=True, tie_word_embeddings=True,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip


def _tokens(each: int) -> dict[str, Tensor]:
    _, tokenizer = load_model()
    return {
        domain: torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        for domain, text in training_texts(each, None).items()
    }


def _move_bias(model: Any, loads: list[Tensor]) -> None:
    """Update the routers' bias towards experts below the mean load, as DeepSeek-V3 does."""
    for layer, load in zip(model.model.layers, loads, strict=True):
        bias = layer.mlp.gate.e_score_correction_bias
        bias += BIAS_RATE * (load.float().mean() - load).sign()


@app.command()
def train(
    folder: Annotated[Path, typer.Option(help="To write the model to.")],
    minutes: Annotated[float, typer.Option(help="Of the whole schedule.")] = 30.0,
    each: Annotated[int, typer.Option(help="Training tokens of each domain.")] = 500_000,
    threads: Annotated[int, typer.Option(help="Threads to train with.")] = 1,
) -> None:
    """Train it; write the weights at the end."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    model = DeepseekV3ForCausalLM(config())
    model.set_experts_implementation("grouped_mm")
    model.train()
    loads: list[Tensor] = [torch.zeros(16) for _ in model.model.layers]
    for index, layer in enumerate(model.model.layers):

        def count(_: Any, args: Any, kwargs: Any, index: int = index) -> None:
            ids = (*args, *kwargs.values())[1]
            loads[index] = torch.bincount(ids.flatten(), minlength=16)

        layer.mlp.experts.register_forward_pre_hook(count, with_kwargs=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.97), weight_decay=0.05)
    tokens = _tokens(each)
    names, draw = list(tokens), random.Random(SEED)
    weights = [math.sqrt(len(t)) for t in tokens.values()]
    start, step, part, recent = time.monotonic(), 0, 0.0, 0.0
    while part < 1:
        part = min(1.0, (time.monotonic() - start) / (60 * minutes))
        rate = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate * min(1.0, (step + 1) / 100)
        rows = []
        for name in draw.choices(names, weights, k=ROWS):
            at = draw.randrange(len(tokens[name]) - WINDOW - 1)
            rows.append(tokens[name][at : at + WINDOW])
        ids = torch.stack(rows)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            _move_bias(model, loads)
        step += 1
        recent = 0.99 * recent + 0.01 * float(loss.detach())
        if step % 50 == 0:
            print(f"{step} steps, loss {recent / (1 - 0.99**step):.3f}", flush=True)
    model.eval().save_pretrained(folder)
    seen = {"steps": step, "tokens": step * ROWS * WINDOW, "minutes": minutes, "threads": threads}
    (folder / "training.json").write_text(json.dumps(seen))


@app.command()
def judge(
    folder: Annotated[Path, typer.Option(help="Of the model.")],
    out: Annotated[Path, typer.Option(help="File for the results.")],
    tokens: Annotated[int, typer.Option(help="Of calibration, of each domain.")] = 16384,
    rank: Annotated[int, typer.Option(help="Of the stand-ins.")] = 16,
) -> None:
    """Fit stand-ins on training text and judge on held-out text, batches of 4,096 tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _, tokenizer = load_model()
    texts = training_texts(tokens, None)
    sampling = Sampling(tokens * len(texts), batch_size=16, sequence_length=WINDOW)
    with progress() as tell:
        found = calibrate(
            model, tokenizer, texts, rank=rank, devices=DEVICES, sampling=sampling, progress=tell
        )
    parts = [
        cut(name, tokenizer(read_text(name), verbose=False)["input_ids"], WINDOW, limit=16)
        for name in domains()
    ]
    batches = separate(parts, 16)
    rows = []
    places: dict[bool, Any] = {False: DEVICES, True: found.plan().placements}
    base = None
    for placed, where in places.items():
        with attach(model, None, where, calibration=found) as pace:
            if base is None:
                free = run_policy(model, pace, None, batches, lambda: None)
                base = free.losses
                loads = Balance.of(free.all_layers(), "before").to_dict()
            for text in POLICIES:
                if placed and "expert" in text:
                    continue  # the same as in order
                for more in ("", ",compensate=true", ",compensate=true,keep=contribution"):
                    policy = CapacityPolicy.parse(text + more)
                    run = run_policy(model, pace, policy, batches, lambda: None)
                    after = change(base, run.losses)
                    print(f"{policy} placed={placed}: {100 * after.mean:+.2f}%", flush=True)
                    rows.append(
                        {
                            "policy": str(policy),
                            "placed": placed,
                            "perplexity_change": after.to_dict(),
                            **run.shares().drops(),
                        }
                    )
    assert base is not None
    data = {
        "schema": "paceline-second-model/1",
        "training": json.loads((folder / "training.json").read_text()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "devices": DEVICES,
        "rank": rank,
        "perplexity": base.perplexity(),
        "without_a_cap": loads,
        "explained_of_texts_left_out": [layer.explained for layer in found.layers],
        "results": rows,
        **system_info(),
    }
    write_text(out, to_json(data), private=False)


if __name__ == "__main__":
    app()
