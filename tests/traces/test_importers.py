"""Other programs' files: the right counts of every one, and a reason for every refusal."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_traces import SAMPLE

from paceline.traces import ImportOptions, Trace, TraceError, open_trace, save_trace
from paceline.traces.importers import sglang_recorder
from paceline.traces.tables import load_tables

HERE = Path(__file__).with_name("samples")
OPTIONS = ImportOptions(experts=64, k=6, layers=5)


def expected(folder: Path) -> dict[str, Any]:
    """What expected.json of a folder says of its files; nothing where there is none."""
    path = folder / "expected.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def counts_of(trace: Trace) -> list[list[int]]:
    """[layers][experts] of all batches."""
    return sum(table.counts.sum(0) for table in load_tables(trace)).tolist()


def cases(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Files with counts, the first rank where there are several."""
    found = expected(folder).items()
    return [(folder / name.replace("{0,1}", "0"), said) for name, said in found if "counts" in said]


# all files of the research behind these formats, where they are at hand
ELSEWHERE = os.environ.get("PACELINE_FORMATS")
CASES = cases(Path(ELSEWHERE) if ELSEWHERE else HERE)


@pytest.mark.parametrize(("path", "said"), CASES, ids=[path.name for path, _ in CASES])
def test_every_count_of_every_format_is_right(
    path: Path, said: dict[str, Any], tmp_path: Path
) -> None:
    trace = open_trace(path, ImportOptions(experts=64, k=said.get("k"), layers=5))
    assert counts_of(trace) == said["counts"]
    layers = trace.header.layers
    assert {layer.experts for layer in layers} == {said["num_experts"]}
    if "layer_ids" in said:
        assert [layer.name for layer in layers] == [f"layer {i}" for i in said["layer_ids"]]
    for layer in said.get("dense_layers", []):
        assert any(f"layer {layer}:" in note for note in trace.header.notes)
    if trace.header.per_token:
        chunk = next(iter(trace.chunks))
        valid = chunk.tokens if chunk.valid is None else int(chunk.valid.sum())
        assert valid == said["tokens"]
        assert {layer.k for layer in layers} == {said["k"]}
    save_trace(trace, tmp_path / "own")
    assert counts_of(open_trace(tmp_path / "own")) == said["counts"]


def test_the_cases_are_there() -> None:
    assert len(CASES) >= 11


# -- what a file means ----------------------------------------------------------------------------


def test_a_completion_tells_prompt_from_generated_tokens() -> None:
    for name in ("vllm/chat_completion.v0.32.json", "sglang/generate_response.json"):
        chunk = next(iter(open_trace(HERE / name, OPTIONS).chunks))
        assert chunk.phase is not None
        assert chunk.phase.tolist() == [0] * 24 + [1] * 16


def test_tokens_that_the_prefix_cache_answered_dont_count() -> None:
    trace = open_trace(HERE / "vllm/completion.v0.21.json", OPTIONS)
    assert any("16 of 40 tokens have no ids" in note for note in trace.header.notes)


def test_several_completions_are_several_batches(tmp_path: Path) -> None:
    one = json.loads((HERE / "vllm/chat_completion.v0.32.json").read_text())
    single = counts_of(open_trace(HERE / "vllm/chat_completion.v0.32.json", OPTIONS))
    (tmp_path / "lines.jsonl").write_text(f"{json.dumps(one)}\n{json.dumps(one)}\n")
    (tmp_path / "list.json").write_text(json.dumps([one, one]))
    for path in tmp_path.iterdir():
        trace = open_trace(path, OPTIONS)
        assert counts_of(trace) == (2 * np.array(single)).tolist()
        chunk = next(iter(trace.chunks))
        assert chunk.batches == 2
        assert sorted(set(chunk.request.tolist())) == [0, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32])
