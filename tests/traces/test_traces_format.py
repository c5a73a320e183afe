"""The file format: what is written is read, and what can't be is refused in one sentence."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from made_up_traces import count_trace, traces
from safetensors.torch import load_file, save_file

from paceline.traces import Trace, TraceError, TraceWriter, open_trace, sample, save_trace
from paceline.traces import folder as folder_module
from paceline.traces import trace as trace_module
from paceline.traces.chunk import Chunk, joined
from paceline.traces.format import Header, Layer, parse_header
from paceline.traces.importers import to_trace
from paceline.traces.tables import load_tables


def assert_same(one: Trace, other: Trace) -> None:
    """Every tensor of every chunk is the same, to the bit."""
    assert len(one.chunks) == len(other.chunks)
    for a, b in zip(one.chunks, other.chunks, strict=True):
        assert a.tensors().keys() == b.tensors().keys()
        for name, tensor in a.tensors().items():
            assert tensor.dtype == b.tensors()[name].dtype
            assert torch.equal(tensor, b.tensors()[name]), name


@given(trace=traces())
def test_what_is_written_is_read(tmp_path_factory: Any, trace: Trace) -> None:
    folder = tmp_path_factory.mktemp("trace") / "t"
    save_trace(trace, folder)
    read = open_trace(folder)
    assert_same(trace, read)
    assert_same(trace, read)  # a trace can be gone through again
    for field in ("content", "layers", "model", "notes", "batches"):
        assert getattr(read.header, field) == getattr(trace.header, field)


def test_counts_are_written_and_read(tmp_path: Path) -> None:
    save_trace(count_trace(), tmp_path / "t")
    assert_same(count_trace(), open_trace(tmp_path / "t"))


def test_a_trace_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_trace(sample("esft_v2lite_law"), tmp_path / "t")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o700
    for path in (tmp_path / "t").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(TraceError, match="is not empty"):
        save_trace(count_trace(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_chunk_that_no_reader_takes_isnt_written(tmp_path: Path, monkeypatch: Any) -> None:
    limit = folder_module.MAX_HEADER_BYTES + 1000
    monkeypatch.setattr(folder_module, "MAX_CHUNK_BYTES", limit)
    with pytest.raises(TraceError, match="batches must be smaller"):
        save_trace(sample("esft_v2lite_law"), tmp_path / "t")
    assert not list((tmp_path / "t").glob("chunk*"))


def test_an_unfinished_trace_is_read_and_says_so(tmp_path: Path) -> None:
    trace = sample("gpt_oss_20b_decode")
    writer = TraceWriter(tmp_path / "t", trace.header.model_copy(update={"chunks": None}))
    for chunk in trace.chunks:
        writer.add(chunk)
    read = open_trace(tmp_path / "t")
    assert_same(trace, read)
    assert "cut off" in read.header.notes[-1]
    writer.finish()
    assert not any("cut off" in note for note in open_trace(tmp_path / "t").header.notes)


def test_an_error_while_writing_leaves_the_trace_unfinished(tmp_path: Path) -> None:
    def write() -> None:
        header = count_trace().header.model_copy(update={"chunks": None})
        with TraceWriter(tmp_path / "t", header) as writer:
            writer.add(next(iter(count_trace().chunks)))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert open_trace(tmp_path / "t").header.chunks is None
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "chunk-000000.safetensors", "trace.json",
    ]  # fmt: skip


# -- hostile and broken files ---------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]

HEADERS: dict[str, tuple[Change, str]] = {
    "other format": (lambda h: h.update(format="zip"), 'format is not "paceline-trace"'),
    "other version": (lambda h: h.update(version=2), "version must be 1, got 2"),
    "unknown field": (lambda h: h.update(extra=1), "extra=1 is not allowed"),
    "no layers": (lambda h: h.update(layers=[]), "layers="),
    "experts of 10^18": (lambda h: h["layers"][0].update(experts=10**18), "layers.0.experts="),
    "k above experts": (lambda h: h["layers"][0].update(k=7), "k must be at most experts=6, got 7"),
    "text for a number": (lambda h: h["layers"][0].update(experts="6"), "layers.0.experts='6'"),
    "a name of two lines": (lambda h: h["layers"][0].update(name="a\nb"), "layers.0.name='a"),
    "unknown content": (lambda h: h.update(content="all"), "content='all'"),
    "negative chunks": (lambda h: h.update(chunks=-1), "chunks=-1"),
    "a chunk too many": (lambda h: h.update(chunks=2), "lacks chunk-000001.safetensors"),
    "other identity": (lambda h: h.update(identity="x"), "expected chunk 0 of x"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_cant_be_is_refused(tmp_path: Path, case: str) -> None:
    change, said = HEADERS[case]
    save_trace(count_trace(), tmp_path / "t")
    path = tmp_path / "t" / "trace.json"
    header = json.loads(path.read_text())
    change(header)
    path.write_text(json.dumps(header))
    refused(tmp_path / "t", said)


def refused(folder: Path, said: str) -> None:
    """Reading all of a trace ends in one sentence that names it and says this."""
    with pytest.raises(TraceError) as caught:
        for _ in open_trace(folder).chunks:
            pass
    text = str(caught.value)
    assert said in text
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 600


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100000])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(raw)
    refused(tmp_path, "trace.json")


TENSORS: dict[str, tuple[Change, str]] = {
    "no ids": (lambda t: t.pop("ids"), "ids is missing"),
    "no starts": (lambda t: t.pop("starts"), "starts is missing"),
    "floats for ids": (lambda t: t.update(ids=t["ids"].float()), "ids has dtype torch.float32"),
    "a layer less": (lambda t: t.update(ids=t["ids"][:1].clone()), "ids has shape [1, "),
    "weights of another k": (
        lambda t: t.update(weights=t["weights"][:, :, :3].clone()), "weights has shape",
    ),
    "an expert too many": (lambda t: t["ids"].fill_(33), "ids names expert 33"),
    "starts beyond the end": (lambda t: t["starts"][-1:].add_(1), "starts is out of order"),
    "starts that fall": (lambda t: t["starts"][1:2].fill_(10**6), "starts is out of order"),
    "starts empty": (lambda t: t.update(starts=t["starts"][:0].clone()), "starts is empty"),
    "facts of other tokens": (
        lambda t: t.update(request=t["request"][:-1].clone()), "request has shape",
    ),
    "an unknown phase": (lambda t: t["phase"].fill_(9), "phase has a code above 1"),
    "an unknown tensor": (lambda t: t.update(secret=torch.zeros(1)), "a tensor 'secret'"),
    "a float as a flag": (
        lambda t: t.update(valid=torch.ones(t["ids"].shape[1])), "valid has dtype torch.float32",
    ),
}  # fmt: skip


COUNTS: dict[str, tuple[Change, str]] = {
    "negative counts": (lambda t: t["counts"].neg_(), "counts has negative values"),
    "shares as counts": (lambda t: t.update(counts=t["counts"].double()), "expected counts"),
    "experts that are missing": (
        lambda t: t.update(counts=t["counts"][:, :, :, :3].clone()), "counts has shape",
    ),
    "an unknown group": (lambda t: t["group_codes"].fill_(3), "group_codes has a code above 1"),
    "an unknown modality": (
        lambda t: t["group_codes"][:, 1].fill_(4), "group_codes has a code above 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*TENSORS, *COUNTS])
def test_a_chunk_that_cant_be_is_refused(tmp_path: Path, case: str) -> None:
    change, said = (TENSORS | COUNTS)[case]
    folder = tmp_path / "t"
    save_trace(sample("gpt_oss_20b_decode") if case in TENSORS else count_trace(), folder)
    path = folder / "chunk-000000.safetensors"
    tensors = load_file(path)
    change(tensors)
    identity = json.loads((folder / "trace.json").read_text())["identity"]
    save_file(tensors, path, {"paceline-trace": identity, "chunk": "0"})
    refused(folder, said)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"12345678",
        (10**15).to_bytes(8, "little") + b"{}",
        (1 << 30).to_bytes(8, "little") + b"{" * 100,
        # says terabytes that the file doesn't have
        (lambda h: len(h).to_bytes(8, "little") + h)(
            b'{"ids":{"dtype":"U8","shape":[1000000000000],"data_offsets":[0,1000000000000]}}'
        ),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, raw: bytes) -> None:
    save_trace(count_trace(), tmp_path / "t")
    (tmp_path / "t" / "chunk-000000.safetensors").write_bytes(raw)
    refused(tmp_path / "t", "chunk-000000.safetensors")


def test_a_chunk_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    save_trace(count_trace(), tmp_path / "t")
    path = tmp_path / "t" / "chunk-000000.safetensors"
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        refused(tmp_path / "t", "chunk-000000.safetensors")


def test_chunks_of_two_traces_cant_be_mixed(tmp_path: Path) -> None:
    for name in "ab":
        save_trace(count_trace(), tmp_path / name)
    chunk = "chunk-000000.safetensors"
    (tmp_path / "b" / chunk).write_bytes((tmp_path / "a" / chunk).read_bytes())
    refused(tmp_path / "b", "expected chunk 0 of")


def test_a_chunk_that_is_a_fifo_or_a_folder_is_refused(tmp_path: Path) -> None:
    for kind in ("fifo", "folder"):
        folder = tmp_path / kind
        save_trace(count_trace(), folder)
        path = folder / "chunk-000000.safetensors"
        path.unlink()
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
        refused(folder, "lacks chunk-000000.safetensors")


# -- the same tokens in other batches -------------------------------------------------------------


@given(trace=traces())
def test_other_batches_hold_the_same_tokens_in_order(trace: Trace) -> None:
    for size in (1, 5, 1000):
        chunks = list(trace.regrouped(size).chunks)
        sizes = [n for chunk in chunks for n in chunk.starts.diff().tolist()]
        assert all(n == size for n in sizes[:-1])
        assert all(0 < n <= size for n in sizes)
        for layer in range(len(trace.header.layers)):
            assert _valid_rows(chunks, layer) == _valid_rows(trace.chunks, layer)


def _valid_rows(chunks: Any, layer: int) -> list[Any]:
    """Ids and request of a layer's valid tokens, in order."""
    rows: list[Any] = []
    known = all(chunk.request is not None for chunk in chunks)
    for chunk in chunks:
        valid, request = chunk.fact("valid", layer), chunk.fact("request", layer)
        for token in range(chunk.tokens):
            if valid is None or valid[token]:
                label = int(request[token]) if known else None
                rows.append((chunk.ids[layer, token].tolist(), label))
    return rows


