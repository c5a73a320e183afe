"""What verbs that run a model on text have in common: options, and what each of them means."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from paceline.shipped import CALIBRATION_FOLDER, DEMO


class DTypeName(str, Enum):
    """Choices of --dtype."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ContentName(str, Enum):
    """Choices of what a trace of a model holds."""

    counts = "counts"
    choices = "choices"
    scores = "scores"


def calibration_folder(name: str) -> Path:
    """The folder of a calibration; `demo` is the one that comes with the demo model."""
    return CALIBRATION_FOLDER if name == DEMO else Path(name)


ModelName = Annotated[str, typer.Argument(help="Model folder, hub name, or: demo.")]
Text = Annotated[
    list[str] | None,
    typer.Option(help="Text file, UTF-8; may be repeated. With demo also the name of a text."),
]
Tokens = Annotated[int, typer.Option(help="Of texts: at most so many tokens in all.")]
BatchSize = Annotated[int, typer.Option(help="Sequences a batch.")]
SequenceLength = Annotated[int, typer.Option(help="Of texts: tokens a sequence.")]
Mix = Annotated[
    bool, typer.Option("--mix", help="Mix the texts in every batch, not one text a batch.")
]
CalibrationFolder = Annotated[
    Path | None,
    typer.Option(
        parser=calibration_folder,
        metavar="FOLDER",
        help="Made by paceline calibrate, or: demo. For policies with compensate=true.",
    ),
]
Content = Annotated[
    ContentName,
    typer.Option(help="counts reveal little; choices and scores, token by token, reveal text."),
]
DType = Annotated[DTypeName, typer.Option(help="auto: float32 on a CPU, the model's own on CUDA.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