def test_other_dtypes_of_other_versions(tmp_path: Path, dtype: Any) -> None:
    ids = np.array([[[3, 1], [0, 0]], [[2, 1], [0, 0]]], dtype=dtype)  # layer 1 is dense
    buffer = io.BytesIO()
    np.save(buffer, ids)
    text = base64.b64encode(buffer.getvalue()).decode()
    path = tmp_path / "it.json"
    path.write_text(json.dumps({"choices": [{"routed_experts": text}]}))
    assert counts_of(open_trace(path, ImportOptions(experts=4))) == [[0, 2, 1, 1]]
    np.save(tmp_path / "it.npy", ids)
    assert counts_of(open_trace(tmp_path / "it.npy", ImportOptions(experts=4))) == [[0, 2, 1, 1]]


def test_sglangs_ids_under_other_names(tmp_path: Path) -> None:
    raw = json.loads((HERE / "sglang/generate_response.json").read_text())
    wanted = counts_of(open_trace(HERE / "sglang/generate_response.json", OPTIONS))
    ids = raw["meta_info"]["routed_experts"]
    for name in ("sglext", "sgl_ext"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"choices": [{"index": 0}], name: {"routed_experts": ids}}))
        assert counts_of(open_trace(path, OPTIONS)) == wanted


def test_offline_outputs_are_a_batch_each() -> None:
    chunk = next(iter(open_trace(HERE / "vllm/offline_outputs.npz", OPTIONS).chunks))
    assert chunk.starts.tolist() == [0, 40, 49]


def test_rows_that_were_not_captured_dont_count_in_their_layer(tmp_path: Path) -> None:
    ids = np.array([[[1, 2], [3, 0]], [[0, 0], [1, 3]], [[-1, -1], [-1, -1]], [[2, 0], [-1, -1]]])
    np.save(tmp_path / "it.npy", ids)
    trace = open_trace(tmp_path / "it.npy", ImportOptions(experts=4))
    assert counts_of(trace) == [[1, 1, 2, 0], [1, 1, 0, 2]]
    notes = " ".join(trace.header.notes)
    assert "1 of 4 tokens have no ids" in notes
    assert "2 rows of a layer name one expert 2 times or none" in notes


def test_physical_slots_can_be_kept(tmp_path: Path) -> None:
    path = HERE / "sglang/expert_distribution_recorder_1764456001.0_0.pt"
    mapped, kept = open_trace(path, OPTIONS), open_trace(path, ImportOptions(physical=True))
    assert kept.header.experts == 72
    slots = np.array(counts_of(kept))
    # by hand: slot s of every layer holds the expert that the map names
    maps = torch.load(path, weights_only=True)["last_physical_to_logical_map"].numpy()[1:]
    by_hand = np.zeros((4, 64), dtype=int)
    for layer in range(4):
        for slot in range(72):
            by_hand[layer, maps[layer, slot]] += slots[layer, slot]
    assert by_hand.tolist() == counts_of(mapped)


def test_counts_are_divided_by_the_world_size_where_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": [[4, 8, 0], [12, 0, 4]]}))
    assert counts_of(open_trace(path)) == [[4, 8, 0], [12, 0, 4]]
    assert any("--world-size" in note for note in open_trace(path).header.notes)
    assert counts_of(open_trace(path, ImportOptions(world_size=4))) == [[1, 2, 0], [3, 0, 1]]
    with pytest.raises(TraceError, match="world_size=3"):
        open_trace(path, ImportOptions(world_size=3))


def per_token_recording(path: Path, rank: int, ids: list[Any], number: int = 1) -> None:
    """A file as SGLang's recorder writes it in mode per_token, decode passes of one layer."""
    tensor = torch.tensor(ids, dtype=torch.int32)[None]
    record = {
        "forward_pass_id": number, "rank": rank, "gatherer_key": "primary", "forward_mode": 2,
        "input_ids": [1] * len(ids), "positions": [5] * len(ids), "extend_seq_lens": None,
        "topk_ids_of_layer": tensor, "global_physical_count": torch.zeros(1, 4, dtype=torch.int32),
    }  # fmt: skip
    mapping = torch.tensor([[1, 0, 3, 2]])
    torch.save({"records": [record], "last_physical_to_logical_map": mapping}, path)


