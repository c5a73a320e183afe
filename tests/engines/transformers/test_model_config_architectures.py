"""Sizes read from a config.json are those of the model built from it, for every architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import multimodal_models
import pytest
import tiny_models
import torch

from paceline import attach
from paceline.engines.transformers.layers.find import find_layers
from paceline.model_config import ModelConfig, read_model_config

# Each states its experts, its dense layers or its sizes in a way of its own.
FIRST_TIER = ("dbrx", "deepseek_v3", "jamba", "longcat_flash", "mixtral", "nemotron_h", "flint")
NESTINGS = (
    ("text_config",),
    ("thinker_config", "text_config"),
    ("llm_config",),
    ("language_config",),
)
SIZES = ("experts", "experts_per_token", "hidden_layers", "moe_layers", "hidden_size",
         "expert_size", "shared_size", "expert_groups")  # fmt: skip
# Attaching refuses these, so that only the number of experts is compared.
REFUSED = ("jetmoe", "llama4", "nllb_moe", "switch_transformers", "vitpose_backbone")


def tiers(names: tuple[str, ...]) -> list[Any]:
    full = pytest.mark.full
    return [n if n in FIRST_TIER else pytest.param(n, marks=full) for n in names]


def measured(model: torch.nn.Module) -> dict[str, int]:
    """The sizes of a model's MoE layers, by its weights and one forward."""
    layers, seen, widths = find_layers(model), set(), set()
    experts = layers[0].experts
    hook = experts.register_forward_pre_hook(
        lambda module, args, kwargs: widths.add([*args, *kwargs.values()][0].shape[-1]),
        with_kwargs=True,
    )
    with attach(model) as pace, torch.no_grad():
        pace.watch(lambda name, inputs, _: seen.add((inputs.experts(None), *inputs.topk_ids.shape)))
        model(**tiny_models.inputs_for(model))
    hook.remove()
    (hidden,), ((count, k),) = widths, {(experts, k) for experts, _, k in seen}
    down = next(p for n, p in experts.named_parameters() if n in ("down_proj", "mlp.w2"))
    names = {re.sub(r"\.(text|vision)_moe$", "", layer.name) for layer in layers}
    return {
        "experts": count,
        "experts_per_token": k,
        "moe_layers": len(names),
        "hidden_size": hidden,
        "expert_size": down.numel() // (count * hidden),
    }


@pytest.mark.parametrize("name", tiers(tiny_models.architectures()))
def test_sizes_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = tiny_models.build(name)
    model.config.to_json_file(tmp_path / "config.json", use_diff=False)
    config = read_model_config(tmp_path)
    if name in REFUSED:
        assert config.experts == tiny_models.NUM_EXPERTS
        return
    wanted = measured(model)
    assert {size: getattr(config, size) for size in wanted} == wanted
    for nesting in NESTINGS:
        fields: Any = config.fields
        for part in reversed(nesting):
            fields = {part: fields, "hidden_size": 1, "num_hidden_layers": 1}
        nested = ModelConfig("config.json", fields)
        assert [getattr(nested, s) for s in SIZES] == [getattr(config, s) for s in SIZES]


@pytest.mark.full
@pytest.mark.parametrize("package", multimodal_models.WHOLE)
def test_whole_multimodal_configs_state_what_their_language_part_does(package: str) -> None:
    cls = multimodal_models.model_class(package).config_class
    whole = tiny_models._nested(cls, multimodal_models.WHOLE[package].overrides)
    config = ModelConfig("config.json", json_fields(whole))
    language = ModelConfig("config.json", json_fields(whole.get_text_config()))
    assert [getattr(config, s) for s in SIZES] == [getattr(language, s) for s in SIZES]
    assert config.experts == tiny_models.NUM_EXPERTS


def json_fields(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))
