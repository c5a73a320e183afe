"""Cost of isolation between users, and what other pools reveal of one user to another.

    python research/isolation.py cost      drops, perplexity and balance of the demo model by pool
    python research/isolation.py leak      what a request's own outcome tells of its neighbour
    python research/isolation.py flood     what neighbours who repeat a token do to a request

Beside the pools of the library stands a middle way, built here out of `register_keep`: each request
is guaranteed the share of every unit that it would have alone (rounded down), and room that is left
goes to the highest scores, whoever's they are. Texts of all domains share each batch, as strangers
do. Writes results/isolation_PART.json.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import (
    CapacityPolicy,
    ExpertPlacement,
    RoutingInputs,
    attach,
    register_keep,
    route,
)
from paceline.batches import Sampling, make_batches
from paceline.cli.output import progress
from paceline.demo.assets import domains, load_model, read_text
from paceline.evaluation.perplexity import change, run_policy
from paceline.evaluation.results import Balance
from paceline.facts import Facts
from paceline.files import to_json, write_text
from paceline.system_info import system_info

RESULTS = Path(__file__).parent / "results"
DEVICES = 8
CAPS = (("device", 1.0), ("device", 1.25), ("device", 1.5), ("expert", 1.0), ("expert", 1.5))
POOLS = ("batch", "source", "request", "shared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("cost", "leak", "flood"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--batches", type=int, default=6, help="of 2048 tokens each")
    options = parser.parse_args()
    run = {"cost": cost, "leak": leak, "flood": flood}[options.part]
    found = run(options.lengths, options.batches)
    data = {"program": "research/isolation.py", "part": options.part, "model": "demo", **found}
    path = RESULTS / f"isolation_{options.part}.json"
    write_text(path, to_json({**data, **system_info()}), private=False)


# -- the middle way --------------------------------------------------------------------------------


def guaranteed_first(
    factor: float, placement: ExpertPlacement
) -> Callable[[RoutingInputs], Tensor]:
    """Make a ranking under which a batch pool serves every request's own share first.

    Args:
        factor: of capacity.
        placement: whose devices are capped.

    Returns:
        A function of the inputs to [tokens, k]: the gate score, and 1 more within the best
        `floor(factor * T * k * n / E)` of the request's T tokens in a unit that hosts n experts.
        These sum up to no more than the unit's capacity, so all of them survive.
    """
    device = torch.tensor(placement.expert_to_device)

    def ranking(inputs: RoutingInputs) -> Tensor:
        ids, request, valid = inputs.topk_ids.long(), inputs.token_request, inputs.valid
        assert request is not None
        assert inputs.scores is not None
        scores = inputs.scores.gather(1, ids)
        k = ids.shape[1]
        real = torch.ones_like(request, dtype=torch.bool) if valid is None else valid
        first = torch.zeros_like(scores)
        for one in torch.unique(request[real]):
            rows = (real & (request == one)).nonzero().flatten()
            own, best = device[ids[rows]], scores[rows]
            for unit, hosted in enumerate(placement.sizes):
                share = Fraction(str(factor)) * len(rows) * k * hosted / placement.num_experts
                mine = (own == unit).flatten().nonzero().flatten()
                order = best.flatten()[mine].argsort(descending=True, stable=True)
                chosen = mine[order[: math.floor(share)]]
                first[rows[chosen // k], chosen % k] = 1
        return scores + first

    return ranking


def policy_of(pool: str, unit: str, factor: float, experts: int) -> CapacityPolicy:
    """Make the policy of a pool or of the middle way; every batch is capped, however small."""
    fields: dict[str, Any] = {"capacity_factor": factor, "unit": unit, "min_expert_load": 0}
    if pool != "shared":
        return CapacityPolicy(pool=pool, **fields)
    placement = ExpertPlacement.contiguous(experts, DEVICES)
    if unit == "expert":
        placement = ExpertPlacement.per_expert(experts)
    name = f"guaranteed_{unit}_{str(factor).replace('.', '_')}"
    register_keep(name, guaranteed_first(factor, placement))
    return CapacityPolicy(pool="batch", keep=name, **fields)


# -- what it costs ---------------------------------------------------------------------------------


def cost(lengths: list[int], count: int) -> dict[str, Any]:
    """Run every pool on the same batches of requests of one length."""
    model, tokenizer = load_model()
    texts = {name: read_text(name) for name in domains()}
    experts = model.config.num_experts
    results: list[dict[str, Any]] = []
    with progress() as tell, attach(model, None, DEVICES, token_source="sequence") as pace:
        pace.watch(lambda *_: None, Facts(scores=True, request=True))  # the middle way needs both
        done, steps = 0, len(lengths) * count * (1 + len(CAPS) * len(POOLS))

        def step() -> None:
            nonlocal done
            done += 1
            tell(done, steps, "batches")

        for length in lengths:
            sampling = Sampling(2048 * (count + 1), 2048 // length, length, mix=True)
            batches = make_batches(tokenizer, texts, sampling)[0][:count]
            base = run_policy(model, pace, None, batches, step)
            before = Balance.of(base.all_layers(), "before").to_dict()
            for unit, factor in CAPS:
                for pool in POOLS:
                    policy = policy_of(pool, unit, factor, experts)
                    run = run_policy(model, pace, policy, batches, step)
                    shares = run.shares()
                    row = {
                        "request_tokens": length,
                        "requests_a_batch": len(batches[0].ids),
                        "unit": unit,
                        "capacity_factor": factor,
                        "pool": pool,
                        **shares.drops(),
                        "perplexity_change": change(base.losses, run.losses).to_dict(),
                        "peak_to_mean_before": before[f"{unit}_peak_to_mean"],
                        "peak_to_mean_after": shares.to_dict()[f"{unit}_peak_to_mean"],
                    }
                    results.append(row)
                    print(length, unit, factor, pool, row["dropped_share"], flush=True)
    return {"devices": DEVICES, "batches": count, "batch_tokens": 2048, "results": results}


# -- what it tells ---------------------------------------------------------------------------------


def first_layer(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Route [requests, length] tokens at the first MoE layer, each request by itself.

    Returns:
        topk_ids, topk_weights and scores [requests, length, ...].
    """
    found: dict[str, Tensor] = {}
    with attach(model) as pace, torch.inference_mode():

        def keep(layer: str, inputs: RoutingInputs, _: object) -> None:
            if layer == pace.layers[0]:
                for name in ("topk_ids", "topk_weights", "scores"):
                    found[name] = getattr(inputs, name).unflatten(0, ids.shape)

        pace.watch(keep, Facts(scores=True, all_scores=True))
        model(input_ids=ids, use_cache=False)
    return found


