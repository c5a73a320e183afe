"""Tiny random models of every Mixture-of-Experts architecture of Transformers, found by code.

`architectures()` scans the modeling modules for experts, `build(name)` shrinks the default
configuration to a few hundred kilobytes and draws weights whose routing is skewed, so that caps
bind.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

FIRST_EIGHT = (
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
)
NUM_EXPERTS, TOP_K, VOCAB = 8, 2, 128
# What marks a modeling file as one with routed experts.
_EXPERTS = re.compile(r"self\.experts\(|ParallelExperts\(")

# Names that mean the same in every configuration; one that a config lacks is left out.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "moe_hidden_size": 32,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_heads": 4,
    "n_layers": 2,
    "num_heads": 4,
    "depth": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "moe_num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "top_k_experts": TOP_K,
    "moe_topk": TOP_K,
    "moe_top_k": TOP_K,
    "moe_k": TOP_K,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "sliding_window": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "unpadded_vocab_size": VOCAB,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "out_hidden_size": 32,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "rel_extent": 32,
}


# Left alone where a configuration has none by default.
_OPTIONAL = ("n_group", "topk_group", "q_lora_rank", "num_key_value_heads", "sliding_window")


def _modeling_files() -> list[Path]:
    return sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))


@functools.cache
def architectures() -> tuple[str, ...]:
    """Packages of the installed Transformers whose modeling file calls routed experts."""
    return tuple(f.parent.name for f in _modeling_files() if _EXPERTS.search(f.read_text()))


# Where the parts around the language model are not worth shrinking, the language model alone.
_CLASSES = {
    "deepseek_ocr2": "DeepseekOcr2TextModel",
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeTextModel",
    "glm5_next": "Glm5NextTextModel",
    "muse_spark": "MuseSparkTextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "unlimited_ocr": "UnlimitedOcrTextModel",
    "vitpose_backbone": "VitPoseBackbone",
}


def model_class(name: str) -> type[PreTrainedModel]:
    """The class to load: causal LM first, then conditional generation, then the bare model."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    classes = [
        c
        for c in vars(module).values()
        if isinstance(c, type)
        and issubclass(c, PreTrainedModel)
        and c.__module__ == module.__name__
        and getattr(c, "config_class", None) is not None
    ]
    if name in _CLASSES:
        return getattr(module, _CLASSES[name])
    for ending in (
        "ForCausalLM",
        "ForConditionalGeneration",
        "ForTokenClassification",
        "Model",
        "",
    ):
        for c in classes:
            if c.__name__.endswith(ending) and not c.__name__.endswith("PreTrainedModel"):
                return c
    raise LookupError(f"no model class in {module.__name__}")


