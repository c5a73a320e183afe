"""Load what the user names: a model folder, a hub name, or `demo`; and text files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from paceline.shipped import DEMO, MODEL_FOLDER
from paceline.text import shortened

DType = Literal["auto", "float32", "bfloat16", "float16"]
DEMO_TEXT = "prose"


def load(name: str, dtype: DType = "auto", trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    On CUDA if there is one. "auto" is the model's own dtype there and float32 on the CPU, where
    half precision is slow. Weights come from safetensors only.

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

    wanted = ("auto" if device == "cuda" else "float32") if dtype == "auto" else dtype
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=wanted, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except Exception as error:  # what is raised for a broken folder differs with its fault
        if isinstance(error, MemoryError | KeyboardInterrupt):
            raise
        raise ValueError(f"can't load the model {name}: {_reason(name, error)}") from error
    return model.to(device).eval(), tokenizer


def folder_of(name: str) -> Path:
    """The folder of a model's files, fetched from the Hugging Face hub where it is a hub name.

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


def read_texts(paths: list[str], model: str) -> dict[str, str]:
    """Name -> content of the text files; with the demo model also the names of its texts.

    Raises:
        ValueError: if none is named, or one is missing, empty or not text.
    """
    from paceline.demo.assets import domains, read_text
    from paceline.files import MOST_TEXT, read_plain

    if not paths:
        if model != DEMO:
            raise ValueError("give at least one --text FILE to run through the model")
        paths = [DEMO_TEXT]
    texts = {}
    for path in paths:
        if model == DEMO and path in domains() and not Path(path).exists():
            texts[path] = read_text(path)
            continue
        try:
            texts[path] = read_plain(Path(path), MOST_TEXT, pipes=True).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"--text {path} is not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"--text {path} can't be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"--text {path} can't be read: {error}") from None
        if not texts[path].strip():
            raise ValueError(f"--text {path} is empty")
    return texts


def _check_name(name: str) -> None:
    path = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if not path.exists():
        if looks_local:
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
