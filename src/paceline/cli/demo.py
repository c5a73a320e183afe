"""`paceline demo`: the main job on the embedded model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import command_line, console, emit, guarded, print_lines, progress, table
from paceline.cli.sources import quiet


@guarded
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and the results.")] = Path(
        "paceline-demo"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="A reduced run of seconds; its figures mean little.")
    ] = False,
    json: options.AsJson = False,
) -> None:
    """Show stragglers and what capping them does, on a small embedded model.

    Runs a real Mixture-of-Experts model over held-out text under a dozen policies, times the
    expert work of 8 emulated devices, and writes index.html and results.json. Needs no download;
    a few minutes on two cores.

    \b
    Examples:
      paceline demo
      paceline demo --out /tmp/demo
      paceline demo --quick
    """
    from paceline.demo.plan import Plan
    from paceline.demo.run import run_demo

    quiet()
    with progress() as tell:
        results = run_demo(
            out,
            plan=Plan.quick() if quick else Plan.full(),
            progress=tell,
            command=command_line(),
        )
    emit(results, json, lambda found: _show(found, out))


def _show(results: Mapping[str, Any], out: Path) -> None:
    from paceline.demo.plan import KINDS
    from paceline.text import percent, signed_percent, times

    console().print(results["findings"]["headline"], style="bold")
    print_lines(f"- {line}" for line in results["findings"]["lines"])
    for kind, words in KINDS.items():
        shown = table(
            f"{words.capitalize()} (speed-up: emulated)",
            "policy", "perplexity", "dropped", "busiest", "speed-up",
        )  # fmt: skip
        for row in results["policies"]:
            part = row[kind]
            shown.add_row(
                row["label"],
                signed_percent(part["perplexity_change"]["mean"]),
                percent(part["dropped_share"]),
                times(part["device_peak_to_mean"]),
                times(part["emulated"]["speedup"]["median"]),
            )
        console().print(shown)
    typer.echo(f"Page: {out / 'index.html'}")
