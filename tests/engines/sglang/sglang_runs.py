"""Runs of SGLang's engine in a process of its own, with what the experts computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from served_models import VOCABULARY

HERE = Path(__file__).parent
DEVICES, EXPERTS, K = 4, 8, 2


@dataclass
class Run:
    """Tokens and their log probabilities, of every batch and prompt; forwards of every rank."""

    tokens: list[list[list[int]]]
    values: list[list[list[float]]]
    forwards: list[list[dict[str, Any]]]
    log: str
    status: int

    def prefills(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the forwards that computed prompts."""
        return [each for each in self.forwards[rank] if each["mode"] == "EXTEND"]


def prompts(*lengths: int) -> list[list[int]]:
    """Return random token ids of these lengths, each length always the same."""
    made = []
    for length in lengths:
        rng = torch.Generator().manual_seed(length)
        made.append(torch.randint(3, VOCABULARY, (length,), generator=rng).tolist())
    return made


def run(
    model: Path,
    batches: list[list[list[int]]],
    folder: Path,
    environment: dict[str, str] | None = None,
    new_tokens: int = 4,
    **settings: Any,
) -> Run:
    """Start an engine, give it batches one after the other, and stop it.

    Args:
        folder: fresh, for files.
        environment: without PACELINE_.
        settings: of SGLang.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {f"PACELINE_{name.upper()}": value for name, value in (environment or {}).items()}
    path = os.pathsep.join([str(HERE / "stubs"), *filter(None, [os.environ.get("PYTHONPATH")])])
    counts = {"PACELINE_TEST_COUNTS": str(folder / "counts")}
    asked = {
        "model": str(model),
        "settings": {"dtype": "float32", "disable_radix_cache": True, **settings},
        "batches": batches,
        "new_tokens": new_tokens,
        "out": str(folder / "tokens.json"),
    }
    ran = subprocess.run(
        [sys.executable, str(HERE / "run_engine.py")],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **counts, **own},
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    tokens = folder / "tokens.json"
    files = sorted(folder.glob("counts-*"))
    return Run(
        *(json.loads(tokens.read_text()) if tokens.exists() else ([], [])),
        [[json.loads(line) for line in file.read_text().splitlines()] for file in files],
        ran.stdout + ran.stderr,
        ran.returncode,
    )


def by_device(rows: list[int]) -> np.ndarray:
    """Return [devices] rows of a layer, for experts in order."""
    return np.array(rows).reshape(DEVICES, -1).sum(1)
