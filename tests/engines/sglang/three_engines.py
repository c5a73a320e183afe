"""Rows that each expert gets of one prefill, by Transformers or vLLM.

    python three_engines.py transformers|vllm MODEL POLICY DEVICES OUT < prompts.json

Writes [layers][experts] rows after the policy; one forward for all prompts, of equal length.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def with_transformers(model: str, policy: str, devices: int, prompts: list[list[int]]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from paceline import attach

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with attach(loaded, policy, placement=devices) as pace, torch.no_grad():
        loaded(input_ids=torch.tensor(prompts), use_cache=False)
        return [layer.expert_loads_after for layer in pace.stats().layers]


def with_vllm(model: str, policy: str, devices: int, prompts: list[list[int]]) -> Any:
    os.environ |= {
        "PACELINE_POLICY": policy, "PACELINE_DEVICES": str(devices),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    from paceline.engines.vllm.plugin import register

    register()
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=512, disable_log_stats=True,
        max_num_batched_tokens=2048, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 27,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    worker: Any = llm.llm_engine.model_executor
    return [layer.expert_loads_after for layer in worker.driver_worker.worker.paceline.stats()]


if __name__ == "__main__":
    engine, model, policy, devices = sys.argv[1:5]
    run = {"transformers": with_transformers, "vllm": with_vllm}[engine]
    rows = run(model, policy, int(devices), json.load(sys.stdin))
    Path(sys.argv[5]).write_text(json.dumps([list(map(int, layer)) for layer in rows]))
