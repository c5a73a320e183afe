"""Random models of several families, small enough to be served within seconds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.shipped import MODEL_FOLDER

VOCABULARY = 2048

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 512,  # the only latent size that vLLM's CPU attention was built for
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 8, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "qwen3_moe": {**_QWEN, "norm_topk_prob": True, "head_dim": 32},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v3": {
        **_DEEPSEEK,
        "topk_method": "noaux_tc",
        "q_lora_rank": 32,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
"""Family -> its own part of the configuration; all have 8 experts, 2 per token."""

DENSE: dict[str, Any] = {"head_dim": 32}


def dtype_of(family: str) -> str:
    """Return the type to run a family in: DeepSeek's attention has no float32 on CPUs."""
    return "bfloat16" if family.startswith("deepseek") else "float32"


def make(family: str, folder: Path, **changes: Any) -> str:
    """Write a model of a family ("qwen3": a dense one), changed, to `folder`; return its path."""
    torch.manual_seed(0)
    own = FAMILIES.get(family, DENSE)
    config = AutoConfig.for_model(family, **{**_COMMON, **own, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name:
                parameter.normal_(0, 0.3)  # uneven loads
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    return str(folder)
