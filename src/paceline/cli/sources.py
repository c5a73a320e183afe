"""Load what the user names: models, texts, prompts, traces, and plans from options."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.files import MOST_TEXT, read_plain
from paceline.shipped import DEMO, MODEL_FOLDER
from paceline.text import shortened

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.traces import Trace

DType = Literal["auto", "float32", "bfloat16", "float16"]
DEMO_TEXT = "prose"
DEVICES = 8
"""Default number of devices."""
_FILE_SUFFIXES = {
    ".csv", ".gguf", ".json", ".jsonl", ".npy", ".npz", ".pt", ".safetensors", ".toml", ".txt",
}  # fmt: skip


# -- models ----------------------------------------------------------------------------------------


def load(name: str, dtype: DType = "auto", trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a causal language model in evaluation mode, and its tokenizer.

    The model goes on CUDA where there is one. "auto" is the model's own dtype there and float32 on
    a CPU, where half precision is slow. Weights come from safetensors only.

    Raises:
        ValueError: if there is no such model, or it can't be loaded.
    """
    import torch

    quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == DEMO:
        from paceline.demo.assets import load_model

        model, tokenizer = load_model()
        return (model if dtype == "auto" else model.to(getattr(torch, dtype))), tokenizer
    _check_name(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chosen = ("auto" if device == "cuda" else "float32") if dtype == "auto" else dtype
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=chosen, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except Exception as error:  # what is raised for a broken folder differs with its fault
        if isinstance(error, MemoryError | KeyboardInterrupt):
            raise
        raise ValueError(f"can't load the model {name}: {_reason(name, error)}") from error
    return model.to(device).eval(), tokenizer


def folder_of(name: str) -> Path:
    """Return the folder of a model's files, fetched from the Hugging Face hub for a hub name.

    Raises:
        ValueError: if there is no such model.
    """
    if name == DEMO:
        return MODEL_FOLDER
    _check_name(name)
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.gguf", "*/*"]))
    except Exception as error:  # what is raised differs with what the hub answers
        raise ValueError(f"can't load the model {name}: {_reason(name, error)}") from error


def quiet() -> None:
    """Keep the loading bars and warnings of Transformers out of the output."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def like_hub_name(name: str) -> bool:
    """Check if a name that is no path here may be a model's on the Hugging Face hub.

    >>> like_hub_name("openai/gpt-oss-20b"), like_hub_name("./gpt-oss"), like_hub_name("monday.npz")
    (True, False, False)
    """
    alike = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    return alike is not None and Path(name).suffix.lower() not in _FILE_SUFFIXES


def _check_name(name: str) -> None:
    path = Path(name)
    if not path.exists():
        if not like_hub_name(name):
            raise ValueError(f"there is no model folder {name}")
        return
    if not path.is_dir():
        raise ValueError(f"{name} is a file: a model is a folder with config.json and safetensors")
    try:
        inside = os.listdir(path)
    except OSError as error:
        raise ValueError(f"the model folder {name} can't be read: {error.strerror}") from None
    if "config.json" not in inside:
        raise ValueError(f"the folder {name} holds no model: config.json is missing")
    for file in map(path.joinpath, inside):
        if file.exists() and not (file.is_file() or file.is_dir()):  # whoever opens it may wait
            raise ValueError(f"the model folder {name} holds {file.name}, which is no plain file")


def _reason(name: str, error: Exception) -> str:
    if not Path(name).exists():
        return (
            "it is not a folder here, and the Hugging Face hub has no such model or can't be "
            "reached (offline mode, no network, or a model that needs a login)"
        )
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs code of its own, which runs only with --trust-remote-code"
    return shortened(text, 300)


# -- texts -----------------------------------------------------------------------------------------


def read_texts(paths: list[str], model: str) -> dict[str, str]:
    """Read text files by name; the demo model's own texts go by their names.

    Raises:
        ValueError: if none is named, or one is missing, empty or not text.
    """
    from paceline.demo.assets import domains, read_text

    if not paths:
        if model != DEMO:
            raise ValueError("give at least one --text FILE to run through the model")
        paths = [DEMO_TEXT]
    texts = {}
    for path in paths:
        if model == DEMO and path in domains() and not Path(path).exists():
            texts[path] = read_text(path)
            continue
        texts[path] = _read_utf8("--text", Path(path))
        if not texts[path].strip():
            raise ValueError(f"--text {path} is empty")
    return texts


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file: lines, or JSON lines with a "prompt" or "text".

    Raises:
        ValueError: if the file can't be read, or holds none.
    """
    lines = _read_utf8("--prompts", path).splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if line.lstrip().startswith("{") else line
        except (ValueError, RecursionError):
            row = line  # a prompt may begin with a brace
        if isinstance(row, dict):
            row = row.get("prompt", row.get("text"))
        if not isinstance(row, str) or not row:
            raise ValueError(f'--prompts {path}, line {number}: it has no "prompt" or "text".')
        found.append(row)
    if not found:
        raise ValueError(f"--prompts {path} is empty.")
    return found


def _read_utf8(option: str, path: Path) -> str:
    try:
        return read_plain(path, MOST_TEXT, pipes=True).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path} is not UTF-8 text.") from None
    except OSError as error:
        raise ValueError(f"{option} {path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{option} {path} can't be read: {error}.") from None


# -- traces ----------------------------------------------------------------------------------------


def read_trace(
    name: str,
    *,
    experts: int | None = None,
    k: int | None = None,
    layers: int | None = None,
    model_config: Path | None = None,
    world_size: int | None = None,
    physical: bool = False,
) -> Trace:
    """Read the trace that a user names.

    Raises:
        ValueError: if there is no such trace, or its file needs one of the options.
    """
    from paceline.traces import ImportOptions, open_trace

    options = ImportOptions(experts, k, layers, world_size, physical)
    return open_trace(name, options if model_config is None else options.with_config(model_config))


# -- plans -----------------------------------------------------------------------------------------


def plan_from_options(devices: int | None, placement: Path | None, plan: Path | None) -> Plan:
    """Return one plan from --devices, --placement and --plan.

    Raises:
        ValueError: if two options contradict each other, or a file can't be read.
    """
    from paceline.plan import Plan

    if placement is not None and (devices is not None or plan is not None):
        other = "--devices" if devices is not None else "--plan"
        raise ValueError(f"--placement and {other} both place the experts: give one of them.")
    if placement is not None:
        return placements_of(placement)
    found = Plan() if plan is None else Plan.load(plan)
    if devices is None:
        return found
    if found.placements:
        raise ValueError(f"--devices and {plan} both place the experts: give one of them.")
    if devices < 1:
        raise ValueError(f"--devices must be at least 1, got {devices}.")
    return found.replace(placements=(devices,))


def placements_of(path: Path) -> Plan:
    """Load a plan file and keep its placements alone.

    Raises:
        ValueError: if it can't be read, or holds no placement.
    """
    from paceline.plan import Plan, PlanError

    found = Plan.load(path)
    if not found.placements:
        raise PlanError(f"{path} must hold placement or placements, got neither.")
    return found.replace(policies=())


def with_devices(plan: Plan, devices: int = DEVICES) -> Plan:
    """Return a plan that places experts: on devices in order, unless it does so already."""
    return plan if plan.placements else plan.replace(placements=(devices,))


def plan_files(placement: Path | None, plan: Path | None) -> dict[str, str | None]:
    """Return the files that a plan came from, for results."""
    return {
        "placement_file": None if placement is None else str(placement),
        "plan_file": None if plan is None else str(plan),
    }
