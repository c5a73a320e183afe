"""Factors of their own for layers, under one bound on the model's expert time: do they pay?

    python benchmarks/layer_factors.py --out benchmarks/results/layer_factors.json
    python benchmarks/layer_factors.py --keep contribution --calibration .demo-build/third-0 \
      --calibration .demo-build/third-1 --calibration .demo-build/third-2 \
      --out benchmarks/results/layer_factors_contribution.json

(benchmarks/compensation.py says how the thirds are made.)

Factors are chosen as `paceline tune --bound` does, on text that the demo model was trained on (from
`.demo-build`, as examples/calibrate_demo_model.py takes it), and judged on the held-out texts:
beside the same factor for all, and the reverse, more room where a cap costs little, as a control.
Batches of 4,096 tokens of one text (2,048 for the choice), 8 devices, experts in order and placed
by the calibration that comes with the model. The bound is counted: the mean over layers of the
busiest device's rows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from paceline import CapacityPolicy, attach
from paceline.batches import Sampling, separate
from paceline.cli.output import progress
from paceline.demo.assets import held_out, load_model
from paceline.demo.settings import DEVICES
from paceline.evaluation.layer_factors import measure_layers
from paceline.evaluation.perplexity import PolicyRun, change, run_policy
from paceline.files import to_json, write_text
from paceline.plan import Plan
from paceline.shipped import CALIBRATION_FOLDER
from paceline.stand_ins.calibration_file import Calibration
from paceline.system_info import system_info

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from calibrate_demo_model import training_texts

BOUNDS = (1.0, 0.75, 0.5)
TRIED = (0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
SETTINGS = {
    "score": ((False, True, "device"), (True, True, "device"), (False, False, "device")),
    "contribution": ((True, True, "device"), (False, True, "device"), (False, True, "expert")),
}
"""Ranking -> whether experts are placed, whether drops leave their stand-ins, and the unit."""


def mean_busiest(run: PolicyRun, when: str) -> float:
    """Compute the busiest device's rows over the mean before, averaged over batches and layers."""
    ratios: list[float] = [
        max(getattr(layer, f"device_loads_{when}")) * DEVICES / sum(layer.device_loads_before)
        for layer in run.all_layers()
    ]
    return sum(ratios) / len(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, action="append", help="folder; repeatable")
    parser.add_argument("--keep", choices=list(SETTINGS), default="score")
    parser.add_argument("--sequences", type=int, default=16, help="of 256 tokens, of each text")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text, for the choice")
    options = parser.parse_args()
    model, tokenizer = load_model()
    batches = separate(held_out(tokenizer, 256, options.sequences), 16)
    texts = training_texts(options.tokens, None)
    sampling = Sampling(options.tokens * len(texts), 8, 256)
    folders = options.calibration or [CALIBRATION_FOLDER]
    data: dict[str, Any] = {
        "schema": "paceline-layer-factors/2",
        "model": "demo",
        "devices": DEVICES,
        "keep": options.keep,
        "chosen_on_tokens": sampling.tokens,
        "judged_tokens": sum(batch.ids.numel() for batch in batches),
        "settings": [],
        **system_info(),
    }
    for folder, (placed, compensate, unit) in itertools.product(folders, SETTINGS[options.keep]):
        calibration = Calibration.load(folder)
        placements = calibration.plan().placements if placed else (DEVICES,)
        base = CapacityPolicy(
            capacity_factor=1, unit=unit, compensate=compensate, keep=options.keep
        )
        plan = Plan(placements=placements)
        with progress() as tell:
            found = measure_layers(
                model, tokenizer, texts, base, plan=plan, calibration=calibration,
                sampling=sampling, factors=TRIED, progress=tell,
            )  # fmt: skip
        print(f"{folder.name}, {unit}, {'placed' if placed else 'in order'}", flush=True)
        rows = judge(model, batches, found, base, plan, calibration)
        data["settings"].append({
            "calibration": folder.name, "placed": placed, "compensate": compensate, "unit": unit,
            "tried": found.factors, "losses": found.losses, "rows": rows,
        })  # fmt: skip
        write_text(options.out, to_json(data), private=False)


def judge(
    model: Any, batches: Any, found: Any, base: CapacityPolicy, plan: Plan, calibration: Calibration
) -> list[dict[str, Any]]:
    """Judge every bound and way, batch by batch in turn."""
    ways: dict[tuple[float, str], list[CapacityPolicy | None]] = {}
    for bound in BOUNDS:
        alike = base.replace(capacity_factor=bound)
        own = found.share(alike)
        turned = [2 * bound - (each.capacity_factor or 0.0) for each in own]
        ways[bound, "alike"] = [alike] * len(own)
        ways[bound, "chosen"] = list(own)
        ways[bound, "reverse"] = [base.replace(capacity_factor=round(f, 4)) for f in turned]
    runs: dict[Any, Any] = {}
    with attach(model, None, plan=plan, calibration=calibration) as pace, progress() as tell:
        for done, batch in enumerate(batches, start=1):
            for key in (None, *ways):
                policies = None if key is None else ways[key]
                one = run_policy(model, pace, policies, [batch], lambda: None)
                if key not in runs:
                    runs[key] = one
                    continue
                for source in one.losses.sums:
                    for name in ("sums", "tokens"):
                        kept, new = getattr(runs[key].losses, name), getattr(one.losses, name)
                        kept.setdefault(source, []).extend(new[source])
                runs[key].layers += one.layers
            tell(done, len(batches), "batches judged")
    rows = []
    for (bound, way), policies in ways.items():
        run = runs[bound, way]
        after = change(runs[None].losses, run.losses)
        beside = change(runs[bound, "alike"].losses, run.losses)
        row = {
            "bound": bound,
            "way": way,
            "factors": [each.capacity_factor for each in policies if each],
            "perplexity_change": after.to_dict(),
            "beside_alike": beside.to_dict(),
            "busiest_device_before": mean_busiest(run, "before"),
            "busiest_device": mean_busiest(run, "after"),
            **run.shares().drops(),
        }
        rows.append(row)
        print(
            f"{bound} {way} {row['factors']}: {100 * after.mean:+.3f}% "
            f"+- {100 * (after.standard_error or 0):.3f}%, beside alike {100 * beside.mean:+.3f}% "
            f"+- {100 * (beside.standard_error or 0):.3f}%, busiest {row['busiest_device']:.4f}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
