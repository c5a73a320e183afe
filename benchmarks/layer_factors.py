"""Whether layers should have factors of their own under one bound on the model's time.

Each layer of the demo model is capped alone first: what it costs tells how sensitive the layer is.
Then the layers share a bound, the mean of their factors: the same factor for all, more room for the
sensitive ones, and the reverse as a control. Layers are of one size, so that the mean of the
factors is the model's expert time. Held-out texts, batches of 4,096 tokens of one text, 8 devices,
with the calibration that comes with the model.

    python benchmarks/layer_factors.py --out benchmarks/results/layer_factors.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import CapacityPolicy, attach
from paceline.batches import separate
from paceline.cli.progress import progress
from paceline.demo.assets import load_calibration, load_model
from paceline.demo.plan import DEVICES
from paceline.demo.study import drops, flat, held_out, run_policy
from paceline.environment import environment
from paceline.evaluation.perplexity import as_dict, change
from paceline.files import to_json, write_text

ALONE, BOUND, TILT = 0.75, 0.75, 0.2
"""Factor of a layer capped alone; mean factor of all; distance of the extremes from the mean."""


def tilted(costs: Sequence[float], by: float) -> list[float]:
    """Factors around the bound, in proportion to what layers cost; their mean is the bound.

    >>> [round(factor, 3) for factor in tilted([1.0, 2.0, 3.0], by=0.1)]
    [0.65, 0.75, 0.85]
    """
    mean = sum(costs) / len(costs)
    most = max(abs(cost - mean) for cost in costs) or 1.0
    return [round(BOUND + by * (cost - mean) / most, 4) for cost in costs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=16, help="of 256 tokens, of each text")
    given = parser.parse_args()
    model, tokenizer = load_model()
    batches = separate(held_out(tokenizer, 256, given.sequences), 16)
    layers, done = model.config.num_hidden_layers, 0
    total = (1 + layers + 6) * len(batches)
    calibration = load_calibration()
    with progress() as tell, attach(model, None, DEVICES, calibration=calibration) as pace:

        def step() -> None:
            nonlocal done
            done += 1
            tell(done, total, "batches judged")

        base = run_policy(model, pace, None, batches, step).losses

        def judged(factors: Sequence[float | None], compensate: bool = True) -> dict[str, Any]:
            policies = [
                CapacityPolicy(capacity_factor=factor, compensate=compensate) for factor in factors
            ]
            run = run_policy(model, pace, policies, batches, step)
            after = change(base, run.losses)
            print(f"{list(factors)} {compensate}: {100 * after.mean:+.3f}%", flush=True)
            return {
                "factors": list(factors),
                "compensate": compensate,
                "perplexity_change": as_dict(after),
                **drops(flat(run.layers)),
            }

        alone = [
            judged([ALONE if index == layer else None for index in range(layers)])
            for layer in range(layers)
        ]
        costs = [row["perplexity_change"]["mean"] for row in alone]
        shared = [
            judged(tilted(costs, by), compensate)
            for compensate in (True, False)
            for by in (0.0, TILT, -TILT)
        ]
    data = {
        "schema": "paceline-layer-factors/1",
        "model": "demo",
        "devices": DEVICES,
        "judged_tokens": sum(batch.ids.numel() for batch in batches),
        "alone": alone,
        "shared": shared,
        **environment(),
    }
    write_text(given.out, to_json(data), private=False)


if __name__ == "__main__":
    main()
