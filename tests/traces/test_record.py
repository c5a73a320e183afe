"""Recording real models: what is in the trace is what their layers chose, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import CapacityPolicy, RoutingInputs, attach
from paceline.demo.assets import load_model, read_text
from paceline.facts import Facts
from paceline.plan import Plan
from paceline.traces import TraceError, open_trace
from paceline.traces.loads import trace_loads
from paceline.traces.record import Recorder, RecordingStoppedWarning
from paceline.traces.simulate import simulate


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model()


def prompts(tokenizer: Any, sizes: list[int]) -> dict[str, torch.Tensor]:
    """A batch of left-padded prompts of so many tokens."""
    text = tokenizer(read_text("prose"), verbose=False)["input_ids"]
    longest = max(sizes)
    rows = [[0] * (longest - n) + text[50 * i : 50 * i + n] for i, n in enumerate(sizes)]
    mask = [[0] * (longest - n) + [1] * n for n in sizes]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


class Seen:
    """Keeps what every layer got, as a watcher of its own."""

    def __init__(self, pace: Any) -> None:
        self.rows: list[tuple[str, RoutingInputs]] = []
        facts = Facts(scores=True, request=True, decode=True)
        pace.watch(lambda name, inputs, _: self.rows.append((name, inputs)), facts)


def test_every_choice_of_every_forward_is_in_the_trace(demo: Any, tmp_path: Path) -> None:
    model, tokenizer = demo
    batch = prompts(tokenizer, [9, 4, 6])
    with attach(model) as pace:
        seen = Seen(pace)
        with Recorder(pace, tmp_path / "t", "scores", model="demo", chunk_bytes=1) as recorder:
            model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)
            recorder.next_requests()
            model(**prompts(tokenizer, [7]))
        layers = pace.layers
        experts = [len(layer.expert_loads_before) for layer in pace.stats().layers]
    trace = open_trace(tmp_path / "t")
    assert [layer.name for layer in trace.header.layers] == layers
    assert [layer.experts for layer in trace.header.layers] == experts
    assert trace.header.model == "demo"
    assert len(trace.chunks) > 1
    batches = [(chunk, b) for chunk in trace.chunks for b in range(chunk.batches)]
    assert len(batches) == 6 == recorder.forwards  # a prompt, four steps, another prompt
    for layer, name in enumerate(layers):
        mine = [inputs for seen_name, inputs in seen.rows if seen_name == name]
        for number, ((chunk, b), wanted) in enumerate(zip(batches, mine, strict=True)):
            got = chunk.inputs(trace.header, layer, b, number)
            assert got.topk_ids.tolist() == wanted.topk_ids.tolist()
            assert torch.equal(got.topk_weights, wanted.topk_weights)
            assert wanted.scores is not None
            assert torch.equal(got.scores, wanted.scores.float())
            assert torch.equal(got.topk_scores, wanted.scores.gather(1, wanted.topk_ids).float())
            real = torch.ones(len(wanted.topk_ids)) if wanted.valid is None else wanted.valid
            assert (got.valid is None and real.all()) or torch.equal(got.valid, real.bool())
            assert got.token_decode.tolist() == [1 <= number <= 4] * len(wanted.topk_ids)
            requests = wanted.token_request + (3 if number == 5 else 0)
            assert got.token_request.tolist() == requests.tolist()
            assert (chunk.fact("modality", layer) == 0).all()


def test_counts_are_those_of_the_choices(demo: Any, tmp_path: Path) -> None:
    model, tokenizer = demo
    batch = prompts(tokenizer, [12, 5])
    for content in ("counts", "choices"):
        with attach(model) as pace, Recorder(pace, tmp_path / content, content):
            model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=0)
            stats = pace.stats()
    counts, choices = (
        trace_loads(open_trace(tmp_path / c), 8).to_dict() for c in ("counts", "choices")
    )
    for key in ("batches", "tokens", "overall", "layers", "groups"):
        assert counts[key] == choices[key]
    assert counts["batches"] == 4
    assert [(g["phase"], g["tokens"]) for g in counts["groups"]] == [("decode", 6), ("prefill", 17)]
    for layer, said in zip(counts["layers"], stats.layers, strict=True):
        assert layer["expert_loads"] == said.expert_loads_before
    trace = open_trace(tmp_path / "counts")
    assert {name for c in trace.chunks for name in c.tensors()} == {
        "starts", "counts", "group_codes", "rows",
    }  # fmt: skip


def test_what_is_recorded_simulates_as_the_model_ran(demo: Any, tmp_path: Path) -> None:
    """Record without a policy; simulate one; then run the model's first layer under it."""
    model, tokenizer = demo
    batch = prompts(tokenizer, [40, 33, 40])
    policy = CapacityPolicy(capacity_factor=1.0, min_expert_load=0, mode="shadow")
    with attach(model) as pace, Recorder(pace, tmp_path / "t", "choices"):
        model(**batch)
    with attach(model, policy, 8) as pace:
        model(**batch)
        stats = pace.stats()
    result = simulate(open_trace(tmp_path / "t"), {"it": Plan((policy,), (8,))}).to_dict()["plans"][
        "it"
    ]
    assert sum(layer["dropped"] for layer in result["layers"]) > 0
    for got, wanted in zip(result["layers"], stats.layers, strict=True):
        assert got["dropped"] == wanted.dropped
        assert got["expert_loads_after"] == wanted.expert_loads_after
        assert got["gate_mass_lost"] == pytest.approx(1 - wanted.gate_mass_kept, abs=1e-6)


