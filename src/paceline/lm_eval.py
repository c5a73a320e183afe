"""`python -m paceline.lm_eval`: lm-evaluation-harness's own command, which knows `paceline-hf`.

The harness (0.4.13) looks for no models of other packages, so its own `lm_eval` learns of the model
type from a file that is named among its tasks. `python -m paceline.lm_eval path` prints that file:

    python -m paceline.lm_eval ls tasks
    python -m paceline.lm_eval --model paceline-hf --tasks piqa \\
      --model_args 'pretrained=./my-moe,devices=8,policy="capacity_factor=1,unit=expert"'
    lm_eval --model paceline-hf --tasks "$(python -m paceline.lm_eval path),piqa" --model_args ...
"""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from importlib.util import find_spec

KNOWN = str(files("paceline.evaluation") / "paceline-hf.yaml")
"""File that makes the harness's own command know the model type, named among the tasks."""


def main() -> None:
    """Run the harness on this process's arguments; bad input is one sentence, exit code 2."""
    if sys.argv[1:] == ["path"]:
        print(KNOWN)
        return
    try:
        if find_spec("lm_eval") is None:
            raise ValueError("this needs lm-evaluation-harness: pip install 'paceline[eval]'")
        from lm_eval.__main__ import cli_evaluate

        import paceline.evaluation.harness  # noqa: F401  (registers the model)

        sys.argv[0] = "lm_eval"
        cli_evaluate()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("PACELINE_TRACEBACK"):
            raise
        print("paceline:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
