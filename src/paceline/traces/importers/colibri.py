"""Colibri's expert history (.coli_usage) and its routing trace (ROUTE_TRACE).

Formats: c/route_trace.h of JustVugg/colibri. The history is text, "layer expert count" per line,
with the dimensions in a line that begins with -1 and the writer in one with -2; older files have
neither. The trace has a line per call of a layer and row of its batch, "call row layer
id:gate id:gate ...".
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict

import numpy as np

from paceline.traces.format import MAX_EXPERTS, MAX_LAYERS, TraceError, seen
from paceline.traces.importers.source import Source, whole_numbers
from paceline.traces.importers.to_trace import even, from_choices, from_counts, layer_names
from paceline.traces.trace import Trace

_DIMENSIONS, _WRITER = "-1", "-2"
_HISTORY = re.compile(r"-1 +\d+ +\d+")
_ROW = re.compile(r"\d+ \d+ \d+( \d+:-?[0-9.einfa+-]+)+")


def matches(source: Source) -> bool:
    """Check for a history with a header or its usual name, or a routing trace."""
    line = source.first_line
    usual = source.path.name.endswith("coli_usage") and len(line.split()) == 3
    return bool(usual or _HISTORY.fullmatch(line) or _ROW.fullmatch(line))


def read(source: Source) -> Trace:
    """Read the counts of a history, or each token's experts.

    Raises:
        TraceError: if a line can't be read.
    """
    return _choices(source) if _ROW.fullmatch(source.first_line) else _history(source)


def _history(source: Source) -> Trace:
    table: dict[int, dict[int, int]] = defaultdict(dict)
    stated = 0

    def parse(line: str, place: str) -> None:
        nonlocal stated
        fields = line.split()
        if fields[0] in (_DIMENSIONS, _WRITER):
            numbers = whole_numbers(fields[1:], 2, place)
            if fields[0] == _DIMENSIONS:
                stated = source.agree("experts", numbers[1])
            return
        layer, expert, count = whole_numbers(fields, 3, place)
        if layer >= MAX_LAYERS or expert >= (stated or MAX_EXPERTS):
            raise TraceError(f"{place} names layer {layer}, expert {expert}, which can't be.")
        table[layer][expert] = count

    source.each_line(parse)
    experts = stated or source.require("experts")
    if not table:
        raise TraceError(f"{source.where} has no counts.")
    counts = np.zeros((1, len(table), experts))
    for row, layer in enumerate(sorted(table)):
        for expert, count in table[layer].items():
            if expert >= experts:
                raise TraceError(f"{source.where} names expert {expert} of {experts}.")
            counts[0, row, expert] = count
    return from_counts(
        source, counts, layer_names(sorted(table)), program="Colibri history", batches="file",
        notes=["counts over all sessions so far"],
    )  # fmt: skip


def _choices(source: Source) -> Trace:
    """Read the rows of every layer; a forward begins where the layer's number falls back."""
    experts, k, last = source.require("experts"), 0, MAX_LAYERS
    calls: tuple[int, int] = (-1, -1)  # of the line before: call and layer
    forwards: list[dict[int, array[int]]] = []

    def parse(line: str, place: str) -> None:
        nonlocal k, last, calls
        head, ids = line.split()[:3], line.split()[3:]
        call, _, layer = whole_numbers(head, 3, place)
        chosen = whole_numbers([text.partition(":")[0] for text in ids], None, place)
        k = k or len(chosen)
        if len(chosen) != k or layer >= MAX_LAYERS:
            raise TraceError(f"{place}: {seen(line)} must have {k} experts of a layer.")
        if (call, layer) != calls:
            if layer <= last:
                forwards.append(defaultdict(lambda: array("q")))
            last, calls = layer, (call, layer)
        forwards[-1][layer].extend(chosen)

    source.each_line(parse)
    indices = sorted(set().union(*forwards))
    notes, tables = ["gates are rounded to 4 digits: no weights are taken over"], []
    for part in forwards:
        table, uneven = even({index: part.get(index, ()) for index in indices}, k)
        tables.append(table)
        notes += [note.partition(":")[2].strip() for note in uneven]
    notes = list(dict.fromkeys(notes))
    return from_choices(
        source, np.concatenate(tables, 1), layer_names(indices), program="Colibri trace",
        experts=experts, starts=np.cumsum([0, *(table.shape[1] for table in tables)]),
        batches="forward", notes=notes,
    )  # fmt: skip
