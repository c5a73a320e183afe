"""Tables of a documentation page, each between two marks, made from results beside this file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Replace the tables of a page.

    Args:
        text: of the page.
        tables: name in the marks -> Markdown.

    >>> filled("<!-- a -->\\n\\nold\\n<!-- end of a -->\\n", {"a": "new\\n"})
    '<!-- a -->\\n\\nnew\\n\\n<!-- end of a -->\\n'
    """
    for name, made in tables.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n\n")
        _, end, after = rest.partition(f"\n<!-- end of {name} -->\n")
        text = before + start + made + end + after
    return text


def main(page: Path, tables: Mapping[str, str]) -> None:
    """Print the tables, or with --write put them into the page."""
    parser = argparse.ArgumentParser(description=f"The tables of docs/{page.name}.")
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
        return
    for name, made in tables.items():
        print(f"{name}\n\n{made}")
