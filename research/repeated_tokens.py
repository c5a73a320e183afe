"""A cap as protection: prompts of one repeated token beside usual ones, on real ranks.

    python research/repeated_tokens.py
    python research/repeated_tokens.py --ranks 4

A token that is repeated chooses nearly the same experts all along (arXiv 2512.23995), so all others
wait for its device. Gloo ranks share the experts evenly and serve prompts of their own, of usual
tokens or of the one token, out of a few hundred, whose experts lie most unevenly. All prompts and
policies take turns within a round. Rows of each rank are exact; times depend on the machine, and
with more ranks than cores they say little. Writes results/repeated_tokens_RANKS.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import CapacityPolicy, ExpertPlacement, attach
from paceline.bench.model_timing import random_model
from paceline.bench.timing import ratios, shuffled, spread
from paceline.demo.assets import domains, load_model, read_text
from paceline.engines.transformers.expert_parallel import place_experts
from paceline.facts import Facts
from paceline.files import to_json, write_text
from paceline.system_info import system_info

RESULTS = Path(__file__).parent / "results"
CAPS: dict[str, CapacityPolicy | None] = {
    "no cap": None,
    **{
        f"cap {factor}": CapacityPolicy(capacity_factor=factor, pool="source", min_expert_load=0)
        for factor in (1.5, 1.25, 1.0)
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=4, help="prompts of a rank")
    parser.add_argument("--length", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(options.ranks)]
        threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, *torchrun, *sys.argv], check=True, env=os.environ | threads)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {"demo": demo_part(options), "random": random_part(options)}
    if dist.get_rank() == 0:
        ranks = options.ranks
        data = {"program": "research/repeated_tokens.py", "ranks": ranks, **found}
        path = options.out or RESULTS / f"repeated_tokens_{ranks}.json"
        write_text(path, to_json({**data, **system_info()}), private=False)
    dist.destroy_process_group()


# -- prompts ---------------------------------------------------------------------------------------


def demo_part(options: argparse.Namespace) -> dict[str, Any]:
    """Load the embedded model: usual prompts are held-out texts of all domains."""
    model, tokenizer = load_model()
    count, length = options.sequences * options.ranks, options.length
    names = [domains()[i % len(domains())] for i in range(count)]
    texts = [tokenizer(read_text(name)[: 64 * length])["input_ids"] for name in names]
    usual = torch.tensor([ids[i : i + length] for i, ids in enumerate(texts)])
    return measure(model, usual, options)


def random_part(options: argparse.Namespace) -> dict[str, Any]:
    """Build a random model of larger experts, which take more of its time; prompts are random."""
    model = random_model(layers=4, share=0.5)
    rng = torch.Generator().manual_seed(1)
    shape = (options.sequences * options.ranks, options.length)
    return measure(model, torch.randint(1, 4096, shape, generator=rng), options)


def worst_token(model: Any, ranks: int, length: int = 32) -> int:
    """Find the one of 256 tokens that, repeated, gives most rows to one rank, layer by layer."""
    experts = model.config.num_experts
    rank_of = torch.tensor(ExpertPlacement.contiguous(experts, ranks).expert_to_device)
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, model.config.vocab_size, (256,), generator=rng)
    uneven = torch.zeros(256)

    def look(_: str, inputs: Any, __: object) -> None:
        rank = rank_of[inputs.topk_ids.view(256, -1)]
        shares = torch.nn.functional.one_hot(rank, ranks).float().mean(1)
        uneven.add_(shares.max(1).values)

    with attach(model) as pace, torch.inference_mode():
        pace.watch(look, Facts())
        model(input_ids=tokens.unsqueeze(1).expand(-1, length).contiguous(), use_cache=False)
    return int(tokens[uneven.argmax()])


# -- serving ---------------------------------------------------------------------------------------


def measure(model: Any, usual: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Forwards of both kinds of prompt under every policy, in turns."""
    token, rank = worst_token(model, options.ranks), dist.get_rank()
    own = usual[rank * options.sequences : (rank + 1) * options.sequences]
    prompts = {"usual": own, "one repeated token": torch.full_like(own, token)}
    experts, layers = model.config.num_experts, model.config.num_hidden_layers
    place_experts(model, [ExpertPlacement.contiguous(experts, options.ranks)] * layers)
    wall: dict[str, list[float]] = {}
    work: dict[str, list[list[float]]] = {}
    rows: dict[str, Tensor] = {}
    pairs = {f"{kind}, {cap}": (kind, cap) for kind in prompts for cap in CAPS}
    with attach(model) as pace, torch.inference_mode():
        counter = RowsHere(pace.layers)
        pace.replace_experts(counter)
        for turn in range(-1, options.rounds):  # the first is not counted
            for name in shuffled(list(pairs), turn):
                kind, cap = pairs[name]
                pace.policy = CAPS[cap]
                counter.clear()
                dist.barrier()
                start, busy = time.perf_counter(), time.thread_time()
                model(input_ids=prompts[kind], use_cache=False, logits_to_keep=1)
                spent = [time.perf_counter() - start, time.thread_time() - busy]
                everyone = gathered(torch.tensor(spent, dtype=torch.float64))
                rows[name] = gathered(torch.tensor(list(counter.rows.values())))
                if turn >= 0:
                    wall.setdefault(name, []).append(float(everyone[:, 0].max()))
                    work.setdefault(name, []).append(everyone[:, 1].tolist())
                elif rank == 0:
                    print(name, rows[name].sum(1).tolist(), flush=True)
    base = "usual, no cap"
    return {
        "parameters_here": sum(p.numel() for p in model.parameters()),
        "token": token,
        "tokens_a_rank": own.numel(),
        "rounds": options.rounds,
        "results": [
            {
                "prompts": kind,
                "policy": cap,
                "rows_by_rank": rows[name].sum(1).tolist(),
                "busiest_rank_rows": int(rows[name].max(0).values.sum()),
                "peak_to_mean": float(
                    rows[name].max(0).values.sum() / rows[name].double().mean(0).sum()
                ),
                "seconds": spread(wall[name]),
                "times_as_long_as_usual": ratios(wall[name], wall[base]),
                "processor_seconds_of_busiest_rank": spread([max(r) for r in work[name]]),
                "processor_seconds_of_idlest_rank": spread([min(r) for r in work[name]]),
            }
            for name, (kind, cap) in pairs.items()
        ],
    }


class RowsHere:
    """Counts the rows that this rank's experts compute.

    Attributes:
        rows: of each layer.
    """

    def __init__(self, layers: Any) -> None:
        self._layers = layers
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self.rows = dict.fromkeys(self._layers, 0)

    def __call__(self, layer: str, run: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Any:
        self.rows[layer] += hidden.shape[0]
        return run(hidden, ids, weights)


def gathered(own: Tensor) -> Tensor:
    """Gather every rank's values, [ranks, ...]."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return torch.stack(everyone)


if __name__ == "__main__":
    main()