def _shrunk(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a small configuration of `cls`: known sizes, per-layer lists cut to fit."""
    try:
        default = cls()
    except Exception:  # some nested configurations need their parent's values
        default = None
    fields = set(getattr(cls, "__dataclass_fields__", ())) or set(vars(default or {}))
    mapped = getattr(cls, "attribute_map", {})
    out: dict[str, Any] = {}
    sizes = dict(_SIZES)
    if "kv_lora_rank" in fields:  # multi-head latent attention has no grouped keys
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        del sizes["head_dim"]
    for key, value in sizes.items():
        real = key if key in fields else mapped.get(key, key)
        current = _get(default, real)
        if real not in fields or isinstance(current, (dict, PreTrainedConfig)):
            continue
        if current is None and key in _OPTIONAL:
            continue
        if isinstance(current, (list, tuple)) and key != "num_key_value_heads":
            value = [value] * min(2, len(current))
        out[real] = value
    for key in fields:
        current = _get(default, key)
        if key in out or key not in fields:
            continue
        if ("moe" in key and key.endswith("intermediate_size")) or (
            "shared" in key and key.endswith("_size")
        ):
            out[key] = [32] * len(current) if isinstance(current, (list, tuple)) else 32
        elif key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
            out[key] = min(1, current) if isinstance(current, int) else current
        elif key == "n_shared_experts" and current is None:
            out[key] = 1
        elif key == "rope_parameters" and isinstance(current, dict):
            out[key] = _shrunk_rope(
                current, out.get("qk_rope_head_dim") or out.get("head_dim") or 8
            )
        elif key == "pad_token_id":
            out[key] = 0
        elif key.endswith("_token_id") or key.endswith("_token_index"):
            out[key] = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}.get(key)
    layers = out.get(mapped.get("num_hidden_layers", "num_hidden_layers"))
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        current = _get(default, key)
        if key in fields and current and layers:
            kinds = list(dict.fromkeys(current[-layers * 2 :]))[::-1]
            out[key] = [kinds[i % len(kinds)] for i in range(layers)]
    for n, key in enumerate(sorted(k for k in out if k.endswith(("_token_id", "_token_index")))):
        if out[key] is None:
            out[key] = VOCAB - 1 - n
    out.update(overrides)
    return out


def _get(config: PreTrainedConfig | None, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception:  # attributes that differ between layers refuse to be read globally
        return None


def _shrunk_rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary settings whose time, height and width sections fit `head_dim`."""
    rope = dict(rope)
    if "mrope_section" in rope:
        rope["partial_rotary_factor"] = 1.0
        half, parts = head_dim // 2, len(rope["mrope_section"])
        rope["mrope_section"] = [half - (parts - 1) * (half // parts)] + [half // parts] * (
            parts - 1
        )
    return rope


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """A small configuration of architecture `name`, its nested parts included."""
    cls = model_class(name).config_class
    return _nested(cls, _OVERRIDES.get(name, {}) | overrides)


def _nested(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    parts = getattr(cls, "sub_configs", {})
    own = {k: v for k, v in overrides.items() if k not in parts}
    kwargs = _shrunk(cls, own)
    try:
        default = cls()
    except Exception:
        default = None
    for key, part in parts.items():
        part_cls = (
            type(getattr(default, key, None)) if getattr(default, key, None) is not None else part
        )
        if isinstance(part_cls, type) and issubclass(part_cls, PreTrainedConfig):
            kwargs[key] = _nested(part_cls, overrides.get(key, {}))
    return cls(**kwargs)


# What code cannot guess; keep this short.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dots3_note": {
        "num_key_value_heads": 4,
        "head_dim": 24,
        "layer_types": ["indexed_attention"] * 3,
    },
    "ernie4_5_vl_moe": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "gemma4": {"enable_moe_block": True, "moe_intermediate_size": 32},
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 1.0,
            }
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "image_size": 28,
        },
    },
    "glm5_next": {"qk_rope_head_dim": 0, "num_key_value_heads": 4},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 4},
    "nemotron_h": {"n_groups": 2},
    "mistral4": {"qk_nope_head_dim": 8},
    "nllb_moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "step3p7": {"text_config": {"sliding_window": 16}},
    "vitpose_backbone": {"part_features": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def build(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A tiny random model in eval mode whose routers are skewed."""
    torch.manual_seed(seed)
    config = tiny_config(name, **overrides)
    model = model_class(name)(config)
    randomize(model, seed)
    return model.to(dtype).eval()


def randomize(model: nn.Module, seed: int) -> None:
    """Draw all weights anew: routers wide enough for skewed loads, selection biases not zero."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                continue  # norms and biases keep their initial values
            router = re.search(r"\.(gate|router)\.(?!\w*_proj)", name) and p.dim() == 2
            std = (2.0 if router else 1.0) / p.shape[-1] ** 0.5
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float32) * std)
        for name, t in [*model.named_buffers(), *model.named_parameters()]:
            if re.search(r"(e_score_correction_bias|expert_bias|balancing_biases)$", name):
                t.copy_(torch.randn(t.shape, generator=rng) * 0.1)
            elif name.endswith("per_expert_scale"):
                t.copy_(torch.rand(t.shape, generator=rng) + 0.5)
            elif name.endswith("tid2eid"):
                t.copy_(torch.randint(0, NUM_EXPERTS, t.shape, generator=rng))


def inputs_for(model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
    """`inputs`, and those of a decoder or an image model."""
    given = inputs(**kwargs)
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = given["input_ids"]
    elif "input_ids" not in inspect.signature(model.forward).parameters:
        given = {
            "pixel_values": torch.ones(2, 3, *config.image_size),
            "dataset_index": torch.tensor([0, 0]),
        }
    return given


def inputs(
    batch: int = 2, length: int = 24, seed: int = 1, pad: int = 0, side: str = "left"
) -> dict[str, torch.Tensor]:
    """Token ids and attention mask `[batch, length]`; row 0 has `pad` padding tokens on `side`."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB - 12, (batch, length), generator=rng)
    mask = torch.ones_like(ids)
    if pad:
        rows = slice(0, pad) if side == "left" else slice(length - pad, length)
        mask[0, rows] = 0
        ids[0, rows] = 0
    return {"input_ids": ids, "attention_mask": mask}
