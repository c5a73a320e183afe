"""The verbs. Heavy libraries are imported when a verb runs, so that --help is quick."""

from __future__ import annotations

from importlib.metadata import version as installed_version

import typer

from paceline.cli.bench import bench
from paceline.cli.calibrate import calibrate
from paceline.cli.demo import demo
from paceline.cli.loads import loads

app = typer.Typer(
    name="paceline",
    help="Find and cap the stragglers of Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.add_typer(bench)
app.command()(loads)
app.command()(calibrate)


@app.command()
def version() -> None:
    """Print the version of paceline."""
    typer.echo(installed_version("paceline"))
