"""Thousands of forwards of one attached model that never rests: `make soak`.

Threads run batches of many sizes while policies change; in between the model is attached again.
Every output has to be, to the bit, that of a policy that was in force; those were compared with the
oracle; memory has to stay flat; in the end nothing is left in the model.

    PYTHONPATH=tests python tests/engines/transformers/soak.py --forwards 10000

As a program it writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tiny_models
import torch
from model_runs import fingerprint, output
from oracle import route_oracle
from torch import Tensor

from paceline import CapacityPolicy, ExpertPlacement, attach
from paceline.files import to_json, write_text
from paceline.system_info import system_info

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "soak.json"
CAP = CapacityPolicy(capacity_factor=0.8, min_expert_load=0)
POLICIES: list[CapacityPolicy | None] = [
    None,
    CAP,
    CAP.replace(unit="expert", keep="weight"),
    CAP.replace(pool="request"),
    CAP.replace(mode="shadow"),
    CAP.replace(renormalize=True, keep="last"),
    CAP.replace(expand="all", expand_limit=2, capacity_factor=1.1),
    CAP.replace(protect_first=3),
    CAP.replace(capacity_factor=1e9),
]
SHAPES = [(1, 1, 0), (1, 7, 0), (2, 24, 5), (3, 24, 0), (4, 40, 30), (2, 64, 1), (8, 16, 15)]
DEVICES = 2


def expected(model: Any, batches: list[dict[str, Tensor]]) -> list[list[Tensor]]:
    """[batches][policies] outputs of models attached for them alone, compared with the oracle."""
    found = []
    for batch in batches:
        row = []
        for policy in POLICIES:
            with attach(model, policy, placement=DEVICES) as pace:
                pace.watch(lambda _, inputs, made, policy=policy: agrees(inputs, made, policy))
                row.append(output(model, batch))
        found.append(row)
    return found


def agrees(inputs: Any, assignment: Any, policy: CapacityPolicy | None) -> None:
    """Fail unless the oracle kept the same."""
    if policy is None or policy.mode != "enforce":
        return
    experts = inputs.scores.shape[1] if inputs.scores is not None else inputs.num_experts
    placement = ExpertPlacement.contiguous(experts, DEVICES)
    wanted = route_oracle(inputs, policy, placement)
    assert assignment.topk_ids.tolist() == wanted.topk_ids


def megabytes() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def soak(forwards: int, seed: int = 0, threads: int = 3, say: Any = None) -> dict[str, float]:
    """Run so many forwards; figures of memory early and late.

    Raises:
        AssertionError: if an output is of no policy that was in force, or something is left behind.
    """
    start, changes, attached = time.monotonic(), 0, 1
    torch.set_num_threads(1)
    rng = random.Random(seed)
    model = tiny_models.build("mixtral")
    before = fingerprint(model)
    batches = [
        tiny_models.inputs(batch=b, length=length, seed=i, pad=pad)
        for i, (b, length, pad) in enumerate(SHAPES)
    ]
    untouched = [output(model, batch) for batch in batches]
    wanted = expected(model, batches)

    def run(calls: list[int]) -> list[tuple[int, Tensor]]:
        return [(index, output(model, batches[index])) for index in calls]

    pace, done, early, told = attach(model, POLICIES[0], placement=DEVICES), 0, None, 0.0
    force = 0
    with ThreadPoolExecutor(threads) as pool:
        while done < forwards:
            if rng.random() < 0.1:
                pace.detach()
                index = rng.randrange(len(batches))
                assert torch.equal(output(model, batches[index]), untouched[index])
                pace = attach(model, POLICIES[force], placement=DEVICES)
                attached += 1
            calls = [[rng.randrange(len(batches)) for _ in range(6)] for _ in range(threads)]
            running = [pool.submit(run, some) for some in calls]
            in_force = {force}
            for _ in range(rng.randrange(3)):
                force = rng.randrange(len(POLICIES))
                in_force.add(force)
                pace.policy = POLICIES[force]
                changes += 1
            for future in running:
                for index, out in future.result():
                    assert any(torch.equal(out, wanted[index][p]) for p in in_force), (
                        f"batch {index} after {done} forwards is of none of the policies {in_force}"
                    )
                    done += 1
            if rng.random() < 0.2:
                assert all(layer.dropped >= 0 for layer in pace.stats().layers)
            if early is None and done >= forwards // 5:
                gc.collect()
                early = (megabytes(), len(gc.get_objects()))
            if say and time.monotonic() - told > 10:
                told = time.monotonic()
                say(f"{done} of {forwards} forwards, {megabytes():.0f} MB")
    pace.detach()
    del pace, running
    gc.collect()
    late = (megabytes(), len(gc.get_objects()))
    assert early is not None
    assert fingerprint(model) == before
    for batch, out in zip(batches, untouched, strict=True):
        assert torch.equal(output(model, batch), out)
    return {
        "forwards": done,
        "threads": threads,
        "policies": len(POLICIES),
        "changes_of_policy": changes,
        "times_attached": attached,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "early_megabytes": early[0],
        "late_megabytes": late[0],
        "early_objects": early[1],
        "late_objects": late[1],
    }


def main() -> None:
    """As a program: a long run with its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forwards", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = soak(given.forwards, given.seed, say=lambda text: print(text, flush=True))
    print(found)
    data = {"program": "tests/engines/transformers/soak.py", **found, **system_info()}
    write_text(given.out, to_json(data), private=False)
    if found["late_megabytes"] > found["early_megabytes"] + 20:
        sys.exit("memory grew by more than 20 MB between the first fifth and the end")
    if found["late_objects"] > found["early_objects"] * 1.01 + 500:
        sys.exit("objects of Python grew by more than 1% between the first fifth and the end")


if __name__ == "__main__":
    main()
