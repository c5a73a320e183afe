"""Folders that come with the package, under the name `demo`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

DEMO = "demo"
"""Name of the embedded model, and of its calibration, in place of a folder."""

_HERE = Path(str(files("paceline.demo")))
MODEL_FOLDER = _HERE / "model"
TEXT_FOLDER = _HERE / "text"
CALIBRATION_FOLDER = _HERE / "calibration"
TASK_FOLDER = _HERE / "tasks"
"""Small tasks for lm-evaluation-harness; their card is README.md there."""
SWEEP_FILE = _HERE / "sweep.json"
DECODE_FILE = _HERE / "decode.json"
