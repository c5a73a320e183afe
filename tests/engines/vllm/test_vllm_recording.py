"""Traces that a running vLLM records hold what the kernel was given."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import kernel_rows
import pytest
import torch
from typer.testing import CliRunner
from vllm_engines import EXPERTS, LENGTHS, Capped, K, answers

from paceline.engines.serving.recording import WorkerRecording
from paceline.traces import open_trace
from paceline.traces.format import TraceError

TOKENS, STEPS = sum(LENGTHS), 5


@contextmanager
def recording(
    olmoe: Capped, folder: Path, content: Literal["counts", "choices", "scores"] = "counts"
) -> Iterator[WorkerRecording]:
    """Record the running engine."""
    made = WorkerRecording(olmoe.model, folder, content, "tiny", 1)
    try:
        yield made
    finally:
        made.stop()


def test_counts_are_what_the_kernel_was_given(olmoe: Capped, tmp_path: Path) -> None:
    olmoe.set("mode=observe")
    kernel_rows.CALLS.clear()
    with recording(olmoe, tmp_path / "trace") as made:
        assert made.describe()["recording"]
        answers(olmoe.llm, tokens=STEPS)
    state = made.stop()  # idempotent
    assert (state["recording"], state["forwards"]) == (False, STEPS)
    layers = len(olmoe.model.layers)
    calls = torch.tensor(kernel_rows.CALLS).view(STEPS, layers, EXPERTS)
    trace = open_trace(tmp_path / "trace")
    header = trace.header
    assert (header.chunks, header.content, header.model) == (1, "counts", "tiny")
    assert header.source == "paceline in vLLM"
    assert [(layer.name, layer.experts, layer.k) for layer in header.layers] == [
        (layer.name, EXPERTS, K) for layer in olmoe.model.layers
    ]
    (chunk,) = trace.chunks
    assert torch.equal(chunk.counts.sum(2), calls)
    phases = [int(code) for code, _ in chunk.group_codes]
    rows = {phase: chunk.rows[:, 0, phases.index(phase)].tolist() for phase in (0, 1)}
    assert rows == {0: [TOKENS, 0, 0, 0, 0], 1: [0, *[len(LENGTHS)] * (STEPS - 1)]}
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "trace").iterdir()} == {0o600}


@pytest.mark.parametrize("policy", ["mode=observe", "capacity_factor=0.5,min_expert_load=0"])
def test_choices_are_the_models_own_whatever_is_dropped(
    olmoe: Capped, tmp_path: Path, policy: str
) -> None:
    """In the first layer, which sees the same states with and without a cap."""
    seen: list[Any] = []
    olmoe.set("mode=observe")
    undo = olmoe.model.watch(lambda layer, inputs, a: seen.append((layer, inputs.topk_ids.clone())))
    answers(olmoe.llm, tokens=1)
    undo()
    want = next(ids for layer, ids in seen if layer.index == 0)
    olmoe.set(policy)
    with recording(olmoe, tmp_path / "trace", "scores"):
        answers(olmoe.llm, tokens=1)
    (chunk,) = open_trace(tmp_path / "trace").chunks
    assert torch.equal(chunk.ids[0].int(), want)
    assert torch.equal(chunk.scores[0].gather(1, want.long()), chunk.topk_scores[0])
    assert chunk.request.unique(return_counts=True)[1].sort().values.tolist() == sorted(LENGTHS)


def test_a_request_keeps_its_label_from_step_to_step(olmoe: Capped, tmp_path: Path) -> None:
    olmoe.set("mode=observe")
    with recording(olmoe, tmp_path / "trace", "choices"):
        answers(olmoe.llm, tokens=STEPS)
        answers(olmoe.llm, tokens=1)
    (chunk,) = open_trace(tmp_path / "trace").chunks
    labels = chunk.request.split(chunk.starts.diff().tolist())
    first, *steps, again = [set(part.tolist()) for part in labels]
    assert all(step == first for step in steps)
    assert len(first) == len(again) == len(LENGTHS)
    assert not first & again


def test_the_verbs_read_it(olmoe: Capped, tmp_path: Path) -> None:
    app = pytest.importorskip("paceline.cli.app").app
    olmoe.set("mode=observe")
    for content in ("counts", "choices"):
        with recording(olmoe, tmp_path / content, content):
            for _ in range(4):  # a plan is judged on another half than it was made on
                answers(olmoe.llm, tokens=2)
    for words in (
        ["loads", str(tmp_path / "counts"), "--json"],
        ["loads", str(tmp_path / "choices"), "--devices", "4", "--json"],
        ["plan", str(tmp_path / "choices"), "--model-config", olmoe.folder, "--devices", "4",
         "--json"],
    ):  # fmt: skip
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output


def test_off_records_nothing_and_a_full_folder_is_refused(olmoe: Capped, tmp_path: Path) -> None:
    olmoe.set(None)
    with recording(olmoe, tmp_path / "trace") as made:
        answers(olmoe.llm, tokens=1)
    assert made.describe()["forwards"] == 0
    with pytest.raises(TraceError, match="is not empty"):
        WorkerRecording(olmoe.model, tmp_path / "trace", "counts", "tiny", 1)
    assert not olmoe.model.layers[0].watchers
