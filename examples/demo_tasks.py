"""Three small tasks for lm-evaluation-harness, made from the demo's held-out texts.

    python examples/demo_tasks.py             # writes src/paceline/demo/tasks/*.jsonl
    python examples/demo_tasks.py --out DIR   # elsewhere, to compare

Of every text the second half alone, so that a calibration on first halves hasn't seen it. The same
texts give the same files. What the tasks are is said on their card, README.md beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

from paceline.demo.assets import domains, read_text

FOLDER = Path(__file__).resolve().parents[1] / "src" / "paceline" / "demo" / "tasks"
SEED = 12
CONTEXT, CONTINUATION = 240, 40  # characters
CHOICES = 4
QUESTIONS, COPIES, PASSAGES = 16, 12, 3  # of each text
PASSAGE = 1600  # characters; some are longer than the demo model reads at once

Row = dict[str, Any]


def continuations(name: str, text: str, rnd: random.Random) -> list[Row]:
    """Which of four pieces of the same text comes next?"""
    rows: list[Row] = []
    starts = _starts(text, CONTEXT + CONTINUATION, QUESTIONS * CHOICES, rnd)
    for question in range(QUESTIONS):
        start, *others = starts[question * CHOICES : (question + 1) * CHOICES]
        split = start + CONTEXT
        real = text[split : split + CONTINUATION]
        choices = [real, *(text[s + CONTEXT : s + CONTEXT + CONTINUATION] for s in others)]
        if len(set(choices)) < CHOICES:
            continue
        rnd.shuffle(choices)
        rows.append(
            {
                "text": name,
                "context": text[start:split],
                "choices": choices,
                "label": choices.index(real),
            }
        )
    return rows


def copies(name: str, text: str, rnd: random.Random) -> list[Row]:
    """A line twice, and the beginning of the third: what follows?"""
    lines = sorted({line.strip() for line in text.splitlines() if 24 <= len(line.strip()) <= 60})
    rows = []
    for line in rnd.sample(lines, min(COPIES, len(lines))):
        split = next((i for i in range(len(line) // 2, len(line)) if line[i] == " "), None)
        if split is not None and line[split:].strip():
            prompt = f"{line}\n{line}\n{line[:split]}"
            rows.append({"text": name, "prompt": prompt, "rest": line[split:]})
    return rows


def passages(name: str, text: str, rnd: random.Random) -> list[Row]:
    """Passages whose likelihood is measured."""
    return [
        {"text": name, "passage": text[start : start + PASSAGE]}
        for start in _starts(text, PASSAGE, PASSAGES, rnd)
    ]


def _starts(text: str, length: int, count: int, rnd: random.Random) -> list[int]:
    """Where `count` pieces of the text start that don't overlap, each at the start of a word."""
    step = length + length // 2
    places = rnd.sample(range(len(text) // step - 1), count)
    return [text.index(" ", place * step) for place in places]


TASKS = {"continuation": continuations, "copy": copies, "passage": passages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for task, make in TASKS.items():
        rnd = random.Random(f"{SEED} {task}")
        halves = {name: text[len(text) // 2 :] for name in domains() if (text := read_text(name))}
        made = [make(name, half, rnd) for name, half in halves.items()]
        # text by text in turn, so that the first samples are of all of them
        rows = [row for several in itertools.zip_longest(*made) for row in several if row]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (out / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{task}: {len(rows)}")


if __name__ == "__main__":
    main()
