"""The embedded model and the held-out texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.shipped import CALIBRATION_FOLDER, DECODE_FILE, MODEL_FOLDER, SWEEP_FILE, TEXT_FOLDER

if TYPE_CHECKING:
    from paceline.stand_ins.file import Calibration


def domains() -> list[str]:
    """Names of the held-out texts, sorted.

    Raises:
        FileNotFoundError: if this installation carries no texts.
    """
    names = sorted(path.stem for path in TEXT_FOLDER.glob("*.txt"))
    if not names:
        raise FileNotFoundError("the demo texts are missing from this installation of paceline")
    return names


def read_text(domain: str) -> str:
    """The held-out text of a domain."""
    return (TEXT_FOLDER / f"{domain}.txt").read_text(encoding="utf-8")


def shipped_sweep() -> dict[str, Any] | None:
    """What caps of every size cost the embedded model, measured before; None where it is missing.

    Made by `python benchmarks/quality.py sweep`: stand-ins are calibrated on the first half of each
    text, figures are of the second.
    """
    from paceline.evaluation.sweep_file import read_sweep

    return read_sweep(SWEEP_FILE) if SWEEP_FILE.is_file() else None


def shipped_decode() -> dict[str, Any] | None:
    """What reading fewer experts costs the embedded model in decode; None where it is missing.

    Made by `benchmarks/active_experts.py --ship`.
    """
    if not DECODE_FILE.is_file():
        return None
    result: dict[str, Any] = json.loads(DECODE_FILE.read_text(encoding="utf-8"))
    return result


def load_model() -> tuple[Any, Any]:
    """The embedded model in float32 on the CPU, in evaluation mode, and its tokenizer.

    Raises:
        FileNotFoundError: if this installation carries no model.
    """
    if not (MODEL_FOLDER / "config.json").is_file():
        raise FileNotFoundError("the demo model is missing from this installation of paceline")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL_FOLDER, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    return model.eval(), tokenizer


def load_calibration() -> Calibration:
    """The calibration of the embedded model, fitted on text that it was trained on.

    Raises:
        CalibrationError: if this installation carries none.
    """
    from paceline.stand_ins.file import Calibration

    return Calibration.load(CALIBRATION_FOLDER)
