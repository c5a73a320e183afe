"""Recordings of several ranks as one: against plain loops over batches and ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_traces import count_trace, traces
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.traces import Trace, TraceError, open_trace, sample, save_trace
from paceline.traces.chunk import Chunk, joined
from paceline.traces.loads import trace_loads
from paceline.traces.merge import merged


def dealt(trace: Trace, ranks: int, seed: int) -> list[Trace]:
    """The trace as ranks of data parallelism record it: each token of a batch on one of them.

    Chunks end elsewhere on every rank.
    """
    rng = np.random.default_rng(seed)
    whole = joined(list(trace.chunks))
    edges = whole.starts.tolist()
    rank_of = rng.integers(0, ranks, edges[-1])
    out = []
    for rank in range(ranks):
        rows = [np.flatnonzero(rank_of[a:b] == rank) + a for a, b in pairwise(edges)]
        cuts = sorted({0, len(rows), *rng.integers(0, len(rows) + 1, 2).tolist()})
        chunks = []
        for a, b in pairwise(cuts):
            starts = torch.tensor(np.cumsum([0, *map(len, rows[a:b])]))
            chunks.append(whole.take(torch.from_numpy(np.concatenate(rows[a:b])), starts))
        out.append(Trace(trace.header, chunks, f"rank {rank}"))
    return out


def batches_of(trace: Trace) -> list[Chunk]:
    return [chunk.part(b, b + 1) for chunk in trace.chunks for b in range(chunk.batches)]


@given(traces(), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_ranks_with_their_own_tokens_come_side_by_side(trace: Trace, ranks: int, seed: int) -> None:
    recordings = dealt(trace, ranks, seed)
    each = [batches_of(recording) for recording in recordings]
    ids = [[b.ids.tolist() for b in own if b.ids is not None] for own in each]
    if any(ids[a] == ids[b] for a in range(ranks) for b in range(a)):
        return  # so few tokens that two ranks chose the same
    found = batches_of(merged(recordings))
    assert len(found) == len(each[0])
    for number, batch in enumerate(found):
        parts = [own[number] for own in each]
        for name, tensor in batch.tensors().items():
            if name == "starts":
                assert tensor.tolist() == [0, sum(part.tokens for part in parts)]
                continue
            expected = []
            for rank, part in enumerate(parts):
                own = getattr(part, name)
                if name == "source" and own is None:
                    own = torch.full((part.tokens,), rank)
                expected.append(own * ranks + rank if name == "request" else own)
            wanted = torch.cat(expected, 1 if expected[0].dim() > 1 and name in (
                "ids", "weights", "topk_scores", "scores") else -1)  # fmt: skip
            assert torch.equal(tensor.long() if name == "source" else tensor,
                               wanted.long() if name == "source" else wanted)  # fmt: skip
        assert batch.source is not None


@given(traces(max_chunks=2), st.integers(0, 2**32 - 1))
def test_loads_are_those_of_the_whole(trace: Trace, seed: int) -> None:
    """Whoever computed which token: the loads of every batch stay what they are."""
    try:
        wanted = trace_loads(trace, devices=2).to_dict()
    except ValueError:
        return  # no assignment at all
    recordings = dealt(trace, 2, seed)
    if recordings[0].chunks == recordings[1].chunks:
        return
    found = merged(recordings)
    if "counted once" in found.header.notes[-1]:
        return
    for name in ("layers", "overall", "batches"):
        assert trace_loads(found, devices=2).to_dict()[name] == wanted[name]


def test_copies_count_once_and_are_said() -> None:
    trace = sample("gpt_oss_20b_decode")
    wide = [replace(c, ids=c.ids.long()) for c in trace.chunks if c.ids is not None]
    found = merged([trace, Trace(trace.header, wide, "rank 1"), trace])
    assert "2 of 3 recordings repeat" in found.header.notes[-1]
    assert trace_loads(found).to_dict() == trace_loads(trace).to_dict() | {
        "notes": list(found.header.notes)
    }
    # a copy that a crash cut off: the whole one is taken, wherever it stands
    (chunk,) = trace.chunks
    short = Trace(trace.header, [chunk.part(0, 50)], "cut off")
    found = merged([short, trace])
    assert sum(c.batches for c in found.chunks) == 64
    assert "1 of 2 recordings repeat" in found.header.notes[-1]
    # copies and others: two groups of two ranks
    other = Trace(trace.header, [replace(chunk, ids=chunk.ids.flip(1))], "other")  # type: ignore[union-attr]
    found = merged([trace, other, trace, other])
    assert sum(c.tokens for c in found.chunks) == 2 * chunk.tokens
    assert any("2 of 4 recordings repeat" in note for note in found.header.notes)


def test_nearly_copies_are_pointed_at() -> None:
    trace = sample("gpt_oss_20b_decode")
    (chunk,) = trace.chunks
    assert chunk.ids is not None
    ids = chunk.ids.clone()
    ids[0, 0] = ids[0, 0].flip(0)
    found = merged([trace, Trace(trace.header, [replace(chunk, ids=ids)], "rank 1")])
    assert any("63 of 64 batches" in note for note in found.header.notes)


def test_counts_are_added_group_by_group() -> None:
    one = count_trace()
    (chunk,) = one.chunks
    assert chunk.counts is not None
    assert chunk.rows is not None
    assert chunk.group_codes is not None
    other = Chunk(
        starts=chunk.starts[:3],
        counts=chunk.counts[:2] * 3 + 1,
        group_codes=torch.tensor([[1, 0], [0, 0]], dtype=torch.uint8),
        rows=chunk.rows[:2] + 1,
    )
    assert other.counts is not None
    assert other.rows is not None
    found = merged([one, Trace(one.header, (other,), "other")])
    (sum_,) = found.chunks
    assert sum_.group_codes is not None
    assert sum_.counts is not None
    assert sum_.rows is not None
    assert sum_.group_codes.tolist() == [[0, 0], [1, 0], [1, 255]]
    for name in ("counts", "rows"):
        one_, other_, both = (getattr(c, name) for c in (chunk, other, sum_))
        assert torch.equal(both[:, :, 0], one_[:2, :, 0] + other_[:, :, 1])
        assert torch.equal(both[:, :, 1], other_[:, :, 0])
        assert torch.equal(both[:, :, 2], one_[:2, :, 1])
    assert any("2 to 3 batches" in note for note in found.header.notes)


def test_what_is_no_run_of_one_model_is_refused() -> None:
    law, decode = sample("esft_v2lite_law"), sample("gpt_oss_20b_decode")
    with pytest.raises(TraceError, match="ranks of one run are alike"):
        merged([law, decode])
    with pytest.raises(TraceError, match="batches='window'"):
        merged([law, law.regrouped(512)])
    with pytest.raises(TraceError, match="no recording"):
        merged([])
    shares = count_trace().header.model_copy(update={"content": "shares"})
    with pytest.raises(TraceError, match="without totals"):
        merged([Trace(shares, count_trace().chunks)] * 2)


def test_the_command(tmp_path: Path) -> None:
    trace = sample("gpt_oss_20b_decode")
    recordings = dealt(trace, 3, seed=0)
    for rank, recording in enumerate(recordings):
        save_trace(recording, tmp_path / f"rank{rank}")
    names = [str(tmp_path / f"rank{rank}") for rank in range(3)]
    ran = CliRunner().invoke(app, ["import", *names, "--out", str(tmp_path / "all")])
    assert ran.exit_code == 0, ran.output
    assert "64 batches (forwards), 4,096 tokens" in ran.stdout
    assert "3 recordings side by side" in ran.stdout
    found, wanted = trace_loads(open_trace(tmp_path / "all")), trace_loads(trace)
    assert found.layers == wanted.layers
    ran = CliRunner().invoke(
        app, ["import", names[0], "sample:esft_v2lite_law", "--out", str(tmp_path / "no")]
    )
    assert ran.exit_code == 2
    assert "are alike" in ran.stderr
    assert not (tmp_path / "no").exists()
