"""`paceline demo`: the main job on the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_folder,
    check_page_libraries,
    command_line,
    emit,
    guarded,
    print_end,
    print_table,
    print_verdict,
    progress,
    writing,
)
from paceline.cli.sources import quiet

if TYPE_CHECKING:
    from paceline.demo.run import DemoResult


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
    check_folder(out=out)
    check_page_libraries()
    from paceline.demo.page import holds_other_results, run_with_findings, save_demo
    from paceline.demo.settings import DemoSettings

    if holds_other_results(out):
        raise ValueError(f"--out {out} holds a page that is no demo's: give another folder.")
    quiet()
    with progress() as tell:
        settings = DemoSettings.quick() if quick else DemoSettings()
        result = run_with_findings(settings, tell, command_line())
    with writing() as write:
        written = write("out", out, lambda: save_demo(result, out))
        emit(result, json, _show)
        if written and not json:
            print_end([out / "index.html", out / "results.json"], [["loads", "demo"]])


def _show(result: DemoResult) -> None:
    from paceline.demo.settings import KINDS
    from paceline.text import percent, signed_percent, times

    print_verdict([result.findings.headline, *(f"- {line}" for line in result.findings.lines)])
    for kind, words in KINDS.items():
        print_table(
            f"{words.capitalize()} (speed-up: emulated)",
            ("policy", "perplexity", "dropped", "busiest", "speed-up"),
            [
                (
                    row.label,
                    signed_percent(part.perplexity_change.mean),
                    percent(part.dropped_share),
                    times(part.device_peak_to_mean),
                    times(part.emulated["speedup"]["median"]),
                )
                for row, part in ((each, each.part(kind)) for each in result.policies)
            ],
        )
