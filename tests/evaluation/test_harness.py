"""`paceline-hf` beside the harness's `hf`: the same to the bit, and caps that see tokens only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from paceline.evaluation.harness import PacelineLM
from paceline.facts import Facts
from paceline.lm_eval import KNOWN
from paceline.shipped import MODEL_FOLDER, TASK_FOLDER

TASKS = ["paceline_continuation", "paceline_copy", "paceline_passage"]


def _requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("test", n, 1))
        for n, each in enumerate(arguments)
    ]


PAIRS = [
    ("int rc;", " /* Return code */"),
    ("Die Datei", " konnte nicht"),
    ("Die Datei", " nicht"),
    ("a", " much longer continuation, which is several tokens long, of a short prompt"),
    ("a much longer prompt than the others have, so that they are padded", " a"),
    ("a much longer prompt than the others have, so that they are padded", " b"),
    ("", "no context at all"),
]


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.full), 3])
def test_without_a_policy_all_answers_are_those_of_hf_to_the_bit(batch_size: int) -> None:
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False)
    answers = {}
    for model in ("hf", "paceline-hf"):
        result = simple_evaluate(
            model=model,
            model_args={"pretrained": str(MODEL_FOLDER), "dtype": "float32"},
            tasks=TASKS,
            batch_size=batch_size,
            device="cpu",
            limit=4,
            task_manager=manager,
            bootstrap_iters=0,
        )
        answers[model] = [s["resps"] for task in TASKS for s in result["samples"][task]]
    assert answers["hf"] == answers["paceline-hf"]
    assert len({str(each) for each in answers["hf"]}) > 8  # and they say something


@pytest.mark.parametrize("logits_cache", [True, False])
def test_shared_and_repeated_requests_come_back_in_their_order(
    demo: tuple[Any, Any], logits_cache: bool
) -> None:
    model, tokenizer = demo
    settings = {"tokenizer": tokenizer, "batch_size": 2, "logits_cache": logits_cache}
    requests = _requests("loglikelihood", PAIRS + PAIRS[:3])
    plain = HFLM(pretrained=model, **settings).loglikelihood(requests, disable_tqdm=True)
    lm = PacelineLM(model, devices=8, **settings)
    try:
        assert lm.loglikelihood(requests, disable_tqdm=True) == plain
    finally:
        lm.pace.detach()


def test_padding_of_a_batch_counts_for_nothing(demo: tuple[Any, Any]) -> None:
    """A counter of our own sees as many tokens as the prompts have."""
    model, tokenizer = demo
    lm = PacelineLM(
        model, "capacity_factor=1,min_expert_load=0", devices=8, tokenizer=tokenizer, batch_size=4
    )
    seen: list[int] = []

    def count(layer: str, inputs: Any, _: Any) -> None:
        if layer == lm.pace.layers[0]:
            rows = len(inputs.topk_ids)
            seen.append(rows if inputs.valid is None else int(inputs.valid.sum()))

    undo = lm.pace.watch(count, Facts())
    try:
        lm.loglikelihood(_requests("loglikelihood", PAIRS), disable_tqdm=True)
        rows = {
            tuple(tokenizer.encode(a) + tokenizer.encode(b) if a else [0, *tokenizer.encode(b)])
            for a, b in PAIRS
        }
        tokens = sum(len(row) for row in {row[:-1] for row in rows})
        assert sum(seen) == tokens
        assert lm.pace.stats().layers[0].tokens == tokens
        seen.clear()
        prompts = [(a, {"until": ["\n"], "max_gen_toks": 1}) for a, _ in PAIRS if a]
        lm.generate_until(_requests("generate_until", prompts), disable_tqdm=True)
        assert sum(seen) == sum(len(tokenizer.encode(a)) for a, _ in PAIRS if a)
    finally:
        undo()
        lm.pace.detach()


def test_requests_that_share_a_batch_but_no_budget_are_answered_as_alone(
    demo: tuple[Any, Any],
) -> None:
    model, tokenizer = demo
    policy = "capacity_factor=1,pool=request,min_expert_load=0"
    answers = []
    for batch_size in (1, 4):
        lm = PacelineLM(model, policy, devices=8, tokenizer=tokenizer, batch_size=batch_size)
        found = lm.loglikelihood(_requests("loglikelihood", PAIRS), disable_tqdm=True)
        answers.append(torch.tensor([each[0] for each in found]))
        assert lm.pace.stats().layers[0].dropped > 0
        lm.pace.detach()
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("phase", ["all", "prefill"])
def test_a_cap_in_generation_follows_the_phase(demo: tuple[Any, Any], phase: str) -> None:
    model, tokenizer = demo
    policy = f"capacity_factor=0.5,min_expert_load=0,phase={phase}"
    lm = PacelineLM(model, policy, devices=8, tokenizer=tokenizer, batch_size=4)
    dropped = {"prompt": 0, "decode": 0}

    def count(_: str, inputs: Any, assignment: Any) -> None:
        rows = len(inputs.topk_ids)
        dropped["prompt" if rows > 4 else "decode"] += int(assignment.dropped)

    undo = lm.pace.watch(count, Facts())
    prompts = [(a, {"until": [" the"], "max_gen_toks": 6}) for a, _ in PAIRS[:4]]
    try:
        written = lm.generate_until(_requests("generate_until", prompts), disable_tqdm=True)
    finally:
        undo()
        lm.pace.detach()
    assert all(" the" not in text for text in written)
    assert dropped["prompt"] > 0
    assert (dropped["decode"] > 0) == (phase == "all")


def test_bad_options_are_one_sentence(demo: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = demo
    with pytest.raises(ValueError, match="batch_size must be a number with a cap, got auto"):
        PacelineLM(model, "capacity_factor=1", tokenizer=tokenizer, batch_size="auto", devices=8)
    plan = tmp_path / "plan.toml"
    plan.write_text("version = 1\n[placement]\nnum_devices = 4\n")
    with pytest.raises(ValueError, match="both place the experts"):
        PacelineLM(model, plan=str(plan), devices=8, tokenizer=tokenizer)
    lm = PacelineLM(model, plan=str(plan), tokenizer=tokenizer)
    assert lm.pace.placement is not None
    assert lm.pace.placement.num_devices == 4
    lm.pace.detach()
    filling = "capacity_factor=1,compensate=true"
    lm = PacelineLM(model, policy=filling, calibration="demo", tokenizer=tokenizer)
    assert str(lm.pace.policy) == "capacity_factor=1.0,compensate=true"
    long = [("a prompt", {"until": ["\n"], "max_gen_toks": 512})]
    with pytest.raises(ValueError, match=r"must be below the 512 tokens .* got 512"):
        lm.generate_until(_requests("generate_until", long))
    lm.pace.detach()


@pytest.mark.full
def test_the_harness_own_command_takes_it_with_any_task(tmp_path: Path) -> None:
    """It must be told by a file: nothing of the task itself names Paceline."""
    for name in ("continuation.yaml", "continuation.jsonl", "utils.py"):
        text = (TASK_FOLDER / name).read_text(encoding="utf-8")
        text = text.replace("import paceline.evaluation.harness", "")
        (tmp_path / name).write_text(text, encoding="utf-8")
    options = {
        "model": "paceline-hf",
        "model_args": 'pretrained=demo,devices=8,policy="capacity_factor=1,unit=expert"',
        "tasks": f"{KNOWN},paceline_continuation",
        "include_path": str(tmp_path),
        "limit": "4",
        "batch_size": "4",
        "device": "cpu",
        "output_path": str(tmp_path / "out"),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "lm_eval", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "paceline_continuation" in ran.stdout
    (written,) = (tmp_path / "out").rglob("results*.json")
    assert '"policy": "capacity_factor=1.0,unit=expert"' in written.read_text()
