"""CSV of assignments or counts by layer and expert: SGLang's former recorder, llama.cpp, others.

A header names the columns: layer (or layer_id), expert (or expert_id), and a count (or hits, or
activations); without a count every row is one assignment. Experts without a row had none, so the
file doesn't state how many there are.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from paceline.traces.format import MAX_LAYERS, TraceError
from paceline.traces.importers.source import Source, whole_numbers
from paceline.traces.importers.to_trace import from_counts, layer_names
from paceline.traces.trace import Trace

_LAYER, _EXPERT = {"layer", "layer_id"}, {"expert", "expert_id"}
_COUNT = {"count", "hits", "activations"}


def matches(source: Source) -> bool:
    """Check for such a file, or a folder with some."""
    return any(_columns(file) for file in source.files)


def read(source: Source) -> Trace:
    """Add up the files of a folder, which are the ranks of one run.

    Raises:
        TraceError: if a line can't be read.
    """
    experts = source.require("experts")
    table: dict[int, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(experts))
    files = [file for file in source.files if _columns(file)]
    for file in files:
        header, columns = file.first_line, _columns(file)

        def parse(line: str, place: str, header: str = header, columns: int = columns) -> None:
            if line.strip() == header:
                return
            layer, expert, *count = whole_numbers(line.split(","), columns, place)
            if expert >= experts or layer >= MAX_LAYERS:
                raise TraceError(f"{place} names expert {expert}: ids must be 0 to {experts - 1}.")
            table[layer][expert] += count[0] if count else 1

        file.each_line(parse)
        source.remarks += file.remarks if file is not source else []
    if not table:
        raise TraceError(f"{source.where} has no counts.")
    alone = "one file: give the folder where there are several ranks, whose counts add up"
    return from_counts(
        source, np.stack([table[i] for i in sorted(table)])[None], layer_names(sorted(table)),
        program="CSV of counts", batches="file",
        notes=[f"the sum of {len(files)} ranks" if len(files) > 1 else alone],
    )  # fmt: skip


def _columns(file: Source) -> int:
    """Return the number of columns, 0 for another file."""
    names = [name.strip().lower() for name in file.first_line.split(",")]
    fits = len(names) in (2, 3) and names[0] in _LAYER and names[1] in _EXPERT
    return len(names) if fits and set(names[2:]) <= _COUNT else 0
