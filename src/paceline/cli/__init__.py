"""The `paceline` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what to install where it can't run."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as missing:
        sys.exit(f"paceline: the command needs {missing.name}: pip install 'paceline[cli]'")
    from paceline.cli.app import app

    app(prog_name="paceline")