@given(trace=traces())
def test_joined_chunks_hold_what_the_parts_do(trace: Trace) -> None:
    chunks = list(trace.chunks)
    whole = joined(chunks)
    assert whole.tokens == sum(chunk.tokens for chunk in chunks)
    assert whole.starts.diff().tolist() == [n for c in chunks for n in c.starts.diff().tolist()]
    at = 0
    for chunk in chunks:
        for name in ("ids", "weights"):
            part = getattr(whole, name)[:, at : at + chunk.tokens]
            assert torch.equal(part, getattr(chunk, name))
        at += chunk.tokens


def test_long_traces_in_memory_come_in_parts(monkeypatch: Any) -> None:
    """Cut at batches where there are any, else when they are made."""
    whole = next(iter(sample("esft_v2lite_law").chunks))
    monkeypatch.setattr(to_trace, "CHUNK_TOKENS", 1000)
    parts = sample("esft_v2lite_law")
    assert parts.header.chunks == len(parts.chunks) > 3
    assert all(chunk.tokens <= 1000 for chunk in parts.chunks)
    assert torch.equal(torch.cat([chunk.ids for chunk in parts.chunks], 1), whole.ids)
    sizes = [n for chunk in parts.chunks for n in chunk.starts.diff().tolist()]
    assert sizes == whole.starts.diff().tolist()
    monkeypatch.setattr(trace_module, "CHUNK_TOKENS", 512)
    regrouped = list(parts.regrouped(128).chunks)
    assert max(chunk.tokens for chunk in regrouped) == 512
    assert torch.equal(torch.cat([chunk.ids for chunk in regrouped], 1), whole.ids)
    assert {n for chunk in regrouped for n in chunk.starts.diff().tolist()} == {128}


def test_counts_cant_be_cut_into_other_batches() -> None:
    with pytest.raises(ValueError, match="can't be cut"):
        count_trace().regrouped(16)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        sample("esft_v2lite_law").regrouped(0)


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Tables of loads are as large as layers times experts times batches: both are bounded."""
    header = Header(
        content="choices",
        layers=tuple(Layer(name=f"layer {i}", experts=1 << 20, k=1) for i in range(5)),
    )
    with pytest.raises(TraceError, match="5 layers of up to 1048576 experts"):
        parse_header(json.loads(header.model_dump_json()), "trace.json")
    ids = torch.zeros(1, 600, 1, dtype=torch.int32)
    many = Chunk(starts=torch.arange(601), ids=ids)
    wide = header.model_copy(update={"layers": header.layers[:1]})
    tables = load_tables(Trace(wide, (many,)))
    assert max(next(tables).counts.size for _ in range(3)) <= 1 << 23
    narrow = wide.model_copy(update={"layers": (Layer(name="layer 0", experts=9, k=1),)})
    assert sum(table.counts.sum() for table in load_tables(Trace(narrow, (many,)))) == 600
