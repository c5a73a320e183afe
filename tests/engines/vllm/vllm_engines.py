"""Starting engines in this process and comparing what they say."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kernel_rows
import torch
from vllm import LLM, SamplingParams
from vllm_models import VOCABULARY

LENGTHS = (40, 97, 12, 200, 64, 130, 5, 77, 31, 150, 90, 11)

DEVICES, EXPERTS, K = 4, 8, 2
"""Of the tiny models, as the tests cap them."""

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
    from paceline.engines.vllm.cpu_fixes import search_beside_numba

    gc.collect()  # an engine that ends takes what all engines of a process share with it
    search_beside_numba()  # earlier tests route: a stock engine would not start after them
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
    from vllm.model_executor.layers.fused_moe import layer as moe_layer

    assert not hasattr(moe_layer.create_fused_moe_router, "paceline"), "the plugin is in already"
    llm = start(model, **settings)
    said = answers(llm)
    del llm
    gc.collect()
    return said


@contextmanager
def asked(**environ: str) -> Iterator[None]:
    """The plugin told so, as a server's environment would; its patches stay for the process."""
    from paceline.engines.vllm.plugin import register

    names = [name for name in os.environ if name.startswith("PACELINE_")]
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update({f"PACELINE_{name.upper()}": value for name, value in environ.items()})
    try:
        register()
        yield
    finally:
        for name in environ:
            os.environ.pop(f"PACELINE_{name.upper()}", None)
        os.environ.update(before)


class Capped:
    """A running engine with the cap in it, and what it said without."""

    def __init__(self, llm: Any, stock: Any, folder: str = "") -> None:
        self.llm, self.stock, self.folder = llm, stock, folder

    @property
    def model(self) -> Any:
        """The capped layers of its one worker."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.paceline

    def set(self, policy: str | None) -> None:
        """As the server's POST does it."""
        assert self.llm.collective_rpc("paceline_check", args=(policy,)) == [None]
        self.llm.collective_rpc("paceline_set", args=(policy,))

    def reason(self, policy: str) -> str:
        """Why it can't follow a policy."""
        return str(self.llm.collective_rpc("paceline_check", args=(policy,))[0])

    def prefill(self, policy: str | None, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
        """One forward of all prompts under a policy: rows of each expert, layer by layer."""
        self.set(policy)
        before = self.model.describe()
        kernel_rows.CALLS.clear()
        said = answers(self.llm, tokens=1, of=prompts(lengths))
        after = self.model.describe()
        return {
            "said": said,
            "calls": list(kernel_rows.CALLS),
            "dropped": after["dropped"] - before["dropped"],
            "forwards": after["forwards"] - before["forwards"],
            "capped": after["capped_forwards"] - before["capped_forwards"],
        }