def test_ranks_that_see_the_same_tokens_count_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        per_token_recording(tmp_path / f"same_{rank}.pt", rank, [[0, 1, -1], [2, 1, -1]])
    trace = open_trace(tmp_path / "same_0.pt")
    assert counts_of(trace) == [[2, 1, 0, 1]]
    assert any("counted once" in note for note in trace.header.notes)


def test_ranks_with_tokens_of_their_own_are_one_batch(tmp_path: Path) -> None:
    for rank, ids in enumerate([[[0, 1], [2, 1]], [[3, 2]]]):
        per_token_recording(tmp_path / f"own_{rank}.pt", rank, ids)
    chunk = next(iter(open_trace(tmp_path / "own_1.pt").chunks))
    assert chunk.starts.tolist() == [0, 3]
    assert chunk.source.tolist() == [0, 0, 1]
    assert chunk.phase.tolist() == [1, 1, 1]
    assert chunk.ids[0].tolist() == [[1, 0], [3, 0], [2, 3]]


def test_files_of_two_recordings_arent_taken_for_ranks(tmp_path: Path) -> None:
    for name in ("it_0", "it_1"):
        per_token_recording(tmp_path / f"{name}.pt", 0, [[0, 1]])
    for path in (tmp_path / "it_0.pt", tmp_path):
        with pytest.raises(TraceError, match="both of rank 0"):
            open_trace(path)
    table = torch.ones(2, 1, 4, dtype=torch.int32)
    for rank in (0, 1):
        torch.save({"rank": rank, "logical_count": table * (rank + 1)}, tmp_path / f"it_{rank}.pt")
    trace = open_trace(tmp_path / "it_1.pt")
    assert counts_of(trace) == [[6, 6, 6, 6]]
    assert any("the sum of 2 ranks" in note for note in trace.header.notes)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    ids = np.array([[[0, 1], [2, -1]]])
    for place, fine in (((0, 0, 1), False), ((0, 1, 1), True)):  # the second weighs no expert
        weights = np.ones((1, 2, 2), dtype=np.float32)
        weights[place] = np.nan
        np.savez(tmp_path / "it.npz", topk_ids=ids, topk_weights=weights, num_experts=4)
        if fine:
            assert counts_of(open_trace(tmp_path / "it.npz")) == [[1, 1, 1, 0]]
        else:
            refused(tmp_path / "it.npz", "finite numbers", ImportOptions())


def test_passes_of_several_steps_are_batches_of_their_own(tmp_path: Path) -> None:
    data = []
    for number in (9, 4):
        per_token_recording(tmp_path / "one.pt", 0, [[number % 4, 3]], number)
        data.append(torch.load(tmp_path / "one.pt", weights_only=True))
    data[0]["records"] += data[1]["records"]
    torch.save(data[0], tmp_path / "both.pt")
    chunk = next(iter(open_trace(tmp_path / "both.pt").chunks))
    assert chunk.starts.tolist() == [0, 1, 2]
    assert chunk.ids[0].tolist() == [[1, 2], [0, 2]]  # pass 4, then pass 9


def test_the_csv_of_several_ranks_adds_up(tmp_path: Path) -> None:
    for rank, count in enumerate((3, 4)):
        (tmp_path / f"rank{rank}.csv").write_text(f"layer_id,expert_id,count\n2,1,{count}\n")
    trace = open_trace(tmp_path, ImportOptions(experts=2))
    assert counts_of(trace) == [[0, 7]]
    assert any("sum of 2 ranks" in note for note in trace.header.notes)


