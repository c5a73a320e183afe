"""Cost of caps on the demo model: policies on texts and tasks, or a sweep over caps of every size.

Stand-ins are calibrated on the first half of each held-out text; texts and tasks are of the second.

    python benchmarks/quality.py policies --out benchmarks/results/quality.json
    python benchmarks/quality.py sweep --out benchmarks/results/sweep.json --ship
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.batches import Sampling
from paceline.calibration.collect import calibrate
from paceline.cli.output import progress
from paceline.demo.assets import domains, load_model, read_text
from paceline.evaluation.results import EvalResult
from paceline.evaluation.run import Axes, Job, evaluate, sweep
from paceline.evaluation.subject import Subject
from paceline.evaluation.sweep_results import SweepResult, read_sweep
from paceline.evaluation.tables import markdown
from paceline.evaluation.tasks import load_tasks
from paceline.files import to_json, write_text
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.reporting.quality_figures import sweep_table
from paceline.shipped import SWEEP_FILE, TASK_FOLDER
from paceline.stand_ins.calibration_file import Calibration

TASKS = ("paceline_continuation", "paceline_copy", "paceline_passage")
SAMPLING = Sampling(tokens=18432, batch_size=8, sequence_length=256)


POLICIES = (
    "capacity_factor=1.25",
    "capacity_factor=1",
    "capacity_factor=1,compensate=true",
    "capacity_factor=1,expand=own_device",
    "capacity_factor=2,unit=expert",
    "capacity_factor=1,unit=expert",
    "capacity_factor=1,unit=expert,compensate=true",
    "capacity_factor=1,unit=expert,keep=random",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of the demo model under caps.")
    parser.add_argument("what", choices=("policies", "sweep"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="folder that a killed run goes on from")
    parser.add_argument("--calibration", type=Path, help="folder of one; made there if need be")
    parser.add_argument("--ship", action="store_true", help="as what the demo's page shows")
    parser.add_argument("--limit", type=int, help="samples of a task, of all texts alike")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    model, tokenizer = load_model()
    halves: list[dict[str, str]] = [{}, {}]
    for name in domains():
        text = read_text(name)
        middle = len(text) // 2
        halves[0][name], halves[1][name] = text[:middle], text[middle:]
    with progress() as tell:
        found = _calibration(options, model, tokenizer, halves[0], tell)
        plan = Plan(placements=(options.devices,))
        if options.what == "sweep":
            result: EvalResult | SweepResult = sweep(
                model,
                tokenizer,
                halves[1],
                axes=[
                    Axes(keeps=("score",), compensates=(False, True)),
                    Axes(keeps=("random",), expands=(None,)),
                ],
                plan=plan,
                calibration=found,
                sampling=SAMPLING,
                out=options.state,
                progress=tell,
            )
        else:
            policies = [CapacityPolicy.parse(each) for each in POLICIES]
            result = evaluate(
                Subject.of(model, tokenizer, policies, plan, found),
                Job(
                    halves[1],
                    SAMPLING,
                    tasks=load_tasks(dict.fromkeys(TASKS), [TASK_FOLDER]),
                    limit=options.limit,
                    task_batch=8,
                ),
                out=options.state,
                progress=tell,
            )
    result.model, result.command = "demo", f"python benchmarks/quality.py {options.what}"
    write_text(options.out, to_json(result.to_dict() | {"rank": options.rank}), private=False)
    if options.what == "sweep" and options.ship:
        write_text(SWEEP_FILE, read_sweep(options.out).to_json(), private=False)
    print(markdown(result) if isinstance(result, EvalResult) else sweep_table(result.to_dict()))


def _calibration(
    options: argparse.Namespace, model: Any, tokenizer: Any, texts: dict[str, str], tell: Progress
) -> Calibration:
    if options.calibration is not None and options.calibration.is_dir():
        return Calibration.load(options.calibration)
    sampling = Sampling(tokens=40000, batch_size=8, sequence_length=256)
    found = calibrate(model, tokenizer, texts, rank=options.rank, sampling=sampling, progress=tell)
    if options.calibration is not None:
        options.calibration.mkdir(parents=True)
        found.save(options.calibration)
    return found


if __name__ == "__main__":
    main()
