"""`paceline lm-eval`: lm-evaluation-harness's own command line, which knows `paceline-hf`."""

from __future__ import annotations

import sys
from importlib.resources import files
from importlib.util import find_spec

import typer

from paceline.cli.output import guarded

KNOWN = str(files("paceline.evaluation") / "paceline-hf.yaml")
"""Makes the harness's own command know the model type, where it is named among the tasks."""


@guarded
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness itself, with its model type paceline-hf; every flag is its own.

    The harness (0.4.13) looks for no models of other packages, so its own command has to be told:
    name the file that `paceline lm-eval path` prints among its tasks. This verb is the same
    command, and knows the model always.

    \b
    Examples:
      paceline lm-eval ls tasks
      paceline lm-eval --model paceline-hf --tasks piqa
      --model_args 'pretrained=./my-moe,devices=8,policy="capacity_factor=1,unit=expert"'
      lm_eval --model paceline-hf --tasks "$(paceline lm-eval path),piqa" --model_args ...
    """
    if context.args == ["path"]:
        return typer.echo(KNOWN)
    if find_spec("lm_eval") is None:
        raise ValueError("this needs lm-evaluation-harness: pip install 'paceline[eval]'")
    from lm_eval.__main__ import cli_evaluate

    import paceline.evaluation.harness  # noqa: F401  (registers the model)

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
