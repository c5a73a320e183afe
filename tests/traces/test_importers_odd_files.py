"""Files as they really come: layers with fewer rows, cut off, one behind the other, a BOM."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_importers import counts_of
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.traces import ImportOptions, Trace, TraceError, open_trace
from paceline.traces.loads import trace_loads
from paceline.traces.tables import load_tables

EIGHT = ImportOptions(experts=8)


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def counts(*rows: dict[int, int]) -> list[list[int]]:
    """[layers][8] counts from expert -> count, per layer."""
    return [[row.get(expert, 0) for expert in range(8)] for row in rows]


def by_batch(trace: Trace) -> list[list[list[int]]]:
    return np.concatenate([table.counts for table in load_tables(trace)]).tolist()


# -- layers with different numbers of rows ---------------------------------------------------------

SELECTION = "layer_id,expert_ids\n1,0 1\n2,2 3\n1,0 4\n2,2 5\n1,6 7\n"


def test_every_layer_is_counted_with_all_its_rows(tmp_path: Path) -> None:
    """A last layer that is computed for output tokens alone."""
    trace = open_trace(written(tmp_path / "s.csv", SELECTION), EIGHT)
    assert counts_of(trace) == counts({0: 2, 1: 1, 4: 1, 6: 1, 7: 1}, {2: 2, 3: 1, 5: 1})
    assert any("layers have 2 to 3 rows" in note for note in trace.header.notes)
    assert [layer.tokens for layer in trace_loads(trace, 4).layers] == [3, 2]


def log(*rows: tuple[int, int, list[int]], meta: bool = True) -> str:
    """A route log of one request: (token_idx, layer, ids)."""
    lines = [{"type": "meta", "model_id": "m", "top_k": 2, "num_experts": 8}] if meta else []
    lines += [
        {"type": "route", "req_id": "a", "token_idx": token, "layer": layer, "topk_ids": ids}
        for token, layer, ids in rows
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


STEP_1 = [(0, 0, [0, 1]), (1, 0, [0, 2]), (0, 1, [3, 4]), (1, 1, [3, 5])]
STEP_2 = [(0, 0, [1, 6]), (1, 0, [1, 7]), (1, 1, [4, 6])]  # the last layer: one row
STEP_3 = [(0, 1, [5, 7]), (1, 1, [5, 7])]  # without the first layer
STEP_4 = [(0, 0, [2, 3]), (1, 0, [2, 4]), (0, 1, [0, 1]), (1, 1, [0, 2])]


def test_a_layer_may_be_missing_from_a_step(tmp_path: Path) -> None:
    steps = [*STEP_1, *STEP_2, *STEP_3, *STEP_4]
    trace = open_trace(written(tmp_path / "log.jsonl", log(*steps)))
    assert by_batch(trace) == [
        counts({0: 2, 1: 1, 2: 1}, {3: 2, 4: 1, 5: 1}),
        counts({1: 2, 6: 1, 7: 1}, {4: 1, 6: 1}),
        counts({}, {5: 2, 7: 2}),
        counts({2: 2, 3: 1, 4: 1}, {0: 2, 1: 1, 2: 1}),
    ]
    assert any("fewer rows than the 8 of others" in note for note in trace.header.notes)
    assert [layer.tokens for layer in trace_loads(trace, 4).layers] == [6, 7]


# -- cut off, or one behind the other --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("s.csv", SELECTION + "2,2 ", EIGHT),
        ("log.jsonl", log(*STEP_1) + '{"type": "route", "req', ImportOptions()),
        ("counts.csv", "layer,expert,count\n1,0,5\n1,7,2\n2,", EIGHT),
        (".coli_usage", "-1 2 8\n-2 1 99\n0 3 5\n1 4 7\n1 5", ImportOptions()),
    ],
)
def test_a_last_line_that_was_cut_off(
    name: str, text: str, options: ImportOptions, tmp_path: Path
) -> None:
    whole = open_trace(written(tmp_path / name, text[: text.rindex("\n") + 1]), options)
    cut = open_trace(written(tmp_path / name, text), options)
    assert counts_of(cut) == counts_of(whole)
    number = text.count("\n") + 1
    assert f"line {number}, the last, is cut off and left out" in cut.header.notes
    broken = text + "\n" + text.partition("\n")[2]  # the same line inside the file
    with pytest.raises(TraceError, match=rf"line {number}"):
        open_trace(written(tmp_path / name, broken), options)


def test_completions_whose_last_was_cut_off(tmp_path: Path) -> None:
    one = json.dumps({"choices": [{"routed_experts": [[[0, 1]], [[2, 3]]]}]})
    path = written(tmp_path / "c.jsonl", f"{one}\n{one}\n{one[:40]}")
    trace = open_trace(path, EIGHT)
    assert counts_of(trace) == counts({0: 2, 1: 2, 2: 2, 3: 2})
    assert "line 3, the last, is cut off and left out" in trace.header.notes


def test_two_files_one_behind_the_other(tmp_path: Path) -> None:
    two = written(tmp_path / "two.csv", SELECTION * 2)
    assert by_batch(open_trace(two, EIGHT)) == by_batch(
        open_trace(written(tmp_path / "one.csv", SELECTION), EIGHT)
    ) * 2  # fmt: skip
    logs = written(tmp_path / "two.jsonl", log(*STEP_1) + log(*STEP_4))
    assert len(by_batch(open_trace(logs))) == 2
    table = "layer_id,expert_id,count\n0,1,5\n"
    added = open_trace(written(tmp_path / "t.csv", table * 2), EIGHT)
    assert counts_of(added) == counts({1: 10})


# -- encodings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.csv", SELECTION),
        ("log.jsonl", log(*STEP_1)),
        ("counts.csv", "layer,expert\n1,0\n1,7\n"),
        ("table.json", json.dumps({"1": {"0": 5, "7": 2}})),
        ("usage.coli_usage", "1 0 5\n1 7 2\n"),
    ],
)
def test_a_byte_order_mark_changes_nothing(name: str, text: str, tmp_path: Path) -> None:
    plain = open_trace(written(tmp_path / name, text), EIGHT)
    marked = open_trace(written(tmp_path / name, b"\xef\xbb\xbf" + text.encode()), EIGHT)
    assert counts_of(marked) == counts_of(plain)


@pytest.mark.parametrize("dtype", [">i2", ">i4", ">i8", "<i4", ">u2"])
def test_arrays_of_either_byte_order(dtype: str, tmp_path: Path) -> None:
    ids = np.array([[[0, 1]], [[2, 7]]], dtype=dtype)  # [tokens, layers, k]
    np.save(tmp_path / "ids.npy", ids)
    weights = np.array([[[0.75, 0.25], [0.5, 0.5]]], dtype=">f4")
    np.savez(tmp_path / "all.npz", topk_ids=ids.swapaxes(0, 1), topk_weights=weights)
    for name in ("ids.npy", "all.npz"):
        trace = open_trace(tmp_path / name, EIGHT)
        assert counts_of(trace) == counts({0: 1, 1: 1, 2: 1, 7: 1})
    (chunk,) = trace.chunks
    if chunk.weights is not None:
        assert chunk.weights.flatten().tolist() == [0.75, 0.25, 0.5, 0.5]


# -- further formats -------------------------------------------------------------------------------


def gguf(tensors: dict[str, np.ndarray]) -> bytes:
    """A GGUF file of F32 tensors, as docs/gguf.md of ggml-org/ggml describes it."""
    header, data = struct.pack("<IQQ", 3, len(tensors), 0), b""
    for name, values in tensors.items():
        header += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", 2)
        header += struct.pack("<QQIQ", len(values), 1, 0, len(data))
        data += values.astype("<f4").tobytes().ljust(32, b"\0")
    whole = b"GGUF" + header
    return whole.ljust(-(-len(whole) // 32) * 32, b"\0") + data


def test_an_imatrix_with_gate_and_up_in_one(tmp_path: Path) -> None:
    row = np.arange(8.0)
    names = ("gate_up", "down")
    tensors = {f"blk.{n}.ffn_{name}_exps.weight.counts": row + n for n in (1, 2) for name in names}
    trace = open_trace(written(tmp_path / "i.gguf", gguf(tensors)))
    assert counts_of(trace) == [(row + n).astype(int).tolist() for n in (1, 2)]
    tensors["blk.2.ffn_down_exps.weight.counts"] = row
    with pytest.raises(TraceError, match="of layer 2 have other counts"):
        open_trace(written(tmp_path / "i.gguf", gguf(tensors)))


@pytest.mark.parametrize("count", ["", ",count", ",hits", ",activations"])
@pytest.mark.parametrize("columns", ["layer,expert", "layer_id,expert_id"])
def test_tables_in_csv(columns: str, count: str, tmp_path: Path) -> None:
    rows = "3,0\n3,7\n5,1\n3,0\n" if not count else "3,0,2\n3,7,1\n5,1,1\n"
    trace = open_trace(written(tmp_path / "t.csv", f"{columns}{count}\n{rows}"), EIGHT)
    assert counts_of(trace) == counts({0: 2, 7: 1}, {1: 1})
    assert [layer.name for layer in trace.header.layers] == ["layer 3", "layer 5"]


def test_the_history_of_colibri(tmp_path: Path) -> None:
    text = "-1 3 8\n-2 1 4021547843\n0 3 5\n2 0 9\n2 7 1\n"
    trace = open_trace(written(tmp_path / "history.txt", text))
    assert counts_of(trace) == counts({3: 5}, {0: 9, 7: 1})
    with pytest.raises(TraceError, match="names layer 2, expert 9"):
        open_trace(written(tmp_path / "history.txt", text + "2 9 1\n"))


def test_the_trace_of_colibri(tmp_path: Path) -> None:
    """Two prompt rows, then a decode step; the last layer has one row."""
    rows = ["0 0 1 0:0.7500 1:0.2500", "0 1 1 0:0.5000 2:0.5000", "1 1 2 3:0.9 4:0.1",
            "2 0 1 5:0.6 6:0.4", "3 0 2 3:0.6 7:0.4"]  # fmt: skip
    trace = open_trace(written(tmp_path / "route.txt", "\n".join(rows) + "\n"), EIGHT)
    assert by_batch(trace) == [
        counts({0: 2, 1: 1, 2: 1}, {3: 1, 4: 1}),
        counts({5: 1, 6: 1}, {3: 1, 7: 1}),
    ]
    bad = "\n".join([*rows, "4 0 1 0:0.5"]) + "\n"
    with pytest.raises(TraceError, match=r"line 6.*2 experts of a layer"):
        open_trace(written(tmp_path / "route.txt", bad), EIGHT)


def test_counts_for_ktransformers(tmp_path: Path) -> None:
    """A tensor [steps, layers, experts] alone, or under logical_count."""
    table = torch.randint(0, 9, (3, 2, 8), generator=torch.Generator().manual_seed(0))
    for content in (table, {"logical_count": table}):
        torch.save(content, tmp_path / "counts.pt")
        assert by_batch(open_trace(tmp_path / "counts.pt")) == table.tolist()
    torch.save(table.float(), tmp_path / "counts.pt")
    with pytest.raises(TraceError, match="expected whole numbers, 3 axes"):
        open_trace(tmp_path / "counts.pt")


# -- many files ------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def tables(folder: Path, kinds: int) -> list[Path]:
    """A table per kind of traffic: experts 0 and 1 are hot in all, others by kind."""
    folder.mkdir()
    rng, paths = np.random.default_rng(0), []
    for kind in range(kinds):
        loads = rng.integers(100, 200, (2, 8))
        loads[:, :2] += 2000
        loads[:, 2 + kind % 6] += 500
        content = {str(layer): dict(enumerate(row.tolist())) for layer, row in enumerate(loads)}
        paths.append(written(folder / f"{kind}.json", json.dumps(content)))
    return paths


def test_a_table_per_kind_of_traffic_is_a_batch(tmp_path: Path) -> None:
    """Files by name, or their folder: and a plan is made on half of them, judged on the others."""
    paths = tables(tmp_path / "kinds", 6)
    alone = [by_batch(open_trace(path, EIGHT))[0] for path in paths]
    facts = "--experts", "8", "--k", "2"
    made = run("import", *paths, *facts, "--out", tmp_path / "trace", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["batches"] == 6
    for source in (tmp_path / "trace", tmp_path / "kinds"):
        trace = open_trace(source, ImportOptions(experts=8, k=2))
        assert by_batch(trace) == alone
        assert any("6 files one after the other" in note for note in trace.header.notes)
    planned = run("plan", tmp_path / "trace", "--place-only", "--devices", "4", "--json")
    assert planned.exit_code == 0, planned.output
    second = json.loads(planned.stdout)["second_half"]
    assert second["batches"] == 3
    assert second["ways"]["search"]["overall"] < second["ways"]["in_order"]["overall"] / 1.2
    shown = run("loads", tmp_path / "kinds", *facts, "--devices", "4")
    assert "6 batches (files)" in shown.stdout


def test_a_folder_with_something_else_is_no_trace(tmp_path: Path) -> None:
    paths = tables(tmp_path / "kinds", 2)
    written(paths[0].parent / "notes.txt", "nothing")
    with pytest.raises(TraceError, match="holds no known trace"):
        open_trace(paths[0].parent, EIGHT)
