"""The verbs. Heavy libraries are imported when a verb runs, so that --help is quick."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from paceline.cli.bench import bench
from paceline.cli.demo import demo
from paceline.cli.eval import evaluate
from paceline.cli.import_trace import import_trace
from paceline.cli.loads import loads
from paceline.cli.output import guarded
from paceline.cli.plan import plan
from paceline.cli.record import record
from paceline.cli.reorder import reorder
from paceline.cli.serve import serve
from paceline.cli.tune import tune

FORMER = {
    "simulate": "paceline loads --policy",
    "report": "paceline loads --html",
    "place": "paceline plan --place-only",
    "calibrate": "paceline tune --only stand-ins",
    "factors": "paceline tune --only factors",
    "sweep": "paceline eval --grid",
    "lm-eval": "python -m paceline.lm_eval",
    "calibrate-hardware": "paceline bench hardware",
    "version": "paceline --version",
}
"""Former verbs, and the commands that took their place."""

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of verbs that hand options on to another program."""

app = typer.Typer(
    name="paceline",
    help="Find and cap the stragglers of Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(loads)
app.command()(record)
app.command("import")(import_trace)
app.command()(plan)
app.command()(tune)
app.command("eval")(evaluate)
app.command()(reorder)
app.command(context_settings=PASSED_ON)(serve)
app.add_typer(bench)


def _former(name: str, command: str) -> Callable[[], None]:
    def moved() -> None:
        raise ValueError(f"`paceline {name}` is now `{command}`.")

    return guarded(moved)


for _name, _command in FORMER.items():
    app.command(_name, hidden=True, add_help_option=False, context_settings=PASSED_ON)(
        _former(_name, _command)
    )


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(installed_version("paceline"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Find and cap the stragglers of Mixture-of-Experts models."""
