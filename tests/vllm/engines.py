"""Starting engines in this process and comparing what they say."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tiny_models import VOCABULARY
from vllm import LLM, SamplingParams

LENGTHS = (40, 97, 12, 200, 64, 130, 5, 77, 31, 150, 90, 11)

Answer = list[tuple[tuple[int, ...], tuple[float, ...]]]


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    """Random token ids, the same every time."""
    rng = torch.Generator().manual_seed(0)
    return [
        {"prompt_token_ids": torch.randint(3, VOCABULARY, (n,), generator=rng).tolist()}
        for n in lengths
    ]


def start(model: str, dtype: str = "float32", eager: bool = True, **more: Any) -> LLM:
    """An engine whose batches are the same every time."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "enforce_eager": eager,
        "max_model_len": 512,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 27,
        "disable_log_stats": True,
    }
    return LLM(model, **{**settings, **more})


def answers(llm: LLM, tokens: int = 8, of: list[Any] | None = None) -> Answer:
    """Tokens and their log probabilities, every bit of them."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0)
    out = llm.generate(prompts() if of is None else of, sampling, use_tqdm=False)
    return [
        (
            tuple(o.outputs[0].token_ids),
            tuple(next(iter(step.values())).logprob for step in o.outputs[0].logprobs),
        )
        for o in out
    ]


def stock_answers(model: str, **settings: Any) -> Answer:
    """What vLLM says before the plugin makes any of its routers."""
    llm = start(model, **settings)
    said = answers(llm)
    del llm
    gc.collect()
    return said


@contextmanager
def asked(**environ: str) -> Iterator[None]:
    """The plugin told so, as a server's environment would; its patches stay for the process."""
    from paceline.engines.vllm.plugin import register

    names = ("PACELINE_POLICY", "PACELINE_DEVICES", "PACELINE_PLAN")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update({f"PACELINE_{name.upper()}": value for name, value in environ.items()})
    try:
        register()
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
