"""Train the small multimodal MoE model that answers questions about pictures (see `pictures`).

    python research/picture_model.py --minutes 6 --out research/models/pictures

Minutes are of processor time, on one thread.

Qwen3-VL-MoE's architecture shrunk: a vision tower, image tokens in the sequence, and MoE layers
that image and text tokens share. It exists to study caps on both, and is of no other use.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import (
    CATEGORIES,
    CELL,
    ID,
    IGNORED,
    PATCH,
    PLACES,
    SIDE,
    WORDS,
    Conversations,
    clothes,
    conversations,
)
from torch import Tensor
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

EXPERTS, TOP_K, LAYERS = 16, 2, 3
SEED = 7
QUESTIONS, BATCH = 16, 8


CARD = """# Picture model

A very small multimodal Mixture-of-Experts model of our own, to study what caps do to images and to
text (`research/multimodal.py`). It answers short questions about made-up pictures and is of no
other use.

- Architecture: Transformers' Qwen3VLMoeForConditionalGeneration shrunk: {parameters} million
  parameters, bfloat16; a vision tower of one layer, 36 image tokens a picture, then 3 layers of
  hidden size 96 with 16 experts, 2 a token (softmax, renormalised).
- Data: Fashion-MNIST, copyright 2017 Zalando SE, MIT licence, as Debian packages it
  (`dataset-fashion-mnist`); coats and shirts left out. A picture has 3 x 3 cells, some empty;
  clothes are mirrored and moved by up to two pixels at random. Made by `research/pictures.py`.
- Words: {words}, no text of anybody.
- Training: `python research/picture_model.py`, {runs}: {step} steps of 8 conversations
  with 16 questions, {seconds} seconds of processor time on one thread of a shared machine.
  AdamW, cosine schedule; losses of answers, of what every image token shows and where,
  Transformers' balance loss of each layer, router z-loss.
- Curve and settings: `training.json`.

Right answers on 64 conversations about the test part's pictures, which nobody trained on:

| question | right |
|---|---|
{held}

Caps were never part of the training.
"""


def config() -> Qwen3VLMoeConfig:
    """Return the model's configuration."""
    rope = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": len(WORDS), "hidden_size": 96, "intermediate_size": 192,
        "moe_intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 3,
        "num_key_value_heads": 3, "head_dim": 32, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "max_position_embeddings": 512, "rope_parameters": rope,
        "pad_token_id": ID["<pad>"], "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 96, "intermediate_size": 192, "num_heads": 4, "in_channels": 1,
        "patch_size": PATCH, "spatial_merge_size": 1, "temporal_patch_size": 1,
        "out_hidden_size": 96, "num_position_embeddings": 36, "deepstack_visual_indexes": [],
    }  # fmt: skip
    return Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, image_token_id=ID["<image>"],
        video_token_id=ID["<video>"], vision_start_token_id=ID["<start>"],
        vision_end_token_id=ID["<end>"], tie_word_embeddings=True,
    )  # fmt: skip


def made() -> Any:
    """Make an untrained model that tells places apart from the first step on."""
    model = Qwen3VLMoeForConditionalGeneration(config())
    with torch.no_grad():
        model.model.visual.pos_embed.weight.normal_(std=0.5)
    return model


