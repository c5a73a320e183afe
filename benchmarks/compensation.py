"""Savings of stand-ins on the demo model: perplexity under caps, with and without compensation.

Judged on the held-out texts, in batches of 4,096 tokens of one text, with calibrations fitted on
text that the model was trained on: by default the one that comes with it. Several calibrations,
fitted on disjoint texts, tell how much it depends on these:

    for third in 0 1 2; do
      python examples/calibrate_demo_model.py --third $third --tokens 16384 \\
        --out .demo-build/third-$third
    done
    python benchmarks/compensation.py --calibration .demo-build/third-0 \\
      --calibration .demo-build/third-1 --calibration .demo-build/third-2 \\
      --out benchmarks/results/compensation.json
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from paceline import CapacityPolicy, attach
from paceline.batches import Batch, separate
from paceline.cli.output import progress
from paceline.demo.assets import held_out, load_model
from paceline.demo.settings import DEVICES
from paceline.evaluation.perplexity import Losses, change, run_policy
from paceline.files import to_json, write_text
from paceline.shipped import CALIBRATION_FOLDER
from paceline.stand_ins.calibration_file import Calibration
from paceline.system_info import system_info

WAYS = ("", ",compensate=true", ",compensate=true,keep=contribution")
CAPS = (
    ("capacity_factor=1", False),
    ("capacity_factor=1", True),
    ("capacity_factor=0.75", True),
    ("capacity_factor=0.5", False),
    ("capacity_factor=0.5", True),
    ("capacity_factor=1,unit=expert", False),
)
ROWS = tuple((cap + way, placed) for cap, placed in CAPS for way in WAYS)
"""Policies, and whether experts lie where the calibration places them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, action="append", help="folder; repeatable")
    parser.add_argument("--sequences", type=int, default=16, help="of 256 tokens, of each text")
    options = parser.parse_args()
    model, tokenizer = load_model()
    found = [Calibration.load(folder) for folder in options.calibration or [CALIBRATION_FOLDER]]
    batches = separate(held_out(tokenizer, 256, options.sequences), 16)
    with progress() as tell:
        judge = _Judge(model, batches, (1 + len(found) * len(ROWS)) * len(batches), tell)
        results = [judge.of(one) for one in found]
    data = {
        "schema": "paceline-compensation/3",
        "model": "demo",
        "devices": DEVICES,
        "judged_tokens": sum(batch.ids.numel() for batch in batches),
        "calibrations": [
            {
                "rank": one.layers[0].down.shape[1],
                "tokens": dict(zip(one.texts, one.tokens, strict=True)),
                "ridge": [layer.ridge for layer in one.layers],
                "explained_of_texts_left_out": [layer.explained for layer in one.layers],
            }
            for one in found
        ],
        "results": [
            {
                "policy": policy,
                "placed": placed,
                **_spread([result[row]["perplexity_change"]["mean"] for result in results]),
                "by_calibration": [result[row] for result in results],
            }
            for row, (policy, placed) in enumerate(ROWS)
        ],
        **system_info(),
    }
    write_text(options.out, to_json(data), private=False)


def _spread(changes: list[float]) -> dict[str, float]:
    return {
        "least_of_calibrations": min(changes),
        "mean_of_calibrations": statistics.fmean(changes),
        "most_of_calibrations": max(changes),
    }


class _Judge:
    """Runs every policy over the same batches."""

    def __init__(self, model: Any, batches: list[Batch], total: int, tell: Any) -> None:
        self._model, self._batches, self._total, self._tell = model, batches, total, tell
        self._done = 0
        self._base: Losses | None = None
        self._alone: dict[int, dict[str, Any]] = {}  # rows that don't depend on a calibration

    def of(self, found: Calibration) -> list[dict[str, Any]]:
        """Judge the rows of one calibration."""
        results: dict[int, dict[str, Any]] = {}
        for places in (False, True):
            where: Any = found.plan().placements if places else DEVICES
            with attach(self._model, None, where, calibration=found) as pace:
                base = self._losses(pace)
                for row, (policy, placed) in enumerate(ROWS):
                    if placed is not places:
                        continue
                    if row in self._alone:
                        results[row] = self._alone[row]
                        continue
                    run = run_policy(
                        self._model, pace, CapacityPolicy.parse(policy), self._batches, self._step
                    )
                    shares, after = run.shares(), change(base, run.losses)
                    results[row] = {
                        "perplexity_change": after.to_dict(),
                        **shares.drops(),
                        "device_peak_to_mean": shares.device_peak_to_mean,
                        "stand_in_distance": shares.stand_in_distance,
                    }
                    if not placed and "compensate" not in policy:
                        self._alone[row] = results[row]
                    print(f"{policy} placed={placed}: {100 * after.mean:+.3f}%", flush=True)
        return [results[row] for row in range(len(ROWS))]

    def _losses(self, pace: Any) -> Losses:
        """Run without a cap, once."""
        if self._base is None:
            self._base = run_policy(self._model, pace, None, self._batches, self._step).losses
        return self._base

    def _step(self) -> None:
        self._done += 1
        self._tell(self._done, self._total, "batches judged")


if __name__ == "__main__":
    main()
