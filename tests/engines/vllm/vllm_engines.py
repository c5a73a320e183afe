"""Engines in this process, and what they answer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kernel_rows
import torch
from served_models import VOCABULARY
from vllm import LLM, SamplingParams

LENGTHS = (40, 97, 12, 200, 64, 130, 5, 77, 31, 150, 90, 11)

DEVICES, EXPERTS, K = 4, 8, 2
"""Of the tiny models, as the tests cap them."""
HOSTED = EXPERTS // DEVICES
UNBOUND = "capacity_factor=1000"

Answer = list[tuple[tuple[int, ...], tuple[float, ...]]]


def prompt(length: int, seed: int = 0) -> dict[str, Any]:
    """Return random token ids, the same for the same seed."""
    rng = torch.Generator().manual_seed(seed)
    return {"prompt_token_ids": torch.randint(3, VOCABULARY, (length,), generator=rng).tolist()}


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    """Return prompts of these lengths."""
    return [prompt(length, seed) for seed, length in enumerate(lengths)]


def start(model: str, dtype: str = "float32", eager: bool = True, **more: Any) -> LLM:
    """Start an engine whose batches are the same every time."""
    from paceline.engines.vllm.patches import search_beside_numba

    gc.collect()  # an engine that ends takes what all engines of a process share with it
    search_beside_numba()  # earlier tests route: a stock engine would not start after them
    settings: dict[str, Any] = {
        "dtype": dtype,
        "enforce_eager": eager,
        "max_model_len": 512,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": (1 << 27) if eager else None,
        "disable_log_stats": True,
    }
    return LLM(model, **{**settings, **more})


def answers(llm: LLM, tokens: int = 8, of: list[Any] | None = None) -> Answer:
    """Return tokens and their log probabilities, every bit of them."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0)
    out = llm.generate(prompts() if of is None else of, sampling, use_tqdm=False)
    return [
        (
            tuple(o.outputs[0].token_ids),
            tuple(next(iter(step.values())).logprob for step in o.outputs[0].logprobs),
        )
        for o in out
    ]


def stock_answers(model: str) -> Answer:
    """Return the answers of vLLM before the plugin makes any of its routers."""
    from vllm.model_executor.layers.fused_moe import layer as moe_layer

    assert not hasattr(moe_layer.create_fused_moe_router, "paceline"), "the plugin is in already"
    llm = start(model)
    stock = answers(llm)
    del llm
    gc.collect()
    return stock


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Register the plugin with these PACELINE_ variables; its patches stay for the process."""
    from paceline.engines.vllm.plugin import register

    names = [name for name in os.environ if name.startswith("PACELINE_")]
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update({f"PACELINE_{name.upper()}": value for name, value in variables.items()})
    try:
        register()
        yield
    finally:
        for name in variables:
            os.environ.pop(f"PACELINE_{name.upper()}", None)
        os.environ.update(before)


class Capped:
    """A running engine with the cap in it, and its answers without."""

    def __init__(self, llm: Any, stock: Any = None, folder: str = "") -> None:
        self.llm, self.stock, self.folder = llm, stock, folder

    @property
    def model(self) -> Any:
        """The capped layers of its one worker."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.paceline

    def set(self, policy: str | None) -> None:
        """Put a policy in force as the server's POST does it."""
        assert self.llm.collective_rpc("paceline_check", args=(policy,)) == [None]
        self.llm.collective_rpc("paceline_set", args=(policy,))

    def dropped(self) -> int:
        """Return the number of assignments dropped so far."""
        return int(self.model.describe()["dropped"])

    def prefill(self, policy: str | None, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
        """Run one forward of all prompts under a policy, and count rows of each expert by layer."""
        self.set(policy)
        before = self.model.describe()
        kernel_rows.CALLS.clear()
        found = answers(self.llm, tokens=1, of=prompts(lengths))
        after = self.model.describe()
        return {
            "answers": found,
            "calls": list(kernel_rows.CALLS),
            "dropped": after["dropped"] - before["dropped"],
            "forwards": after["forwards"] - before["forwards"],
            "capped": after["capped_forwards"] - before["capped_forwards"],
        }


def capped_engine(folder: str, stock: Any = None, **settings: Any) -> Capped:
    """Start an engine with a cap that can't bind."""
    with environment(policy=UNBOUND, devices=str(DEVICES)):
        return Capped(start(folder, **settings), stock, folder)


def rows_by_device(rows: list[int]) -> list[int]:
    """Return the rows of each device."""
    return [sum(rows[d * HOSTED : (d + 1) * HOSTED]) for d in range(DEVICES)]
