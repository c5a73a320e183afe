"""Tensor and expert parallelism in two processes of vLLM's, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served_models import make
from vllm.envs import disable_envs_cache
from vllm_engines import LENGTHS, UNBOUND, K, answers, environment, start


def _prefill(llm: Any, policy: str | None) -> dict[str, Any]:
    """Run one forward of all prompts; return answers, drops and rows by worker."""
    assert set(llm.collective_rpc("paceline_check", args=(policy,))) == {None}
    llm.collective_rpc("paceline_set", args=(policy,))
    before = [w["dropped"] for w in llm.collective_rpc("paceline_describe")]
    llm.collective_rpc("forget_rows")
    found = answers(llm, tokens=1)
    after = [w["dropped"] for w in llm.collective_rpc("paceline_describe")]
    return {
        "answers": found,
        "dropped": [b - a for a, b in zip(before, after, strict=True)],
        "rows": llm.collective_rpc("counted_rows"),
    }


@pytest.mark.long
def test_two_ranks_decide_and_answer_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("olmoe", tmp_path)
    policies = (None, UNBOUND, "capacity_factor=0.8,min_expert_load=0")
    extension = {"worker_extension_cls": "kernel_rows.RowCounter"}
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    with environment(policy=UNBOUND, devices="2"):
        one = start(folder, **extension)
        alone = [_prefill(one, policy) for policy in policies]
    disable_envs_cache()  # vLLM's own, of this process
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with environment(policy=UNBOUND):
        two = start(folder, tensor_parallel_size=2, enable_expert_parallel=True, **extension)
        both = [_prefill(two, policy) for policy in policies]
        assert "data and expert parallelism" in str(two.collective_rpc(
            "paceline_check", args=("capacity_factor=1,pool=source",))[0])  # fmt: skip
        assert "same tokens" in str(two.collective_rpc(
            "paceline_check", args=("capacity_factor=1,expand=all",))[0])  # fmt: skip
        two.llm_engine.model_executor.shutdown()
    for want, got in zip(alone, both, strict=True):
        assert [tokens for tokens, _ in got["answers"]] == [tokens for tokens, _ in want["answers"]]
        for (_, a), (_, b) in zip(want["answers"], got["answers"], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
        # both ranks see all tokens and decide alike; each computes its own experts' rows
        assert got["dropped"] == [want["dropped"][0]] * 2
        assert sum(got["rows"]) == want["rows"][0]
    assert alone[0]["rows"] == [2 * sum(LENGTHS) * K]
    assert alone[2]["dropped"][0] > 0
