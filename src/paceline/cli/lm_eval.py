"""`paceline lm-eval`: lm-evaluation-harness's own command line, which knows `paceline-hf`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from paceline.cli.errors import guarded


@guarded
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness itself, with its model type paceline-hf; every flag is its own.

    The harness (0.4.13) loads no model from other packages: its command knows paceline-hf only
    where a task is named by a path whose files import it, as the demo's do. This verb is the same
    command, and knows it always.

    \b
    Examples:
      paceline lm-eval ls tasks
      paceline lm-eval --model paceline-hf --tasks piqa
      --model_args 'pretrained=./my-moe,devices=8,policy="capacity_factor=1,unit=expert"'
    """
    if find_spec("lm_eval") is None:
        raise ValueError("this needs lm-evaluation-harness: pip install 'paceline[eval]'")
    from lm_eval.__main__ import cli_evaluate

    import paceline.evaluation.harness  # noqa: F401  (registers the model)

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
