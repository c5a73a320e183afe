"""`paceline demo`: the main job on the embedded model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.errors import guarded


@guarded
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and the results.")] = Path(
        "paceline-demo"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="A reduced run of seconds; its figures mean little.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")
    ] = False,
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
    from paceline.cli.models import quiet
    from paceline.cli.progress import progress
    from paceline.demo.plan import Plan
    from paceline.demo.run import run_demo

    quiet()
    with progress() as tell:
        results = run_demo(
            out,
            plan=Plan.quick() if quick else Plan.full(),
            progress=tell,
            command=shlex.join(["paceline", *sys.argv[1:]]),
        )
    if as_json:
        from paceline.files import to_json

        typer.echo(to_json(results), nl=False)
    else:
        _show(results, out)


def _show(results: Mapping[str, Any], out: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paceline.demo.plan import KINDS
    from paceline.text import percent, signed_percent, times

    console = Console(highlight=False)
    console.print(results["findings"]["headline"], style="bold")
    for line in results["findings"]["lines"]:
        console.print(f"- {line}", markup=False)
    for kind, words in KINDS.items():
        table = Table(
            title=f"{words.capitalize()} (speed-up: emulated)",
            title_justify="left",
            box=box.SIMPLE,
            pad_edge=False,
            collapse_padding=True,
        )
        table.add_column("policy", no_wrap=True)
        for name in ("perplexity", "dropped", "busiest", "speed-up"):
            table.add_column(name, justify="right")
        for row in results["policies"]:
            part = row[kind]
            table.add_row(
                row["label"],
                signed_percent(part["perplexity_change"]["mean"]),
                percent(part["dropped_share"]),
                times(part["device_peak_to_mean"]),
                times(part["emulated"]["speedup"]["median"]),
            )
        console.print(table)
    console.print(f"Page: {out / 'index.html'}", markup=False, soft_wrap=True)
