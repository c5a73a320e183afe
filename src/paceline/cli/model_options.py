"""What verbs that run a model on text have in common: options, and what each of them means."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class DTypeName(str, Enum):
    """Choices of --dtype."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


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
DType = Annotated[DTypeName, typer.Option(help="auto: float32 on a CPU, the model's own on CUDA.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
