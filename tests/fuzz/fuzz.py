"""Search inputs that a reader of strangers' files can't bear: `make fuzz` (libFuzzer by Atheris).

What is found is written to tests/fuzz/corpus/TARGET, and stays there as a test.

    python tests/fuzz/fuzz.py --runs 100000            # every target in turn
    python tests/fuzz/fuzz.py --target plan --runs 5000
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
SECONDS_AN_INPUT = 10
MEGABYTES = 3000


def fuzz(name: str, runs: int, seed: int) -> None:
    """Fuzz one target in this process; ends it, with 0 where nothing was found."""
    import atheris

    with atheris.instrument_imports(include=["paceline"]):
        from targets import TARGETS, violations

    target = TARGETS[name]

    def once(data: bytes) -> None:
        found = violations(target, data)
        if found:
            path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            raise AssertionError("; ".join(found))

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(target.seeds()):
            (Path(folder) / str(number)).write_bytes(data)
        options = [
            f"-runs={runs}",
            f"-seed={seed}",
            f"-timeout={SECONDS_AN_INPUT}",
            f"-rss_limit_mb={MEGABYTES}",
            f"-artifact_prefix={folder}/",
            "-max_len=65536",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *options, folder], once)
        atheris.Fuzz()


def main() -> None:
    """Every target in a process of its own, since libFuzzer ends the process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", help="only this one, in this process")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs a target")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.target:
        fuzz(given.target, given.runs, given.seed)
    from targets import TARGETS

    bad = []
    for name in TARGETS:
        print(f"-- {name}: {given.runs} inputs", flush=True)
        options = ["--target", name, "--runs", str(given.runs), "--seed", str(given.seed)]
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
        told = [line for line in done.stderr.splitlines() if "Error" in line or "stat::" in line]
        print("\n".join(told[-6:]), flush=True)
        if done.returncode:
            bad.append(name)
    sys.exit(f"found in {', '.join(bad)}: see {CORPUS}" if bad else 0)


if __name__ == "__main__":
    main()