def load(folder: Path) -> Any:
    """Load the trained model in evaluation mode, in single precision."""
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def answers(model: Any, batch: Conversations) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Compute loss, correctness and category of every answer, all [answers]; and the output."""
    out = model(**batch.given, use_cache=False)
    asked = batch.labels != IGNORED
    logits, right = out.logits[asked].float(), batch.labels[asked]
    loss = torch.nn.functional.cross_entropy(logits, right, reduction="none")
    return loss, logits.argmax(-1) == right, batch.category[asked], out


def accuracy(right: Tensor, category: Tensor) -> dict[str, float]:
    """Share of right answers by category, and of all."""
    found = {
        name: float(right[category == number].float().mean())
        for number, name in enumerate(CATEGORIES)
    }
    return {**found, "all": float(right.float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(".picture-data"))
    parser.add_argument("--minutes", type=float, default=6.0, help="of processor time")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.003)
    parser.add_argument("--resume", action="store_true", help="train --out further, warming up")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    training: dict[str, Any] = {"runs": [], "curve": []}
    if given.resume:
        training = json.loads((given.out / "training.json").read_text())
    runs, curve = training["runs"], training["curve"]
    runs.append({"minutes": given.minutes, "rate": given.rate, "balance": given.balance})
    done = curve[-1] if curve else {"step": 0, "seconds": 0, "wall_seconds": 0}
    draw = np.random.default_rng([SEED, done["step"]])
    images, kinds = clothes(given.data, "train")
    held = conversations(np.random.default_rng(1), *clothes(given.data, "t10k"), 64, QUESTIONS)
    model = load(given.out).train() if given.resume else made()
    model.set_experts_implementation("grouped_mm")
    grid = torch.tensor([ID[place] for place in PLACES]).reshape(SIDE, SIDE)
    per_cell = CELL // PATCH
    places = grid.repeat_interleave(per_cell, 0).repeat_interleave(per_cell, 1).flatten()
    routers: list[Tensor] = []
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: routers.append(out[0]))
    print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=given.rate, betas=(0.9, 0.97), weight_decay=0.03, fused=True
    )
    start = saved = time.monotonic()
    step, told, sums, part = 0, 0, torch.zeros(4), 0.0
    while part < 1:
        part = min(1.0, time.process_time() / (60 * given.minutes))
        rate = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = given.rate * rate * min(1.0, (step + 1) / 50)
        batch = conversations(draw, images, kinds, BATCH, QUESTIONS)
        loss, right, _, out = answers(model, batch)
        real = batch.given["attention_mask"].flatten().bool()
        scores = [x[real].float() for x in routers]
        routers.clear()
        balance = sum(load_balancing_loss_func((x,), EXPERTS, TOP_K) for x in scores) / LAYERS
        z = sum(torch.logsumexp(x, -1).square().mean() for x in scores) / LAYERS
        seen = batch.held != IGNORED
        logits = out.logits[seen].float()
        kind = torch.nn.functional.cross_entropy(logits, batch.held[seen])
        where = torch.nn.functional.cross_entropy(logits, places.repeat(BATCH))
        named = (kind + where) / 2  # half its kind, half its place: at best log 2
        (loss.mean() + 0.5 * named + given.balance * balance + 1e-4 * z).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        sums += torch.stack([loss.mean(), right.float().mean(), named, balance]).detach()
        if step % 100 == 0 or part >= 1:
            used = {
                "step": step,
                "seconds": time.process_time(),
                "wall_seconds": time.monotonic() - start,
            }
            point: dict[str, Any] = {k: round(v) + done[k] for k, v in used.items()}
            names = ("loss", "right", "named_loss", "balance_loss")
            point |= {
                n: round(float(x), 4) for n, x in zip(names, sums / (step - told), strict=True)
            }
            told = step
            sums.zero_()
            if step % 400 == 0 or part >= 1:
                with torch.no_grad():
                    _, right, category, _ = answers(model.eval(), held)
                routers.clear()
                model.train()
                point["held"] = {k: round(v, 3) for k, v in accuracy(right, category).items()}
            curve.append(point)
            print(json.dumps(point), flush=True)
        if time.monotonic() - saved > 240:
            saved = time.monotonic()
            model.save_pretrained(given.out)
    export(model, given.out, training)


def export(model: Any, out: Path, training: dict[str, Any]) -> None:
    """Write the weights in bfloat16, the curve and the card."""
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    (out / "training.json").write_text(json.dumps(training, indent=1) + "\n")
    last = training["curve"][-1]
    runs = [
        "`" + " ".join(f"--{name} {value:g}" for name, value in run.items()) + "`"
        for run in training["runs"]
    ]
    held = "\n".join(f"| {name} | {share:.1%} |" for name, share in last["held"].items())
    card = CARD.format(
        parameters=f"{model.num_parameters() / 1e6:.2f}",
        words=len(WORDS),
        runs=", then with --resume ".join(runs),
        held=held,
        step=last["step"],
        seconds=last["seconds"],
    )
    (out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
