"""A checkpoint is recognised in every precision, and told apart from a fine-tune of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models
import torch

from paceline import attach
from paceline.stand_ins.identity import same_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def loaded(model: Any, stored: torch.dtype, dtype: torch.dtype) -> list[str]:
    """Fingerprints of a model that was stored in one dtype and loaded in another."""
    with attach(copy.deepcopy(model).to(stored).to(dtype)) as pace:
        return [
            fingerprint
            for layer in pace.identity()
            for fingerprint in (layer.router, *layer.experts.values())
        ]


def small_weights() -> Any:
    """A model whose weights are as small as a checkpoint's: float16 keeps fewer bits of some."""
    model = tiny_models.build("mixtral")
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.02 / weight.abs().mean()
    return model


def changed(model: Any, share: float) -> Any:
    """A copy whose weights all differ by this share of their spread."""
    other, rng = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight += torch.randn(weight.shape, generator=rng) * weight.std() * share
    return other


@pytest.mark.parametrize("stored", DTYPES)
def test_one_checkpoint_in_every_precision(stored: torch.dtype) -> None:
    model = small_weights()
    fine_tune = changed(model, 1e-2)
    for one in DTYPES:
        want = loaded(model, stored, one)
        for other in DTYPES:
            assert all(map(same_weights, want, loaded(model, stored, other)))
            assert not all(map(same_weights, want, loaded(fine_tune, stored, other)))


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.float16, torch.float16, 1e-3),
        (torch.bfloat16, torch.float32, 1e-3),
        (torch.float16, torch.float32, 1e-3),
        (torch.float16, torch.bfloat16, 6e-3),
    ],
)
def test_the_smallest_change_that_is_seen(
    one: torch.dtype, other: torch.dtype, share: float
) -> None:
    model = tiny_models.build("mixtral")
    want = loaded(model, torch.float32, one)
    found = loaded(changed(model, share), torch.float32, other)
    assert not all(map(same_weights, want, found))


def test_fingerprints_of_former_versions() -> None:
    """They have no sketch: equal hashes are all there is."""
    model = small_weights()
    full, half = (loaded(model, torch.bfloat16, d)[1] for d in (torch.float32, torch.float16))
    former = full.split(":")[0]
    assert same_weights(former, full)
    assert not same_weights(former, half)
    assert not same_weights("0:float16:nonsense", full)
    assert not same_weights("0:float8:AAAA", half)
