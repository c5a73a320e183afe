"""Where the real routing traces lie: a part comes with the package, all of it where it is named."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np

import paceline.traces

NAMES = ("esft_v2lite_intent.npz", "esft_v2lite_law.npz", "gpt_oss_20b_decode.npz")
SAMPLE = Path(paceline.traces.__file__).with_name("sample")


def folder() -> Path:
    """The folder that PACELINE_TRACES names, else that of the sample."""
    named = os.environ.get("PACELINE_TRACES")
    return Path(named) if named else SAMPLE


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of one of `NAMES`."""
    with np.load(folder() / name, allow_pickle=False) as stored:
        return dict(stored)
