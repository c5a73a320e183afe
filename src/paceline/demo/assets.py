"""The embedded model, its held-out texts, and figures measured on it before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.evaluation.results import Form
from paceline.evaluation.sweep_results import Sweep, read_sweep
from paceline.shipped import CALIBRATION_FOLDER, DECODE_FILE, MODEL_FOLDER, SWEEP_FILE, TEXT_FOLDER

if TYPE_CHECKING:
    from paceline.batches import Sequences
    from paceline.stand_ins.calibration_file import Calibration


class DecodePoint(Form):
    """Cost of one max_active on one batch size; `read` is experts read by the busiest device."""

    batch: int
    max_active: int
    stand_ins: bool
    placed: bool
    read_before: float
    read: float
    change: float
    standard_error: float


class DecodeCosts(Form):
    """Cost of reading fewer experts in decode, as decode.json has it."""

    model: str
    devices: int
    rank: int
    prompt: int
    decoded: int
    sequences_a_text: int
    texts: int
    experts_a_device: int
    points: list[DecodePoint]


def domains() -> list[str]:
    """Return the names of the held-out texts, sorted.

    Raises:
        FileNotFoundError: if this installation carries no texts.
    """
    names = sorted(path.stem for path in TEXT_FOLDER.glob("*.txt"))
    if not names:
        raise FileNotFoundError("the demo texts are missing from this installation of paceline")
    return names


def read_text(domain: str) -> str:
    """Read the held-out text of a domain."""
    return (TEXT_FOLDER / f"{domain}.txt").read_text(encoding="utf-8")


def held_out(
    tokenizer: Any, length: int, limit: int, max_domains: int | None = None
) -> list[Sequences]:
    """Cut each held-out text into at most `limit` sequences of `length` tokens."""
    from paceline.batches import cut

    ids = {
        domain: tokenizer(read_text(domain), add_special_tokens=False, verbose=False)["input_ids"]
        for domain in domains()[:max_domains]
    }
    return [cut(domain, tokens, length, limit) for domain, tokens in ids.items()]


def shipped_sweep() -> Sweep | None:
    """Read the cost of caps of every size on the embedded model; None where it is missing.

    Made by `python benchmarks/quality.py sweep`: stand-ins are calibrated on the first half of each
    text, figures are of the second.
    """
    return read_sweep(SWEEP_FILE) if SWEEP_FILE.is_file() else None


def shipped_decode() -> DecodeCosts | None:
    """Read the cost of reading fewer experts in decode; None where it is missing.

    Made by `benchmarks/active_experts.py --ship`.
    """
    if not DECODE_FILE.is_file():
        return None
    return DecodeCosts.model_validate_json(DECODE_FILE.read_text(encoding="utf-8"))


def load_model() -> tuple[Any, Any]:
    """Load the embedded model in float32 on the CPU, in evaluation mode, and its tokenizer.

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
    """Load the calibration of the embedded model, fitted on text that it was trained on.

    Raises:
        CalibrationError: if this installation carries none.
    """
    from paceline.stand_ins.calibration_file import Calibration

    return Calibration.load(CALIBRATION_FOLDER)
