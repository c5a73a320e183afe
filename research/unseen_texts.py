"""Stand-ins on text of kinds that they were not calibrated on: never worse than dropping?

The demo model, calibrated on four of its nine domains (training text), is judged on held-out text
of all nine, in batches of 4,096 tokens of one text: perplexity under caps, dropping beside
Compensated Drop, and how far inputs were from those of the calibration. Twice, the second time with
four of the others.

    python research/unseen_texts.py --out research/results/unseen_texts.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import CapacityPolicy, attach
from paceline.batches import Batch, Sampling, separate
from paceline.calibration.collect import calibrate
from paceline.cli.output import progress
from paceline.demo.assets import held_out, load_model
from paceline.demo.settings import DEVICES
from paceline.evaluation.perplexity import Losses, PolicyRun, change, run_policy
from paceline.files import to_json, write_text
from paceline.system_info import system_info

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from calibrate_demo_model import training_texts

SEEN = (("c", "german", "html", "maths"), ("french", "glosses", "prose", "python"))
CAPS = ("capacity_factor=1", "capacity_factor=1,unit=expert")
WAYS = ("", ",compensate=true", ",compensate=true,keep=contribution")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of calibration, of each text")
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    model, tokenizer = load_model()
    batches = separate(held_out(tokenizer, 256, 16), 16)
    texts = training_texts(given.tokens, None)
    results, base = [], None
    for seen in SEEN:
        sampling = Sampling(given.tokens * len(seen), batch_size=16, sequence_length=256)
        chosen = {name: texts[name] for name in seen}
        with progress() as tell:
            found = calibrate(
                model, tokenizer, chosen, rank=given.rank, sampling=sampling, progress=tell
            )
        with attach(model, None, DEVICES, calibration=found) as pace:
            if base is None:
                base = run_policy(model, pace, None, batches, lambda: None).losses
            for cap in CAPS:
                for way in WAYS:
                    policy = CapacityPolicy.parse(cap + way)
                    run = run_policy(model, pace, policy, batches, lambda: None)
                    results.append(
                        result := judged(base, run, batches, seen) | {"policy": cap + way}
                    )
                    said = {key: f"{100 * result[key]:+.2f}%" for key in ("seen", "never_seen")}
                    print(cap + way, said, flush=True)
    data = {
        "schema": "paceline-unseen-texts/1",
        "model": "demo",
        "devices": DEVICES,
        "rank": given.rank,
        "calibration_tokens_of_a_text": given.tokens,
        "judged_tokens": sum(batch.ids.numel() for batch in batches),
        "results": results,
        **system_info(),
    }
    write_text(given.out, to_json(data), private=False)


def judged(
    base: Losses, run: PolicyRun, batches: list[Batch], seen: tuple[str, ...]
) -> dict[str, Any]:
    """Measure the perplexity change on seen and unseen texts, and how far their inputs were."""
    after = change(base, run.losses)
    far: dict[str, list[float]] = {}
    for batch, layers in zip(batches, run.layers, strict=True):
        known = [layer.stand_in_distance for layer in layers]
        far.setdefault(batch.sources[0], []).extend(x for x in known if x is not None)
    distance = {name: statistics.fmean(values) for name, values in far.items() if values}
    return {
        "calibrated_on": list(seen),
        "perplexity_change": after.to_dict(),
        "seen": _mean(after.by_domain, seen, True),
        "never_seen": _mean(after.by_domain, seen, False),
        "stand_in_distance": distance,
    }


def _mean(values: Mapping[str, float], seen: tuple[str, ...], which: bool) -> float:
    return statistics.fmean(value for name, value in values.items() if (name in seen) is which)


if __name__ == "__main__":
    main()
