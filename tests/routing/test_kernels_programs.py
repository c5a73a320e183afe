"""The measuring programs run, on tiny shapes, and the CUDA kernels compile to machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.full
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="no triton")


def program(*arguments: str | Path) -> str:
    """Run it from the root of the repository; its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_router_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    shapes = ["--shapes", "64,8,2", "--rounds", "2", "--no-peers"]
    assert "paceline/plain expert" in program("benchmarks/router.py", *shapes, "--json", file)
    (shape,) = json.loads(file.read_text())["shapes"]
    assert shape["shape"] == [64, 8, 2]
    assert all(shape["same_set"].values())
    row = shape["ratios"]["paceline/plain device"]
    assert 0 < row["min"] <= row["median"] <= row["max"]


@needs_triton
def test_the_gpu_program_runs_dry(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    program("benchmarks/gpu_check.py", "--dry-run", "--json", file)
    parts = json.loads(file.read_text())
    assert parts["router"][0]["cuda device"]["whole"] > 0
    assert parts["plugin"][0]["dropped in all checks"] > 0
    layer = parts["layers"][0]
    assert len(layer["factor 1.0"]["emulated ranks"]["rows"]) == 8
    assert max(layer["factor 1.0"]["emulated ranks"]["rows"]) <= 64 * 2 / 8


@needs_triton
def test_the_cuda_kernels_compile() -> None:
    assert "all kernels compile" in program("tests/routing/compile_kernels.py")