def esft_files(folder: Path) -> dict[str, np.ndarray]:
    """The sample's first two layers in ESFT's own text, one file a layer."""
    with np.load(SAMPLE / "esft_v2lite_law.npz") as stored:
        arrays = dict(stored)
    bounds = np.cumsum([0, *arrays["sample_lengths"]])
    folder.mkdir()
    for layer in (1, 0):
        lines = []
        for start, end in pairwise(bounds):
            ids = arrays["topk_ids"][layer, start:end].ravel()
            weights = arrays["topk_weights"][layer, start:end].ravel()
            lines.append("\t".join(map(str, ids)) + "\t\t" + "\t".join(map(str, weights)))
        number = arrays["layers"][layer]
        (folder / f"expert_weights_{number}.txt").write_text("\n".join(lines) + "\n")
    return arrays


def test_esft_text_gives_the_ids_and_weights_that_went_in(tmp_path: Path) -> None:
    arrays = esft_files(tmp_path / "law")
    trace = open_trace(tmp_path / "law", ImportOptions(experts=64, k=6))
    assert [layer.name for layer in trace.header.layers] == ["layer 1", "layer 6"]
    chunk = next(iter(trace.chunks))
    assert (chunk.ids.numpy() == arrays["topk_ids"][:2]).all()
    assert (chunk.weights.numpy().astype(np.float16) == arrays["topk_weights"][:2]).all()
    assert chunk.starts.tolist() == np.cumsum([0, *arrays["sample_lengths"]]).tolist()
    alone = open_trace(tmp_path / "law/expert_weights_6.txt", ImportOptions(experts=64, k=6))
    assert [layer.name for layer in alone.header.layers] == ["layer 6"]
    with pytest.raises(TraceError, match="--k"):
        open_trace(tmp_path / "law", ImportOptions(experts=64))
    with pytest.raises(TraceError, match="k=7"):
        open_trace(tmp_path / "law", ImportOptions(experts=64, k=7))


# -- route logs -----------------------------------------------------------------------------------


def route_log(path: Path, tokens: list[int], meta: dict[str, Any] | None = None) -> None:
    rows = [{"type": "meta", "model_id": "m", "layers_logged": [3, 7], "top_k": 2, **(meta or {})}]
    for row, token in enumerate(tokens):
        for layer in (3, 7):
            ids = [row % 4, 4 + layer % 3]
            rows.append({
                "type": "route", "req_id": "r", "token_idx": token, "layer": layer,
                "topk_ids": ids, "topk_weights": [0.75, 0.25],
            })  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_route_log_whose_index_starts_anew_has_forwards(tmp_path: Path) -> None:
    route_log(tmp_path / "log", [0, 1, 2, 0, 0, 1], {"num_experts": 8})
    trace = open_trace(tmp_path / "log")
    chunk = next(iter(trace.chunks))
    assert chunk.starts.tolist() == [0, 3, 4, 6]
    assert trace.header.batches == "forward"
    assert trace.header.model == "m"
    assert [layer.name for layer in trace.header.layers] == ["layer 3", "layer 7"]
    assert chunk.weights[0, 0].tolist() == [0.75, 0.25]


def test_a_route_log_whose_index_counts_on_has_none(tmp_path: Path) -> None:
    route_log(tmp_path / "log", [0, 1, 2, 3])
    with pytest.raises(TraceError, match="--experts"):
        open_trace(tmp_path / "log")
    trace = open_trace(tmp_path / "log", ImportOptions(experts=8))
    assert next(iter(trace.chunks)).starts.tolist() == [0, 4]
    assert trace.header.batches == "file"


def test_a_route_log_that_is_cut_off_or_wrong(tmp_path: Path) -> None:
    path = tmp_path / "log"
    route_log(path, [0, 1, 2])
    text = path.read_text()
    whole = counts_of(open_trace(path, ImportOptions(experts=8)))
    for cut in (text[: text.rindex("{")], text[:-20]):  # without the last layer of the last token
        path.write_text(cut)
        first, last = counts_of(open_trace(path, ImportOptions(experts=8)))
        assert first == whole[0]
        assert sum(last) == sum(whole[1]) - 2
    path.write_text(text.replace('"token_idx": 1, "layer": 7', '"token_idx": 9, "layer": 7'))
    trace = open_trace(path, ImportOptions(experts=8))
    assert counts_of(trace) == whole
    assert any("fewer rows than the 4 of others" in note for note in trace.header.notes)
    for wrong, said in (
        (text.replace('"topk_ids": [0', '"topk_ids": ["0"'), "topk_ids"),
        (text.replace('"topk_ids": [0', '"topk_ids": [99'), "expert 99"),
        (text.replace('"layer": 7', '"layer": -7'), "layer=-7"),
    ):
        assert wrong != text
        path.write_text(wrong)
        with pytest.raises(TraceError, match=said):
            open_trace(path, ImportOptions(experts=8))


