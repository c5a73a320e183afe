"""The verbs. Heavy libraries are imported when a verb runs, so that --help is quick."""

from __future__ import annotations

from importlib.metadata import version as installed_version

import typer

from paceline.cli.bench import bench
from paceline.cli.tune import calibrate
from paceline.cli.calibrate_hardware import calibrate_hardware
from paceline.cli.demo import demo
from paceline.cli.eval import evaluate
from paceline.cli.factors import factors
from paceline.cli.import_trace import import_trace
from paceline.lm_eval import lm_eval
from paceline.cli.loads import loads
from paceline.cli.place import place
from paceline.cli.plan import plan
from paceline.cli.record import record
from paceline.cli.reorder import reorder
from paceline.cli.report import report
from paceline.cli.serve import serve
from paceline.cli.simulate import simulate
from paceline.cli.sweep import sweep

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Of verbs that hand options on to another program."""

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
app.command()(factors)
app.command("eval")(evaluate)
app.command()(sweep)
app.command("lm-eval", context_settings=PASSED_ON)(lm_eval)
app.command()(place)
app.command()(plan)
app.command()(reorder)
app.command()(report)
app.command("calibrate-hardware")(calibrate_hardware)
app.command()(record)
app.command("import")(import_trace)
app.command()(simulate)
app.command(context_settings=PASSED_ON)(serve)


@app.command()
def version() -> None:
    """Print the version of paceline."""
    typer.echo(installed_version("paceline"))
