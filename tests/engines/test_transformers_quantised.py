"""Experts that Transformers made FP8: refused loudly where they cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from helpers import fingerprint
from torch import nn
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

from paceline import attach


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
    with pytest.raises(ValueError, match="weights are on the meta device"):
        attach(quantised(materialised=False))
