"""Stand-ins inside vLLM and in the Transformers engine give the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_calibration import made_up
from served_models import make
from transformers import AutoModelForCausalLM
from vllm_engines import DEVICES, UNBOUND, Capped, answers, environment, prompts, start

from paceline import CapacityPolicy, ExpertPlacement, attach

LOW = "capacity_factor=0.5,min_expert_load=0"
COMPENSATED = f"{LOW},compensate=true"
RANKED = f"{COMPENSATED},keep=contribution"


def _transformers(folder: str, calibration: Any, policy: str) -> list[tuple[int, float]]:
    """Return the likeliest next token of each prompt and its log probability, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with (
        torch.no_grad(),
        attach(
            model,
            CapacityPolicy.parse(policy),
            ExpertPlacement.contiguous(8, DEVICES),
            calibration=calibration,
        ),
    ):
        for prompt in prompts():
            ids = torch.tensor([prompt["prompt_token_ids"]])
            best = model(ids).logits[0, -1].log_softmax(-1).max(-1)
            found.append((int(best.indices), float(best.values)))
    return found


def _vllm(capped: Capped, policy: str) -> list[tuple[int, float]]:
    capped.set(policy)
    found = [answers(capped.llm, tokens=1, of=[prompt])[0] for prompt in prompts()]
    return [(tokens[0], values[0]) for tokens, values in found]


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.long)])
def test_answers_are_those_of_transformers(tmp_path: Path, eager: bool) -> None:
    folder = make("olmoe", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    calibration = made_up(model)
    calibration.save(tmp_path / "calibration")
    with environment(
        policy=COMPENSATED, devices=str(DEVICES), calibration=str(tmp_path / "calibration")
    ):
        capped = Capped(start(folder, eager=eager))
    found = {policy: _vllm(capped, policy) for policy in (COMPENSATED, LOW, RANKED)}
    for policy, have in found.items():
        for (token, value), (theirs, want) in zip(
            have, _transformers(folder, calibration, policy), strict=True
        ):
            assert token == theirs
            assert value == pytest.approx(want, abs=1e-4)
    assert found[COMPENSATED] != found[LOW]
    assert found[COMPENSATED] != found[RANKED]
    # with nothing dropped not a bit changes
    unbound = _vllm(capped, f"{UNBOUND},compensate=true")
    assert unbound == _vllm(capped, UNBOUND)
    dropped = capped.prefill(COMPENSATED)["dropped"]
    assert dropped == capped.prefill(LOW)["dropped"] > 0 or not eager


def test_a_calibration_of_other_weights_is_refused(tmp_path: Path) -> None:
    folder = make("olmoe", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3] *= 1.5
    made_up(model).save(tmp_path / "calibration")
    with (
        environment(policy=COMPENSATED, calibration=str(tmp_path / "calibration")),
        pytest.raises(Exception, match=r"other weights: those of the experts of layer .*1"),
    ):
        start(folder)
