"""What stand-ins save: perplexity of the demo model under caps, with and without compensation.

Calibrated on the first half of each held-out text, judged on the second; batches of one text.

    python benchmarks/compensation.py --out benchmarks/results/compensation.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from paceline import CapacityPolicy, attach
from paceline.analysis.observe import Sampling, make_batches
from paceline.calibration.collect import calibrate
from paceline.calibration.file import Calibration
from paceline.cli.progress import progress
from paceline.demo.assets import domains, load_model, read_text
from paceline.demo.study import drops, flat, run_policy
from paceline.evaluation.perplexity import as_dict, change
from paceline.reporting.environment import environment
from paceline.reporting.files import to_json, write_text

CAPS = ("capacity_factor=1", "capacity_factor=0.5", "capacity_factor=1,unit=expert")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--calibration", type=Path, help="folder of one made before")
    given = parser.parse_args()
    model, tokenizer = load_model()
    halves: list[dict[str, str]] = [{}, {}]
    for name in domains():
        text = read_text(name)
        middle = len(text) // 2
        halves[0][name], halves[1][name] = text[:middle], text[middle:]
    sampling = Sampling(tokens=40000, batch_size=8, sequence_length=256)
    with progress() as tell:
        if given.calibration is None:
            found = calibrate(
                model, tokenizer, halves[0], rank=given.rank, sampling=sampling, progress=tell
            )
            with tempfile.TemporaryDirectory() as folder:
                size = found.save(folder).stat().st_size
        else:
            found = Calibration.load(given.calibration)
            size = sum(path.stat().st_size for path in given.calibration.iterdir())
        batches, tokens = make_batches(tokenizer, halves[1], sampling)
        results: list[dict[str, object]] = []
        done = 0
        steps = len(batches) * (1 + 2 * len(CAPS))

        def step() -> None:
            nonlocal done
            done += 1
            tell(done, steps, "batches judged")

        with attach(model, None, given.devices, calibration=found) as pace:
            base = run_policy(model, pace, None, batches, step)
            for cap in CAPS:
                for compensate in (False, True):
                    policy = CapacityPolicy.parse(cap).replace(compensate=compensate)
                    run = run_policy(model, pace, policy, batches, step)
                    found_change = change(base.losses, run.losses)
                    results.append(
                        {
                            "policy": str(policy),
                            "perplexity_change": as_dict(found_change),
                            **drops(flat(run.layers)),
                        }
                    )
                    print(policy, found_change.mean, flush=True)
    data = {
        "schema": "paceline-compensation/1",
        "model": "demo",
        "devices": given.devices,
        "rank": found.layers[0].down.shape[1],
        "calibrated_on": dict(zip(found.texts, found.tokens, strict=True)),
        "judged_on": dict(tokens),
        "explained_held_out": [layer.explained for layer in found.layers],
        "ridge": [layer.ridge for layer in found.layers],
        "calibration_bytes": size,
        "results": results,
        **environment(),
    }
    write_text(given.out, to_json(data), private=False)


if __name__ == "__main__":
    main()