def leak(lengths: list[int], _: int) -> dict[str, Any]:
    """Count the neighbours that a request can tell apart, of many possible ones.

    It looks at nothing but which of its own assignments in the first layer survive. It is one
    request with a text like any other, one with a token repeated, or seven with different texts.
    """
    model, tokenizer = load_model()
    experts = model.config.num_experts
    texts = {name: read_text(name) for name in domains()}
    placement = ExpertPlacement.contiguous(experts, DEVICES)
    results: list[dict[str, Any]] = []
    for length in lengths[:2]:
        sampling = Sampling(length * 300, 297, length, mix=True)
        ids = make_batches(tokenizer, texts, sampling)[0][0].ids
        said = first_layer(model, ids)
        repeated = first_layer(model, ids[:1, :1].expand(1, length))
        kinds = {
            "a text": [{name: part[0] for name, part in said.items()}],
            "a repeated token": [{name: part[0] for name, part in repeated.items()}],
            "seven texts": [{name: part[i] for name, part in said.items()} for i in range(7)],
        }
        neighbours = [{n: part[i] for n, part in said.items()} for i in range(7, len(ids))]
        for unit, factor in CAPS:
            for pool in ("batch", "request", "shared"):
                policy = policy_of(pool, unit, factor, experts)
                for kind, own in kinds.items():
                    seen = {outcome(own, other, policy, placement) for other in neighbours}
                    results.append(
                        {
                            "request_tokens": length,
                            "unit": unit,
                            "capacity_factor": factor,
                            "pool": pool,
                            "own_requests": kind,
                            "neighbours": len(neighbours),
                            "told_apart": len(seen),
                        }
                    )
                    print(length, unit, factor, pool, kind, len(seen), flush=True)
    return {"devices": DEVICES, "layer": 0, "results": results}


def outcome(
    own: Sequence[Mapping[str, Tensor]],
    neighbour: Mapping[str, Tensor],
    policy: CapacityPolicy,
    placement: ExpertPlacement,
) -> tuple[bool, ...]:
    """Return the assignments of all its own requests that survive beside a neighbour."""
    parts = [*own, neighbour]
    together = {name: torch.cat([part[name] for part in parts]) for name in neighbour}
    length = len(neighbour["topk_ids"])
    request = torch.arange(len(parts)).repeat_interleave(length)
    inputs = RoutingInputs(
        topk_ids=together["topk_ids"],
        topk_weights=together["topk_weights"],
        scores=together["scores"],
        token_request=request,
    )
    kept = route(inputs, policy, placement).kept
    return tuple(kept[: len(own) * length].flatten().tolist())


# -- what neighbours do ----------------------------------------------------------------------------


def flood(lengths: list[int], _: int) -> dict[str, Any]:
    """Measure the losses of requests beside texts, and beside the worst of four repeated tokens."""
    model, tokenizer = load_model()
    texts = {name: read_text(name) for name in domains()}
    length, rows, victims = lengths[0], 16, 6
    ids = make_batches(tokenizer, texts, Sampling(length * 72, rows, length, mix=True))[0][0].ids
    tokens = torch.randint(100, 6000, (4,), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def loss(victim: Tensor, others: Tensor) -> float:
        logits = model(input_ids=torch.cat([others, victim[None]]), use_cache=False).logits
        return float(torch.nn.functional.cross_entropy(logits[-1, :-1], victim[1:]))

    results: list[dict[str, Any]] = []
    with attach(model, None, DEVICES) as pace:
        pace.watch(lambda *_: None, Facts(scores=True, request=True))
        alone = [loss(victim, ids[:0]) for victim in ids[:victims]]
        for unit, factor in CAPS:
            for pool in ("batch", "request", "shared"):
                pace.policy = policy_of(pool, unit, factor, model.config.num_experts)
                usual, worst = [], []
                for row, victim in enumerate(ids[:victims]):
                    others = torch.cat([ids[:row], ids[row + 1 :]])
                    usual.append(loss(victim, others) - alone[row])
                    flooded = [torch.full_like(others, int(token)) for token in tokens]
                    worst.append(max(loss(victim, other) for other in flooded) - alone[row])
                results.append(
                    {
                        "request_tokens": length,
                        "unit": unit,
                        "capacity_factor": factor,
                        "pool": pool,
                        "nats_beside_texts": sum(usual) / victims,
                        "nats_beside_the_worst_flood": sum(worst) / victims,
                    }
                )
                print(results[-1], flush=True)
    return {"devices": DEVICES, "requests": victims, "batch_requests": rows, "results": results}


if __name__ == "__main__":
    main()
