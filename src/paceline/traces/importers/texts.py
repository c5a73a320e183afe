"""Routing in plain text: tables by comma, and ESFT's lines of ids and weights."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.traces.format import TraceError, seen
from paceline.traces.importers.asked import Asked
from paceline.traces.importers.choices import from_choices
from paceline.traces.importers.counts import from_counts, layer_names
from paceline.traces.trace import Trace

COUNTS_HEADER, CHOICES_HEADER = "layer_id,expert_id,count", "layer_id,expert_ids"
MAX_TEXT_BYTES = 1 << 30
_LINE = 1 << 26  # characters
_ESFT = re.compile(r"\d+(\t\d+)*\t\t[-+.\deE]+(\t[-+.\deE]+)*")


def is_esft(line: str) -> bool:
    """Whether a line is ids by tab, two tabs, weights by tab."""
    return _ESFT.fullmatch(line.rstrip("\r\n")) is not None


def read_esft(paths: Sequence[Path], where: str, asked: Asked) -> Trace:
    """ESFT's expert_weights_N.txt, one a layer: a line a sample, k ids and k weights a token.

    Weights are softmax scores over all experts, not renormalised. A file's number is the layer's
    index in the model.

    Raises:
        TraceError: if a line can't be, or the files differ in their samples.
    """
    experts = asked.needed("experts", where, "how many experts a layer has")
    k = asked.needed("k", where, "how many experts a token has")
    numbers = [re.match(r"\D*(\d+)", path.name) for path in paths]
    order = sorted(range(len(paths)), key=lambda i: int(n[1]) if (n := numbers[i]) else i)
    names = [f"layer {n[1]}" if (n := numbers[i]) else f"file {paths[i].name}" for i in order]
    ids, weights, lengths = [], [], None
    for i in order:
        layer_ids, layer_weights, layer_lengths = _esft_layer(paths[i], k)
        if lengths is not None and layer_lengths != lengths:
            raise TraceError(f"{paths[i]} has other samples than {paths[order[0]].name}.")
        lengths = layer_lengths
        ids.append(layer_ids)
        weights.append(layer_weights)
    assert lengths is not None
    return from_choices(
        np.stack(ids), names, where=where, source="ESFT expert scores", experts=experts,
        starts=np.cumsum([0, *lengths]), batches="sample", weights=np.stack(weights),
        scores_are_weights=True, k=k,
        facts={"request": np.repeat(np.arange(len(lengths)), lengths)},
        notes=["weights are softmax scores, not renormalised"],
    )  # fmt: skip


def _esft_layer(path: Path, k: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    ids, weights, lengths = [], [], []
    for number, line in lines(path):
        left, tabs, right = line.rstrip("\r\n").partition("\t\t")
        try:
            chosen = np.array(left.split("\t"), dtype=np.int64)
            given = np.array(right.split("\t"), dtype=np.float32)
        except (ValueError, OverflowError):
            tabs = ""
        if not tabs or len(chosen) != len(given) or len(chosen) % k:
            raise TraceError(
                f"{path}, line {number}: expected are ids by tab, two tabs and as many weights, "
                f"k={k} of each a token."
            )
        ids.append(chosen.reshape(-1, k))
        weights.append(given.reshape(-1, k))
        lengths.append(len(chosen) // k)
    if not lengths:
        raise TraceError(f"{path} has no lines.")
    return np.concatenate(ids), np.concatenate(weights), lengths


def read_count_tables(paths: Sequence[Path], where: str, asked: Asked) -> Trace:
    """SGLang's former CSV, layer_id,expert_id,count: one file a rank, summed here.

    Experts without tokens are absent, so the file doesn't tell how many there are.

    Raises:
        TraceError: if a line can't be.
    """
    experts = asked.needed("experts", where, "how many experts a layer has")
    table: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(experts))
    for path in paths:
        for number, line in lines(path):
            if number == 1:
                continue
            layer, expert, count = _whole_numbers(line.split(","), 3, path, number)
            if expert >= experts or layer >= 1 << 20:
                raise TraceError(
                    f"{path}, line {number} names expert {expert}: allowed is 0 to {experts - 1}."
                )
            table[layer][expert] += count
    if not table:
        raise TraceError(f"{where} has no counts.")
    indices = sorted(table)
    notes = [f"the sum of {len(paths)} ranks" if len(paths) > 1 else ONE_RANK]
    return from_counts(
        np.stack([table[i] for i in indices])[None], layer_names(indices), where=where,
        source="SGLang CSV of counts", batches="file", k=asked.k, asked=asked, notes=notes,
    )  # fmt: skip


ONE_RANK = "one rank's file: give the folder where there are several, whose counts add up"


def read_choice_table(path: Path, where: str, asked: Asked) -> Trace:
    """A llama.cpp patch's CSV, layer_id,expert_ids: a row a token and layer, ids by space.

    Raises:
        TraceError: if a row can't be.
    """
    experts = asked.needed("experts", where, "how many experts a layer has")
    rows: dict[int, array[int]] = defaultdict(lambda: array("q"))  # flat: there may be millions
    k = 0
    for number, line in lines(path):
        if number == 1:
            continue
        layer, _, ids = line.rstrip("\r\n").partition(",")
        chosen = _whole_numbers(ids.split(" "), None, path, number)
        k = k or len(chosen)
        if len(chosen) != k:
            raise TraceError(f"{path}, line {number} has {len(chosen)} ids: expected are {k}.")
        rows[_whole_numbers([layer], 1, path, number)[0]].extend(chosen)
    if not rows:
        raise TraceError(f"{path} has no rows.")
    tokens = min(map(len, rows.values())) // k
    notes = ["in the order of the file; batches aren't told; no weights"]
    if len({len(layer) for layer in rows.values()}) > 1:
        notes.append(f"cut to the {tokens} tokens that every layer has")
    indices = sorted(rows)
    return from_choices(
        np.stack([np.array(rows[i]).reshape(-1, k)[:tokens] for i in indices]),
        layer_names(indices),
        where=where, source="llama.cpp CSV of choices", experts=experts,
        starts=np.array([0, tokens]), batches="file", k=asked.k, notes=notes,
    )  # fmt: skip


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line that isn't empty.

    Raises:
        TraceError: if the file is too large, or no text.
    """
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise TraceError(f"{path} is larger than the {MAX_TEXT_BYTES} bytes that are allowed.")
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(_LINE):
                number += 1
                if len(line) >= _LINE:
                    raise TraceError(f"{path}, line {number} is longer than {_LINE} characters.")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no UTF-8 text.") from None


def _whole_numbers(texts: list[str], count: int | None, path: Path, number: int) -> list[int]:
    stripped = [text.strip() for text in texts]
    fine = all(text.isascii() and text.isdigit() and len(text) < 18 for text in stripped)
    if not fine or count not in (None, len(texts)):
        raise TraceError(
            f"{path}, line {number}: {seen(','.join(texts))} are no "
            f"{count or 'whole'} numbers."
        )  # fmt: skip
    return [int(text) for text in stripped]
