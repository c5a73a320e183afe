"""The embedded model in a folder that a serving engine reads."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from pathlib import Path

from paceline.shipped import DEMO, MODEL_FOLDER


def is_demo(model: str) -> bool:
    """Return True if a user's model is the embedded one."""
    return model == DEMO and not Path(DEMO).exists()


def untied_demo(folder: Path) -> str:
    """Write the embedded model to a folder as engines read it, and return the folder's path.

    In the embedded model the output layer shares the weights of the embedding. The OLMoE of vLLM
    and that of SGLang don't support that: their output layer would be all zeros.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(MODEL_FOLDER / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL_FOLDER / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    return str(folder)


def own_folder(prefix: str) -> Path:
    """Make a fresh folder, readable by its owner alone and removed with this process."""
    folder, owner = tempfile.mkdtemp(prefix=prefix), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)
