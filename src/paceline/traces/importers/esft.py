"""ESFT's expert scores in text, expert_weights_N.txt: one file per layer, one line per sample.

A line has k ids per token by tab, two tabs, and as many weights by tab. Weights are softmax scores
over all experts, not renormalised. A file's number is the layer's index in the model.
"""

from __future__ import annotations

import re

import numpy as np

from paceline.traces.format import TraceError
from paceline.traces.importers.source import Source
from paceline.traces.importers.to_trace import from_choices
from paceline.traces.trace import Trace

_LINE = re.compile(r"\d+(\t\d+)*\t\t[-+.\deE]+(\t[-+.\deE]+)*")


def matches(source: Source) -> bool:
    """Check for a file, or a folder with files, of such lines."""
    return any(_fits(file) for file in source.files)


def read(source: Source) -> Trace:
    """Read the file of a layer, or all of a folder.

    Raises:
        TraceError: if a line can't be read, or the files differ in their samples.
    """
    experts, k = source.require("experts"), source.require("k")
    files = [file for file in source.files if _fits(file)]
    numbers = [re.match(r"\D*(\d+)", file.path.name) for file in files]
    order = sorted(range(len(files)), key=lambda i: int(n[1]) if (n := numbers[i]) else i)
    names = [f"layer {n[1]}" if (n := numbers[i]) else f"file {files[i].path.name}" for i in order]
    layers = [_read_layer(files[i], k) for i in order]
    lengths = layers[0][2]
    for i, (_, _, found) in zip(order, layers, strict=True):
        if found != lengths:
            raise TraceError(f"{files[i].path} has other samples than {files[order[0]].path.name}.")
    return from_choices(
        source, np.stack([ids for ids, _, _ in layers]), names, program="ESFT expert scores",
        experts=experts, starts=np.cumsum([0, *lengths]), batches="sample",
        weights=np.stack([weights for _, weights, _ in layers]), scores_are_weights=True,
        facts={"request": np.repeat(np.arange(len(lengths)), lengths)},
        notes=["weights are softmax scores, not renormalised"],
    )  # fmt: skip


def _fits(file: Source) -> bool:
    """Check the first line, of which only the start may have been read."""
    line = file.text.split("\n", 1)[0].rstrip("\r")
    start = line.split("\t", 16)
    return _LINE.fullmatch(line) is not None or (
        len(start) > 16 and all(part.isdigit() for part in start[:16])
    )


def _read_layer(file: Source, k: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Read ids [tokens, k], weights [tokens, k] and the tokens of each sample."""
    ids, weights, lengths = [], [], []
    for number, line in file.lines():
        left, tabs, right = line.rstrip("\r\n").partition("\t\t")
        try:
            chosen = np.array(left.split("\t"), dtype=np.int64)
            given = np.array(right.split("\t"), dtype=np.float32)
        except (ValueError, OverflowError):
            tabs = ""
        if not tabs or len(chosen) != len(given) or len(chosen) % k:
            raise TraceError(
                f"{file.path}, line {number}: expected ids by tab, two tabs and as many "
                f"weights, k={k} of each per token."
            )
        ids.append(chosen.reshape(-1, k))
        weights.append(given.reshape(-1, k))
        lengths.append(len(chosen) // k)
    if not lengths:
        raise TraceError(f"{file.path} has no lines.")
    return np.concatenate(ids), np.concatenate(weights), lengths