# -- refusals -------------------------------------------------------------------------------------

REFUSED = {
    "vllm/eplb_balancedness.log": "one balance a step",
    "sglang/init_expert_location.json": "placement",
    "trtllm/moe_load_balancer.yaml": "placement",
    "vllm_ascend/expert_map.json": "placement",
    "megablocks/metrics.jsonl": "MegaBlocks",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_no_loads_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(TraceError, match="holds no load table: ") as caught:
        open_trace(HERE / name, OPTIONS)
    assert REFUSED[name] in str(caught.value)


JSONS: list[tuple[Any, str]] = [
    ([[9, 5], [11, 2]], "order of popularity"),
    ({"experts": {"1": [12, 40], "2": [3]}}, "chosen for tuning"),
    ({"P01": {"total_slots": 9, "top20": [[34, 1147, 0.01]]}}, "partial"),
    ({}, "JSON of an unknown form"),
    ([], "JSON of an unknown form"),
    (3, "is no known trace"),
    ({"choices": [{"message": {}}]}, "has no routed_experts"),
    ({"choices": [{"routed_experts": "%%%"}]}, "is no base64"),
    ({"choices": [{"routed_experts": "AAAA"}]}, "no multiple of 4 bytes"),
    ({"choices": [{"routed_experts": [[1, 2]]}]}, "no nested lists"),
    ({"choices": [{"routed_experts": [[[1, 2], [1]]]}]}, "no nested lists"),
    ({"choices": [{"routed_experts": [[[64, 2]]]}]}, "expert 64"),
    ({"choices": [{"routed_experts": [[[-2, 2]]]}]}, "expert -2"),
    ({"choices": [{"routed_experts": [[[5, 2, 5]]]}]}, "names expert 5 twice"),
    ({"choices": [{"routed_experts": [[[5, 5]]]}]}, "no row that names 2 experts"),
    ({"choices": [3]}, "no JSON object"),
    ({"num_experts": 2, "k": 1, "layers": {"0": {"2": 5}}}, "was given"),
    ({"num_experts": 64, "k": 6, "layers": {"0": {"64": 5}}}, "expert 64"),
    ({"num_experts": 64, "k": 6, "layers": {"0": {"6": -5}}}, "count outside 0"),
    ({"num_experts": 64, "k": 6, "layers": {"0": {"6": 0.5}}}, "no whole numbers"),
    ({"num_experts": 64, "k": 6, "layers": {"0": {"6": "5"}}}, "is no number"),
    ({"num_experts": 64, "k": 6, "layers": {"a": {"6": 5}}}, "no number of a layer"),
    ({"num_experts": 64, "k": 6, "layers": {}}, "no layers"),
    ({"num_experts": 64, "k": 6, "layers": {"1": {"3": 0}}}, "all of it is zero"),
    ({"num_experts": 10**9, "k": 6, "layers": {"1": {"3": 0}}}, "num_experts=1000000000"),
    ({"num_experts": 64, "k": 6, "layers": {"1": 3}}, "holds 3"),
    ({"logical_count": [[1, 2], [3]]}, "no even nested lists"),
    ({"logical_count": [1, 2]}, "expected 2 or 3"),
    ({"weight": [[1, 2]], "num_replicas": 4}, "was given"),
    ({"layers": [{"layer_id": 1, "experts": [{"expert_id": 0, "activations": 4}]}]}, "of 3"),
]


@pytest.mark.parametrize(("data", "said"), JSONS, ids=[f"{d}"[:40] for d, _ in JSONS])
def test_json_that_cant_be_is_refused(tmp_path: Path, data: Any, said: str) -> None:
    path = tmp_path / "it.json"
    path.write_text(json.dumps(data))
    refused(path, said, OPTIONS if "multiple" in said else ImportOptions(experts=64, layers=5))


def refused(path: Path, said: str, options: ImportOptions = OPTIONS) -> None:
    """Opening ends in one sentence that names the file and says this."""
    with pytest.raises(TraceError) as caught:
        open_trace(path, options)
    text = str(caught.value)
    assert said in text
    assert path.name in text
    assert "\n" not in text
    assert len(text) < 600


def test_numbers_of_experts_are_never_guessed_from_tables() -> None:
    for name in (
        "vllm/chat_completion.v0.32.json",
        "sglang/generate_response.json",
        "sglang/expert_distribution_rank0_timestamp1744347750.37.csv",
        "mindspeed_rl/token_collects_all.json",
        "llama_cpp/expert_selection.csv",
        "llama_cpp/expert_trace.json",
    ):
        with pytest.raises(TraceError, match="the number of experts per layer: give --experts"):
            open_trace(HERE / name)
    with pytest.raises(TraceError, match="--layers"):
        open_trace(HERE / "sglang/generate_response.json", ImportOptions(experts=64))
    with pytest.raises(TraceError, match="k=6, but k=4 was given"):
        open_trace(HERE / "vllm/chat_completion.v0.32.json", ImportOptions(experts=64, k=4))


def test_the_models_config_tells(tmp_path: Path) -> None:
    config = {"text_config": {"n_routed_experts": 64, "num_experts_per_tok": 6}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    options = ImportOptions().with_config(tmp_path)
    assert options == ImportOptions(experts=64, k=6, layers=5)
    assert ImportOptions(experts=8, k=2).with_config(tmp_path).experts == 8
    trace = open_trace(HERE / "sglang/generate_response.json", options)
    assert trace.header.k == 6
    for raw in ("[]", "{", '{"num_experts": "many"}'):
        (tmp_path / "config.json").write_text(raw)
        with pytest.raises(TraceError, match="config"):
            ImportOptions().with_config(tmp_path)


# -- hostile files --------------------------------------------------------------------------------


class Evil:
    """A pickle that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_no_pickle_is_ever_run(tmp_path: Path) -> None:
    left = tmp_path / "left"
    torch.save({"logical_count": Evil(left)}, tmp_path / "it.pt")
    refused(tmp_path / "it.pt", "without running code")
    for protocol in (2, 4, 5):
        (tmp_path / "it.pkl").write_bytes(pickle.dumps(Evil(left), protocol=protocol))
        refused(tmp_path / "it.pkl", "is a pickle")
    np.save(tmp_path / "it.npy", np.array([Evil(left)], dtype=object), allow_pickle=True)
    refused(tmp_path / "it.npy", "expected numbers")
    np.savez(tmp_path / "it.npz", topk_ids=np.array([Evil(left)], dtype=object))
    refused(tmp_path / "it.npz", "expected numbers")
    assert not left.exists()


def test_a_torch_file_is_refused_where_torch_has_known_holes(monkeypatch: Any) -> None:
    path = HERE / "sglang/expert_distribution_recorder_1764456000.0.pt"
    for version in ("2.9.1", "2.5.0+cpu", "1.13"):
        monkeypatch.setattr(sglang_recorder.torch, "__version__", version)
        refused(path, "torch 2.10 or newer")
    monkeypatch.setattr(sglang_recorder.torch, "__version__", "2.10.0a0")
    assert open_trace(path).header.experts == 64


TORCH_FILES: list[tuple[Any, str]] = [
    ([1, 2], "holds a list"),
    ({"logical_count": [1]}, "logical_count is list"),
    ({"logical_count": torch.zeros(2, 2, 2)}, "whole numbers"),
    ({"logical_count": torch.zeros(2, 2, dtype=torch.int32)}, "3 axes"),
    ({"records": []}, "no recording of SGLang"),
    ({"records": [3]}, "expected dicts"),
    ({"records": [{"global_physical_count": torch.zeros(1, 2).int()}]}, "forward_pass_id"),
    (
        {
            "records": [
                {"forward_pass_id": 1, "global_physical_count": torch.ones(1, 2).int()}
            ],
            "last_physical_to_logical_map": torch.zeros(1, 3).long(),
        },
        "expected [1, 2]",
    ),
    (
        {
            "records": [
                {"forward_pass_id": i, "global_physical_count": torch.ones(1, i).int()}
                for i in (2, 3)
            ],
            "last_physical_to_logical_map": torch.zeros(1, 3).long(),
        },
        "differ in layers or slots",
    ),
    # terabytes by strides alone
    ({"logical_count": torch.zeros(1).int().expand(10**4, 10**4, 64)}, "over 1 values"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "said"), TORCH_FILES, ids=[s for _, s in TORCH_FILES])
def test_torch_files_that_cant_be_are_refused(tmp_path: Path, data: Any, said: str) -> None:
    torch.save(data, tmp_path / "it.pt")
    refused(tmp_path / "it.pt", said)


def test_archives_that_unpack_to_too_much_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,), }\n"
        magic = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header))
        archive.writestr("topk_ids.npy", magic + header + bytes(1 << 22))
    refused(tmp_path / "bomb.npz", "states 1000000000000 bytes")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 20))
    refused(tmp_path / "bomb.pt", "compressed")
    (tmp_path / "cut.npz").write_bytes((HERE / "vllm/offline_outputs.npz").read_bytes()[:300])
    refused(tmp_path / "cut.npz", "cut off or broken")


def test_a_gguf_with_lengths_that_cant_be_is_refused(tmp_path: Path) -> None:
    whole = (HERE / "llama_cpp/imatrix.gguf").read_bytes()
    path = tmp_path / "it.gguf"
    for size in range(4, len(whole), 501):
        path.write_bytes(whole[:size])
        refused(path, "it.gguf")
    for at in (8, 16, 24):  # tensors, keys, length of the first text
        path.write_bytes(whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :])
        refused(path, "it.gguf")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    refused(path, "without counts of experts")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    refused(path, "version 2 or 3")


def test_a_statistic_of_tensorrt_that_cant_be_is_refused(tmp_path: Path) -> None:
    def fresh() -> Path:
        shutil.rmtree(tmp_path / "it", ignore_errors=True)
        shutil.copytree(HERE / "trtllm/expert_statistic", tmp_path / "it")
        return tmp_path / "it"

    folder = fresh()
    with pytest.raises(TraceError, match="experts=8 was given"):
        open_trace(folder, ImportOptions(experts=8))
    (folder / "meta_info.json").write_text('{"num_experts": 32, "num_experts_per_token": 6}')
    with pytest.raises(TraceError, match=r"has shape \[64\]"):
        open_trace(folder)
    for raw in ("{}", "[]", "{", '{"num_experts": 4, "num_experts_per_token": 9}'):
        (folder / "meta_info.json").write_text(raw)
        with pytest.raises(TraceError, match=r"meta_info\.json"):
            open_trace(folder)
    folder = fresh()
    for rank in folder.glob("rank*"):
        rank.unlink()
    with pytest.raises(TraceError, match="no rank"):
        open_trace(folder)
    folder = fresh()
    (folder / "rank0.safetensors").write_bytes(b"123")
    with pytest.raises(TraceError, match="no safetensors"):
        open_trace(folder)


def test_what_is_no_file_or_unknown_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "there is no trace")
    (tmp_path / "empty").write_bytes(b"")
    refused(tmp_path / "empty", "is no known trace")
    (tmp_path / "text").write_text("just words")
    refused(tmp_path / "text", "is no known trace")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "holds no known trace")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "no plain file")
    with pytest.raises(TraceError, match="sample must be one of esft"):
        open_trace("sample:x")
