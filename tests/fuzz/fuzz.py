"""Search inputs that a reader of strangers' files can't bear: `make fuzz` (libFuzzer by Atheris).

What is found is written to tests/fuzz/corpus/TARGET, and stays there as a test. A process bears so
many inputs and the next one goes on with what it kept, so that no find, no hang and no memory that
ran out ends the search. Figures go to benchmarks/results/fuzz.json as they come.

    python tests/fuzz/fuzz.py --runs 70000                # every target in turn
    python tests/fuzz/fuzz.py --target plan --runs 5000   # one, beside what is known of others
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from targets import TARGETS

from paceline.files import to_json, write_text
from paceline.system_info import system_info

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "fuzz.json"
INPUTS_A_PROCESS = 20_000
MOST_FINDS = 5
"""After so many of one target it is left: the rest of its finds are likely the same."""


def main() -> None:
    """Fuzz, tell, write down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one")
    parser.add_argument("--runs", type=int, default=70_000, help="inputs a target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    bad = []
    for name in given.target or TARGETS:
        print(f"-- {name}: {given.runs} inputs", flush=True)
        found = fuzz(name, given.runs, given.seed)
        print(found, flush=True)
        write_down(given.out, name, found)
        if found["finds"]:
            bad.append(name)
    sys.exit(f"found in {', '.join(bad)}: see {CORPUS}" if bad else 0)


def fuzz(name: str, runs: int, seed: int) -> dict[str, Any]:
    """So many inputs to one target, in processes one after another.

    Returns:
        inputs, minutes, peak_megabytes of any process, finds: what libFuzzer or the target said.
    """
    done, peak, finds, start = 0, 0, [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzzing-", dir=memory()) as folder:
        inputs, kept, count = (Path(folder) / part for part in ("inputs", "finds", "count"))
        inputs.mkdir()
        kept.mkdir()
        while done < runs and len(finds) < MOST_FINDS:
            wanted = min(INPUTS_A_PROCESS, runs - done)
            options = ["--runs", str(wanted), "--seed", str(seed + done)]
            program = [HERE / "under_libfuzzer.py", name, inputs, kept, count, *options]
            ended = subprocess.run(
                [sys.executable, *map(str, program)],
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "TMPDIR": folder},
            )
            if not count.exists():
                raise RuntimeError(f"{name} did not start: {ended.stderr[-2000:]}")
            done += int.from_bytes(count.read_bytes(), "little")
            count.unlink()
            peak = max([peak, *map(int, re.findall(r"peak_rss_mb:\s+(\d+)", ended.stderr))])
            if ended.returncode:
                finds.append(what_was_said(ended.stderr))
                keep(kept, CORPUS / name)
    minutes = round((time.monotonic() - start) / 60, 1)
    return {"inputs": done, "minutes": minutes, "peak_megabytes": peak, "finds": finds}


def memory() -> str | None:
    """A folder in memory where there is one: every input writes files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def what_was_said(text: str) -> str:
    """The line that names a find."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if "Error: " in line or "ERROR: " in line]
    return (told[0] if told else lines[-1] if lines else "nothing")[:300]


def keep(found: Path, corpus: Path) -> None:
    """Move finds, hangs and what takes too much memory to the corpus."""
    for path in list(found.iterdir()):
        data = path.read_bytes()
        if not path.name.startswith("slow-unit-"):
            corpus.mkdir(parents=True, exist_ok=True)
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        path.unlink()


def write_down(path: Path, name: str, found: dict[str, Any]) -> None:
    """Put one target's figures beside the others'."""
    targets = json.loads(path.read_text(encoding="utf-8"))["targets"] if path.exists() else {}
    targets[name] = {**found, "version": version("paceline")}
    data = {
        "program": "tests/fuzz/fuzz.py",
        "fuzzer": f"atheris {version('atheris')}",
        "inputs": sum(target["inputs"] for target in targets.values()),
        "minutes": round(sum(target["minutes"] for target in targets.values()), 1),
        "finds": sum(len(target["finds"]) for target in targets.values()),
        "targets": targets,
        **system_info(),
    }
    write_text(path, to_json(data), private=False)


if __name__ == "__main__":
    main()