def test_a_decode_loop_without_generate_is_told_from_prompts(demo: Any, tmp_path: Path) -> None:
    model, tokenizer = demo
    ids = prompts(tokenizer, [8])["input_ids"]
    with attach(model) as pace, Recorder(pace, tmp_path / "t"), torch.no_grad():
        out = model(ids, use_cache=True)
        model(ids[:, :1], past_key_values=out.past_key_values)
    groups = trace_loads(open_trace(tmp_path / "t"), 8).to_dict()["groups"]
    assert [(g["phase"], g["tokens"]) for g in groups] == [("decode", 1), ("prefill", 8)]


def test_forwards_of_several_threads_are_kept_apart(demo: Any, tmp_path: Path) -> None:
    model, tokenizer = demo
    sizes = [3, 5, 8, 13]
    with attach(model) as pace, Recorder(pace, tmp_path / "t", "choices", chunk_bytes=4096):

        def run(size: int) -> None:
            with torch.no_grad():
                for _ in range(3):
                    model(**prompts(tokenizer, [size]))

        threads = [threading.Thread(target=run, args=(size,)) for size in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    chunks = list(open_trace(tmp_path / "t").chunks)
    found = [n for chunk in chunks for n in chunk.starts.diff().tolist()]
    assert sorted(found) == sorted(sizes * 3)
    alone: dict[int, torch.Tensor] = {}
    for chunk in chunks:  # every forward of one size chose the same
        for start, end in zip(chunk.starts.tolist(), chunk.starts.tolist()[1:], strict=False):
            own = chunk.ids[:, start:end]
            assert torch.equal(alone.setdefault(end - start, own), own)


def test_a_recording_that_cant_go_on_leaves_the_model_alone(demo: Any, tmp_path: Path) -> None:
    model, tokenizer = demo
    batch = prompts(tokenizer, [5])
    with torch.no_grad():
        untouched = model(**batch).logits
    with attach(model) as pace, torch.no_grad():
        recorder = Recorder(pace, tmp_path / "t", "choices", chunk_bytes=1)
        wanted = model(**batch).logits
        assert torch.equal(wanted, untouched)
        (tmp_path / "t").rename(tmp_path / "gone")
        with pytest.warns(RecordingStoppedWarning, match="has stopped"):
            after = [model(**batch).logits for _ in range(3)]
        assert all(torch.equal(logits, wanted) for logits in after)
        with pytest.raises(TraceError, match="can't be written"):
            recorder.close()


def test_what_cant_be_recorded_is_refused(demo: Any, tmp_path: Path) -> None:
    model, _ = demo
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with attach(model) as pace:
        with pytest.raises(TraceError, match="is not empty"):
            Recorder(pace, tmp_path / "full")
        with pytest.raises(TraceError, match="can't be written"):
            Recorder(pace, tmp_path / "no" / "such")
        with pytest.raises(ValueError, match="content must be"):
            Recorder(pace, tmp_path / "t", "all")
        with Recorder(pace, tmp_path / "empty", "choices"):
            pass
    with pytest.raises(TraceError, match="holds nothing yet"):
        open_trace(tmp_path / "empty")


KILLED = """
import sys, torch
from pathlib import Path
from paceline import attach
from paceline.demo.assets import load_model, read_text
from paceline.traces.record import Recorder
model, tokenizer = load_model()
ids = torch.tensor(tokenizer(read_text("prose"), verbose=False)["input_ids"])
with attach(model) as pace, torch.no_grad():
    Recorder(pace, Path(sys.argv[1]), "choices", chunk_bytes=8_000)
    for batch in range(10**6):
        start = 64 * (batch % 20)
        model(ids[None, start : start + 64])
        print(batch, flush=True)
"""


def test_a_killed_recording_loses_its_last_chunk_at_most(demo: Any, tmp_path: Path) -> None:
    """SIGKILL while a real process records; what is there is whole, right, and nearly all."""
    folder = tmp_path / "t"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(int(line))
        if len(lines) >= 16:
            time.sleep(0.013)
            break
    os.kill(process.pid, signal.SIGKILL)
    lines += [int(line) for line in process.stdout]
    process.wait()
    trace = open_trace(folder)
    assert "cut off" in trace.header.notes[-1]
    chunks = list(trace.chunks)
    batches = [chunk.ids[:, a : a + 64] for chunk in chunks for a in chunk.starts.tolist()[:-1]]
    in_a_chunk = max(chunk.batches for chunk in chunks)
    # the forward that ended last is only known to have when the next one begins
    assert len(lines) - in_a_chunk - 2 <= len(batches) <= len(lines) + 1
    model, tokenizer = demo
    ids = torch.tensor(tokenizer(read_text("prose"), verbose=False)["input_ids"])
    with attach(model) as pace, torch.no_grad():
        seen = Seen(pace)
        for batch in range(20):
            model(ids[None, 64 * batch : 64 * batch + 64])
    layers = len(trace.header.layers)
    for number, got in enumerate(batches):
        wanted = seen.rows[layers * (number % 20) : layers * (number % 20 + 1)]
        assert torch.equal(got.long(), torch.stack([inputs.topk_ids for _, inputs in wanted]))
    left = {path.suffix for path in folder.iterdir()}
    assert left <= {".json", ".safetensors", ".part"}
