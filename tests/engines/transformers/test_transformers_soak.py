"""A short soak: `make soak` runs the long one, and watches memory."""

from __future__ import annotations

import pytest
from soak import soak


@pytest.mark.full
def test_a_model_that_never_rests_follows_policies_that_were_in_force() -> None:
    assert soak(forwards=1000, seed=1)["forwards"] >= 1000
