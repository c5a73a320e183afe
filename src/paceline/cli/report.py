"""`paceline report`: one page from a trace, or from what `paceline plan --json` said of it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from paceline.cli import trace_options as options
from paceline.cli.errors import check_writable, guarded
from paceline.cli.model_options import AsJson

if TYPE_CHECKING:
    from paceline.analysis.plan_goal import Goal
    from paceline.traces import Trace

_MAX_BYTES = 1 << 26


@guarded
def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|PLAN", help="Trace, sample:NAME, or the JSON of paceline plan --json."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Page (HTML) to write, readable by you only.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="Another trace of the same model, to judge everything on."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file (TOML) to show: its placements and policies.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Devices that share the experts; 8 unless placed.")
    ] = None,
    batch_tokens: options.BatchTokens = None,
    model_config: options.ModelConfig = None,
    hardware: Annotated[
        str | None, typer.Option(help="With --model-config: also decide, as paceline plan does.")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="sweep.json of paceline sweep: what caps cost in quality, shown too."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the figures as SVG and PNG (needs kaleido).")
    ] = None,
    experts: options.Experts = None,
    k: options.K = None,
    layers: options.Layers = None,
    physical: options.Physical = False,
    json: AsJson = False,
) -> None:
    """Make one page of a trace: loads, devices before and after any cap, placement, verdict.

    The page needs no network and no server. Its placement is searched on the first half of the
    batches and everything is judged on the second; with --judge it is searched on all of the trace
    and everything is judged on the other.

    \b
    Examples:
      paceline report sample:esft_v2lite_law --out page.html
      paceline report monday --judge friday --out page.html
      paceline report trace --plan plan.toml --out page.html --figures figures
      paceline report trace --model-config model --hardware h100 --out page.html
      paceline plan trace --model-config model --json > plan.json
      paceline report plan.json --out page.html
    """
    from paceline.analysis.cap_study import cap_study
    from paceline.analysis.planner import make_plan
    from paceline.cli.progress import progress
    from paceline.evaluation.sweep_file import read_sweep
    from paceline.plan import Plan
    from paceline.system_info import system_info

    if out is None and figures is None and not json:
        raise ValueError("there is nothing to write: say --out page.html, --figures or --json.")
    if hardware is not None and model_config is None:
        raise ValueError("--hardware needs --model-config: a decision needs the model's sizes.")
    if devices is not None and devices < 1:
        raise ValueError(f"--devices {devices} is not allowed: it is at least 1.")
    check_writable(out, figures if figures is None or not figures.is_dir() else None)
    planned = _planned(source)
    if planned is not None:
        if devices not in (None, planned["devices"]) or hardware is not None:
            raise ValueError(f"{source} says devices and hardware already: leave them out.")
        devices = planned["devices"]
        batch_tokens = planned["batch_tokens"] if batch_tokens is None else batch_tokens
    chosen = None if plan is None else Plan.load(plan)
    swept = None if sweep is None else read_sweep(sweep)
    if chosen is not None and chosen.placements and devices is not None and planned is None:
        raise ValueError(f"--devices and {plan} both place the experts: give one of them.")

    def read(name: str) -> Trace:
        return options.read_trace(
            name, experts=experts, k=k, layers=layers, model_config=model_config,
            physical=physical,
        )  # fmt: skip

    trace = read(source if planned is None else planned["trace"])
    if planned is not None and judge is None and planned["other_trace"] is not None:
        judge = planned["other_trace"]["trace"]
    other = None if judge is None else read(judge)
    with progress() as tell:
        result = cap_study(trace, devices or 8, batch_tokens, chosen, tell, other)
        if hardware is not None and model_config is not None:
            goal = _goal(model_config, hardware, result["devices"])
            made, planned = make_plan(trace, goal, other, batch_tokens, tell)
            chosen = made if chosen is None else chosen
    result |= {
        "planned": planned,
        "sweep": swept,
        "plan_text": None if chosen is None else chosen.to_toml(),
        **_linked(plan or (planned or {}).get("plan"), out),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        **system_info(),
        "seconds": None,
    }
    if out is not None:
        from paceline.reporting.trace_page import write_report

        write_report(result, out)
    drawn = []
    if figures is not None:
        from paceline.reporting.trace_figures import write_figures

        drawn = write_figures(result, figures)
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
        return
    for line in [*result["verdict"], *(planned["verdict"] if planned else [])]:
        typer.echo(line)
    for path in [*([] if out is None else [out]), *drawn]:
        typer.echo(f"Written: {path}")


def _planned(source: str) -> dict[str, Any] | None:
    """What `paceline plan --json` said, where the source is a file of that.

    Raises:
        ValueError: if it is one, but cut off, or a plan file, which names no trace.
    """
    import json

    from paceline.analysis.planner import SCHEMA

    path = Path(source)
    if path.suffix == ".toml" and path.is_file():
        raise ValueError(
            f"{source} is a plan file, which names no trace: say paceline report TRACE --plan "
            f"{source}."
        )
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    with path.open("rb") as file:
        if f'"schema": "{SCHEMA}"'.encode() not in file.read(4096):
            return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{source} is a plan's JSON that is cut off or broken.") from None
    _check(source, found)
    result: dict[str, Any] = found
    return result


def _check(source: str, found: Mapping[str, Any]) -> None:
    """Refuse a plan's JSON that lacks what the page shows."""
    kinds: dict[str, Any] = {
        "trace": str, "devices": int, "decision": str, "verdict": list, "hardware": str,
        "precision": str, "second_half": dict, "other_trace": dict | None,
        "batch_tokens": int | None,
    }  # fmt: skip
    for name, kind in kinds.items():
        if name not in found or not isinstance(found[name], kind):
            raise ValueError(f"{source} has no proper {name}: write it with paceline plan --json.")
    if not found["verdict"] or not all(isinstance(line, str) for line in found["verdict"]):
        raise ValueError(f"{source} has no proper verdict: write it with paceline plan --json.")
    for part in (found["second_half"], found["other_trace"]):
        if part is None:
            continue
        points = part.get("frontier")
        proper = isinstance(points, list) and all(map(_is_point, points))
        if not proper or not isinstance(part.get("trace", ""), str):
            raise ValueError(
                f"{source} has no proper frontier: write it with paceline plan --json."
            )


