"""What verbs that read a trace have in common: options for what its file doesn't tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.traces import Trace

TraceName = Annotated[
    str, typer.Argument(help="Trace: a file or folder of any known format, or sample:NAME.")
]
NewTrace = Annotated[Path, typer.Option(help="Folder for the trace, to be made.")]
Devices = Annotated[int, typer.Option(help="Devices that share the experts.")]
BatchTokens = Annotated[
    int | None,
    typer.Option(help="Cut the trace's tokens into batches of so many. Default: as it has them."),
]
Experts = Annotated[
    int | None, typer.Option(help="Experts a layer, where a trace's file doesn't tell.")
]
K = Annotated[int | None, typer.Option(help="Experts a token, where the file doesn't tell.")]
Layers = Annotated[
    int | None, typer.Option(help="Hidden layers of the model, where the file doesn't tell.")
]
ModelConfig = Annotated[
    Path | None, typer.Option(help="The model's config.json (or its folder), which tells all that.")
]
WorldSize = Annotated[
    int | None, typer.Option(help="How often the file counts every assignment; divides counts.")
]
Physical = Annotated[
    bool, typer.Option("--physical", help="Keep an engine's physical slots as experts.")
]


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
    """The trace that a user names.

    Raises:
        ValueError: if it is none, or something about it must be said.
    """
    from paceline.traces import Asked, open_trace

    asked = Asked(experts, k, layers, world_size, physical)
    return open_trace(name, asked if model_config is None else asked.with_config(model_config))


def refuse_for_a_model(**given: Any) -> None:
    """Refuse options that mean something for a trace alone.

    Raises:
        ValueError: naming the first that isn't None.
    """
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a trace, not for a model")


def batches_said(result: Mapping[str, Any]) -> str:
    """How many batches a result is over, and what a batch is."""
    count, unit = result["batches"], result["batches_are"]
    many = "batch" if count == 1 else "batches"
    if result["batch_tokens"] is not None:
        return f"{count:,} {many} of {result['batch_tokens']:,} tokens"
    return f"{count:,} {many} ({unit}{'' if count == 1 else 's'})"
