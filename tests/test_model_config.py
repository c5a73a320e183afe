"""A config.json is read alike however its language model is nested, and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.model_config import ModelConfig, read_model_config

QWEN3_OMNI = {
    "model_type": "qwen3_omni_moe",
    "talker_config": {"text_config": {"num_experts": 128, "hidden_size": 1024}},
    "thinker_config": {
        "audio_config": {"hidden_size": 512, "num_hidden_layers": 32},
        "text_config": {
            "hidden_size": 2048, "intermediate_size": 768, "moe_intermediate_size": 1408,
            "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 26,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "moe_layers"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "moe"], "first_k_dense_replace": 3}, 2),
        ({"hybrid_override_pattern": "MEM*EM"}, 2),
        ({"layers_block_type": ["mamba", "moe", "attention"]}, 1),
        ({"moe_layers": [1, 3, 5]}, 3),
        ({"moe_layer_freq": [0, 1, 1]}, 2),
        ({"num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1}, 58),
        ({"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, 1),
        ({"num_hidden_layers": 28, "moe_layer_start_index": 1, "moe_layer_end_index": -1}, 27),
        ({"num_hidden_layers": 8, "expert_layer_period": 2, "expert_layer_offset": 1}, 4),
        ({"num_hidden_layers": 2, "first_k_dense_replace": "x", "mlp_only_layers": 3}, 2),
        ({}, None),
    ],
)
def test_moe_layers(fields: dict[str, Any], moe_layers: int | None) -> None:
    assert ModelConfig("config.json", fields).moe_layers == moe_layers


def test_layers_without_end() -> None:
    with pytest.raises(ValueError, match="at most 65536 layers, got 10000000000"):
        _ = ModelConfig("config.json", {"num_hidden_layers": 10**10}).moe_layers


def test_lists_of_one_size_per_layer() -> None:
    config = ModelConfig("config.json", {"num_experts": [16, 16], "moe_topk": [1, 2]})
    assert (config.experts, config.experts_per_token) == (16, 2)


@pytest.mark.parametrize("value", ["many", 0, -1, True, 1.5, [], [4, None], {}])
def test_a_size_that_is_no_whole_number(value: object) -> None:
    with pytest.raises(ValueError, match="num_experts must be a whole number above 0, got"):
        _ = ModelConfig("config.json", {"num_experts": value}).experts


@pytest.mark.parametrize("raw", ["[]", "{", '{"a": ' * 5000, "\xff"])
def test_files_that_are_no_config(raw: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(raw, encoding="latin1")
    with pytest.raises(ValueError, match=r"config\.json (can't be read|must hold)"):
        read_model_config(tmp_path)
    with pytest.raises(ValueError, match="can't be read"):
        read_model_config(tmp_path / "absent.json")


def run(verb: str, folder: Path, *options: str) -> Any:
    """Run a verb on a small trace, with the config.json in the same folder."""
    ids = np.random.default_rng(0).random((2, 64, 8)).argsort(2)[..., :2]
    np.savez(folder / "trace.npz", topk_ids=ids, num_experts=8)
    command = [verb, folder / "trace.npz", "--model-config", folder, "--devices", 4,
               "--hardware", "h20", "--batch-tokens", 16, *options]  # fmt: skip
    return CliRunner().invoke(app, [str(argument) for argument in command])


@pytest.mark.parametrize("verb", ["plan", "loads"])
def test_a_nested_config_serves_every_verb(verb: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_OMNI))
    result = run(verb, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found if verb == "plan" else found["planned"])["decision"] == "nothing"


def test_a_config_without_experts_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "intermediate_size": 64}')
    result = run("plan", tmp_path)
    assert result.exit_code == 2
    assert "must state num_experts" in " ".join(result.output.split())
