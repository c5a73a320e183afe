"""`paceline demo`: stragglers, what a cap costs and what it saves, on the embedded model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.batches import Batch, mixed, separate, tokens_by_source
from paceline.demo.assets import load_calibration, load_model
from paceline.demo.plan import BASELINE, DEVICES, KINDS, Plan
from paceline.demo.results import describe, example, policies, stragglers
from paceline.demo.study import PolicyRun, held_out, run_policy
from paceline.demo.wording import findings
from paceline.progress import Progress
from paceline.stand_ins.file import Calibration

"""Called with steps done, steps in all and what was just done."""

SCHEMA = "paceline-demo/2"


class _Steps:
    """Counts steps and tells the caller."""

    def __init__(self, total: int, tell: Progress | None) -> None:
        self.done, self.total, self.tell = 0, total, tell

    def teller(self, what: str) -> Callable[[], None]:
        """A function to call after each step of this kind."""

        def step() -> None:
            self.done += 1
            if self.tell is not None:
                self.tell(self.done, self.total, what)

        return step


def run_demo(
    out: str | Path | None = "paceline-demo",
    *,
    plan: Plan | None = None,
    progress: Progress | None = None,
    command: str = "paceline demo",
) -> dict[str, Any]:
    """Run the whole demo and write `index.html` and `results.json` into the folder `out`.

    Args:
        out: folder, created if need be; None writes nothing.
        plan: size of the run; None is the full one.
        progress: told after every batch.
        command: what the user typed, for the page's footer.

    Returns:
        The content of results.json.

    Raises:
        FileNotFoundError: if the model or the texts are missing from the installation.
        OSError: if `out` can't be written.
    """
    from paceline.bench.emulated import CLOCK
    from paceline.demo.timing import REPEATS
    from paceline.engines.transformers import attach
    from paceline.placement import ExpertPlacement
    from paceline.system_info import system_info

    plan = plan or Plan.full()
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)  # fail before the work, not after it
    started, surroundings = time.perf_counter(), system_info()
    model, tokenizer = load_model()
    batches, tokens = _batches(tokenizer, plan)
    timed = {
        "one_domain": batches["one_domain"][:: plan.timed_every],
        "mixed": batches["mixed"][: plan.timed_mixed],
    }
    total = len(plan.entries) * sum(map(len, batches.values())) + sum(map(len, timed.values()))
    steps = _Steps(total, progress)

    runs: dict[str, dict[str, PolicyRun]] = {kind: {} for kind in KINDS}
    calibration = load_calibration()
    placed = calibration.plan().placements
    for places in (False, True):
        with attach(
            model, None, placed if places else DEVICES, calibration=calibration,
            token_source="sequence",
        ) as pace:  # fmt: skip
            for kind, words in KINDS.items():
                for entry in plan.entries:
                    if entry.placed is places:
                        runs[kind][entry.key] = run_policy(
                            model,
                            pace,
                            entry.policy,
                            batches[kind],
                            steps.teller(f"{words}: {entry.label}"),
                        )

    placement = ExpertPlacement.contiguous(model.config.num_experts, DEVICES)
    timing = _time(model, timed, plan, calibration, steps)
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "reduced": plan.reduced,
        **surroundings,
        "model": describe(model, placement),
        "data": {
            "tokens_by_domain": tokens,
            "sequences_per_batch": plan.sequences,
            "sequence_length": plan.length,
            "one_domain_batches": len(batches["one_domain"]),
            "mixed_batches": len(batches["mixed"]),
            "predicted_tokens": runs["one_domain"][BASELINE].losses.predicted_tokens(),
        },
        "calibration": {
            "rank": calibration.layers[0].down.shape[1],
            "tokens": dict(zip(calibration.texts, calibration.tokens, strict=True)),
            "explained_of_texts_left_out": [layer.explained for layer in calibration.layers],
        },
        "stragglers": stragglers(runs),
        "policies": policies(plan, runs, timing),
        "example": example(runs),
        "timing": {
            "kind": "emulated devices, one process, expert computation only",
            "threads": 1,
            "rounds": plan.rounds,
            "repeats": REPEATS,
            "clock": CLOCK,
            "experts_implementation": getattr(model.config, "_experts_implementation", None),
            "batches": {kind: [list(_sources(b)) for b in timed[kind]] for kind in KINDS},
        },
    }
    results["findings"] = findings(results)
    results["seconds"] = round(time.perf_counter() - started, 1)
    if out is not None:
        from paceline.demo.page import write_demo

        write_demo(results, Path(out))
    return results


def _sources(batch: Batch) -> dict[str, None]:
    return dict.fromkeys(batch.sources)


def _batches(tokenizer: Any, plan: Plan) -> tuple[dict[str, list[Batch]], Mapping[str, int]]:
    """One-domain and mixed batches of the very same sequences, and tokens of each text."""
    parts = held_out(tokenizer, plan.length, plan.sequences, plan.max_domains)
    batches = {
        "one_domain": separate(parts, plan.sequences),
        "mixed": mixed(parts, plan.sequences),
    }
    return batches, tokens_by_source(parts)


def _time(
    model: Any,
    timed: Mapping[str, Sequence[Batch]],
    plan: Plan,
    calibration: Calibration,
    steps: _Steps,
) -> dict[str, dict[str, dict[str, Any]]]:
    from paceline.demo.timing import time_batches

    return {
        kind: time_batches(
            model,
            timed[kind],
            plan.entries,
            calibration,
            plan.rounds,
            steps.teller(f"{words}: timing of emulated devices"),
        )
        for kind, words in KINDS.items()
    }
