"""Quantised experts: capped and calibrated where they run, refused loudly where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from model_runs import fingerprint, output
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

from paceline import attach
from paceline.batches import Batch
from paceline.calibration.collect import calibrate
from paceline.evaluation.subject import Subject
from paceline.plan import Plan
from paceline.stand_ins.calibration_file import CalibrationError
from paceline.stand_ins.identity import expert_fingerprints


def quantised(materialised: bool) -> Any:
    """A tiny Mixtral whose experts Transformers made FP8, with random weights or none yet."""
    model = tiny_models.build("mixtral")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    replace_with_fp8_linear(
        model, modules_to_not_convert=linear, quantization_config=FineGrainedFP8Config()
    )
    experts = [module for module in model.modules() if isinstance(module, FP8Experts)]
    assert experts
    for module in experts if materialised else []:
        module.to_empty(device="cpu")
        for weight in module.parameters():
            weight.data = torch.randn(weight.shape).to(weight.dtype)
    return model.eval()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_fp8_experts_that_cannot_run_on_this_device_are_refused(implementation: str) -> None:
    """FP8 kernels need a GPU: on a CPU there is nothing to cap, and nothing is bypassed."""
    model = quantised(materialised=True)
    model.set_experts_implementation(implementation)
    before = fingerprint(model)
    with pytest.raises(
        ValueError, match=r"layer model\.layers\.0\.mlp can't be handled: its experts"
    ):
        attach(model, "capacity_factor=1")
    assert fingerprint(model) == before


def test_fp8_experts_without_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="is on the meta device"):
        attach(quantised(materialised=False))


def test_tensors_that_wrap_others_are_known_by_what_is_inside() -> None:
    experts = nn.Module()
    inside = torch.randn(4, 8), torch.randn(4, 8)
    experts.weight = nn.Parameter(TwoTensor(*inside), requires_grad=False)
    before = expert_fingerprints(experts, 4)
    assert len(set(before)) == 4
    for part in inside:
        part[2, 3] += 1
        after = expert_fingerprints(experts, 4)
        assert [one == two for one, two in zip(before, after, strict=True)] == [
            True,
            True,
            False,
            True,
        ]
        before = after


def test_experts_that_torchao_quantised_are_capped_and_calibrated() -> None:
    """Tensors that wrap others, of which only the experts' own loop can be run on a CPU."""
    ao = pytest.importorskip("torchao.quantization")
    model, untouched = (tiny_models.build("mixtral") for _ in range(2))
    for each in (model, untouched):
        each.set_experts_implementation("eager")
    names = {r"re:.*experts\.(gate_up|down)_proj": ao.Int8WeightOnlyConfig()}
    ao.quantize_(model, ao.FqnToConfig(names), filter_fn=None)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert weight.__tensor_flatten__()[0][0] == "qdata"
    assert weight.qdata.dtype is torch.int8
    batches = [
        Batch(torch.randint(1, tiny_models.VOCAB, (3, 40)), ("a", "b", "c")) for _ in range(4)
    ]
    policy = "capacity_factor=0.5,unit=expert,min_expert_load=0"
    given, compensated = tiny_models.inputs(), f"{policy},compensate=true"
    want = output(model, given)
    found = calibrate(model, None, batches, rank=4)
    assert all(layer.explained > 0 for layer in found.layers)
    assert len(set(found.layers[0].experts)) == 8
    changes = []
    for each in (policy, compensated):
        with attach(model, each, calibration=found) as pace:
            changes.append(float((output(model, given) - want).square().mean()))
            assert pace.stats().layers[0].dropped > 0
    assert changes[1] < changes[0]
    assert torch.equal(output(model, given), want)
    with pytest.raises(CalibrationError, match="of other weights"):
        attach(untouched, compensated, calibration=found)
    subject = Subject.of(model, None, [], Plan(placements=(4,)))
    before = subject.fingerprint()
    weight.qdata[0, 0, 0] += 1
    assert subject.fingerprint() != before
    with pytest.raises(CalibrationError, match="of other weights"):
        attach(model, compensated, calibration=found)
