"""Options of the verbs: an option that means the same in several verbs is defined here, once."""

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
    """Choices of --content: how much a trace holds."""

    counts = "counts"
    choices = "choices"
    scores = "scores"


def _not_empty(policies: list[str] | None) -> list[str] | None:
    """Refuse an empty policy, which would cap nothing."""
    if policies and not all(policy.strip() for policy in policies):
        raise typer.BadParameter('must not be empty; a policy that only counts is "mode=observe".')
    return policies


def calibration_folder(name: str) -> Path:
    """Return the folder of a calibration; `demo` is the one that comes with the demo model."""
    return CALIBRATION_FOLDER if name == DEMO else Path(name)


# -- what a verb works on --------------------------------------------------------------------------

Model = Annotated[str, typer.Argument(help="Model folder, hub name, or: demo.")]
TraceName = Annotated[
    str, typer.Argument(help="Trace: a file or folder of any known format, or sample:NAME.")
]
Text = Annotated[
    list[str] | None,
    typer.Option(help="Text file, UTF-8; may be repeated. With demo also the name of a text."),
]
DType = Annotated[DTypeName, typer.Option(help="auto: float32 on a CPU, the model's own on CUDA.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]

# -- how texts are run -----------------------------------------------------------------------------

_TOKENS = typer.Option(help="Tokens of the texts to run, at most, in all.")
Tokens = Annotated[int, _TOKENS]
StageTokens = Annotated[int | None, _TOKENS]
BatchSize = Annotated[int, typer.Option(help="Sequences, or prompts, per batch.")]
SequenceLength = Annotated[int, typer.Option(help="Tokens per sequence of the texts.")]
Mix = Annotated[
    bool, typer.Option("--mix", help="Mix the texts in every batch, not one text per batch.")
]

# -- facts that a trace's file may lack ------------------------------------------------------------

Experts = Annotated[
    int | None, typer.Option(help="Experts per layer, if a trace's file does not state them.")
]
K = Annotated[int | None, typer.Option(help="Experts per token, if the file does not state them.")]
Layers = Annotated[
    int | None, typer.Option(help="Hidden layers of the model, if the file does not state them.")
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(help="The model's config.json or its folder, which hold all of these."),
]
WorldSize = Annotated[
    int | None, typer.Option(help="How often the file counts every assignment; divides counts.")
]
Physical = Annotated[
    bool, typer.Option("--physical", help="Keep an engine's physical slots as experts.")
]
BatchTokens = Annotated[
    int | None,
    typer.Option(help="Tokens per batch of a trace. Default: its own forwards."),
]
Judge = Annotated[
    str | None, typer.Option(help="Another trace of the same model, to judge on as well.")
]

# -- where experts are, and what is capped ---------------------------------------------------------

Devices = Annotated[
    int | None, typer.Option(help="Devices that share the experts in order. Default: 8.")
]
_PLACEMENT = "Plan file (TOML) of which only the placements are taken"
_PLAN = "Plan file (TOML) with policies, placements or both"
_POLICY = "Policy, like capacity_factor=1.25"
PlacementFile = Annotated[Path | None, typer.Option("--placement", help=f"{_PLACEMENT}.")]
PlacementFiles = Annotated[
    list[Path] | None, typer.Option("--placement", help=f"{_PLACEMENT}; may be repeated.")
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help=f"{_PLAN}.")]
RequiredPlan = Annotated[Path, typer.Option("--plan", help=f"{_PLAN}.")]
PlanFiles = Annotated[list[Path] | None, typer.Option("--plan", help=f"{_PLAN}; may be repeated.")]
Policy = Annotated[str | None, typer.Option(help=f"{_POLICY}.")]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help=f"{_POLICY}; may be repeated.", callback=_not_empty),
]
CalibrationFolder = Annotated[
    Path | None,
    typer.Option(
        parser=calibration_folder,
        metavar="FOLDER",
        help="Made by paceline tune, or: demo. For policies with compensate=true.",
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Preset (h100, h200, b200, h20, a100, l40s, mi300x), or a file of bench hardware."
    ),
]
Link = Annotated[float | None, typer.Option(help="GB/s between devices, one way.")]

# -- what is written and printed -------------------------------------------------------------------

NewTrace = Annotated[Path, typer.Option(help="Folder for the trace, to be made.")]
Content = Annotated[
    ContentName,
    typer.Option(help="counts reveal little; choices and scores, token by token, reveal text."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what an earlier run wrote.")]
Html = Annotated[Path | None, typer.Option(help="Page (HTML) to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
