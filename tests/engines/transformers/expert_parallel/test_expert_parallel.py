"""Expert parallelism on two gloo ranks: outputs, loads, what is sent, and how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers.distributed.expert_parallel")
torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch.distributed has no gloo here", allow_module_level=True)

import tiny_models  # noqa: E402
from ranks import CHECKS, ENVIRONMENT, assert_passed, run_ranks  # noqa: E402

pytestmark = pytest.mark.xdist_group("ranks")  # one process starts the ranks, for all tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name in ("mixtral", "olmoe", "gpt_oss", "deepseek_v3"):
        tiny_models.build(name).save_pretrained(path / name)
    return path


TOGETHER = (
    "shared",
    "shared_placed",
    "own",
    "own_placed",
    "architectures",
    "untouched",
    "generate",
    "idle_rank",
    "per_layer",
    "requests",
    "active",
    "ended",
    "sent",
    "shared_sends_nothing",
    "compensated",
    "ranked_by_what_is_left",
    "disagreements",
)
"""Checks that one start of the ranks runs in a row: starting costs more than most of them."""


@pytest.fixture(scope="module")
def together(folder: Path) -> str:
    """Output of both ranks under torchrun."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, CHECKS, str(folder), *TOGETHER],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        env=ENVIRONMENT,
    )
    return done.stdout


@pytest.mark.parametrize("check", TOGETHER)
def test_two_ranks(together: str, check: str) -> None:
    for rank in range(2):
        assert f"rank {rank} passed {check} in" in together, together[-6000:]


def test_a_rank_that_is_silent_or_dies_ends_the_others_with_a_sentence(folder: Path) -> None:
    left, killed = run_ranks("silent_rank", "lost_in_layer", folder=folder)
    assert "rank 0 passed silent_rank in" in left.output, left.output[-4000:]
    assert killed.code == -9
    assert left.code == 1
    sentence = "rank 0 of 2 gives up in the all-to-all of model.layers.1.mlp: another rank is gone"
    assert sentence in left.output, left.output[-4000:]


@pytest.mark.full
def test_a_silent_rank_is_given_up_in_bounded_time_under_fsdp(folder: Path) -> None:
    check = "silent_rank_under_fsdp"
    assert_passed(run_ranks(check, folder=folder, only=0, PACELINE_EP_TIMEOUT="5"))