def _is_point(point: Any) -> bool:
    """Whether this is a point of a planner's frontier."""
    if not isinstance(point, dict) or point.get("placement") not in ("in_order", "placed"):
        return False
    mass = point.get("gate_mass_lost", "none")
    numbers = [point.get(name) for name in ("budget", "gain", "dropped_share")]
    return all(isinstance(n, float | int) for n in numbers) and (
        mass is None or isinstance(mass, float | int)
    )


def _linked(plan: Any, page: Path | None) -> dict[str, str | None]:
    """The plan file, and the way to it from the page."""
    if not isinstance(plan, (str, Path)):
        return {"plan_file": None, "plan_link": None}
    folder = Path() if page is None else page.absolute().parent
    link = Path(os.path.relpath(Path(plan).absolute(), folder)).as_posix()
    return {"plan_file": str(plan), "plan_link": quote(link)}


def _goal(config: Path, hardware: str, devices: int) -> Goal:
    """What the planner is asked, where the page also decides."""
    from paceline.analysis.cost import layer_shape
    from paceline.analysis.hardware import hardware_of
    from paceline.analysis.placing import Wanted
    from paceline.analysis.plan_goal import Goal
    from paceline.model_config import read_model_config

    device = hardware_of(hardware)
    return Goal(
        Wanted(devices, groups=read_model_config(config).expert_groups),
        layer_shape(config, device.precision or None),
        device,
    )
