"""One target in a process of libFuzzer (by Atheris), which ends it; `fuzz.py` starts these."""

from __future__ import annotations

import argparse
import hashlib
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS_AN_INPUT = 10
MEGABYTES = 1500
LONGEST_INPUT = 1 << 16  # bytes
PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
COMPARE: tuple[Callable[[Any, Any], Any], ...] = (
    operator.lt,
    operator.le,
    operator.eq,
    operator.ne,
    operator.gt,
    operator.ge,
)
"""By the number that bytecode has for each."""


def without_leak(native: Callable[..., Any]) -> Callable[..., Any]:
    """Atheris' hook on comparisons, but for those whose result is an object of its own.

    The hook of Atheris 3.0.0 never gives back the reference it takes to a result. That of two plain
    values is True or False; that of an array is an array, which stays in memory for good: a
    megabyte an input where a trace was imported. libFuzzer learns nothing from these anyway.
    """

    def compare(left: Any, right: Any, how: int, counter: int, constant: bool) -> Any:
        if type(left) in PLAIN and type(right) in PLAIN:
            return native(left, right, how, counter, constant)
        return COMPARE[how](left, right)

    return compare


def main() -> None:
    """Run inputs; 0 where nothing was found.

    What is found is written to `finds`, the number of inputs so far to `count`; `inputs` is what
    libFuzzer starts from and adds to.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    for name in ("inputs", "finds", "count"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()

    import atheris

    with atheris.instrument_imports(include=["paceline"]):
        from targets import TARGETS, violations

    target = TARGETS[given.target]
    count, done = os.open(given.count, os.O_WRONLY | os.O_CREAT, 0o600), 0

    def once(data: bytes) -> None:
        nonlocal done
        done += 1
        if done == 1:  # Fuzz has set the hook by now
            atheris._trace_cmp = without_leak(atheris._trace_cmp)
        os.pwrite(count, done.to_bytes(8, "little"), 0)
        found = violations(target, data)
        if found:
            (given.finds / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
            raise AssertionError("; ".join(found))

    for number, data in enumerate(target.seeds()):
        (given.inputs / f"seed-{number}").write_bytes(data)
    options = [
        f"-runs={given.runs}",
        f"-seed={given.seed}",
        f"-timeout={SECONDS_AN_INPUT}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-artifact_prefix={given.finds}/",
        f"-max_len={LONGEST_INPUT}",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(given.inputs)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
