"""The docs name what is there: modules, verbs, links and measured files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_structure_has_every_module_as_it_describes_itself() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "modules.py"))
    assert (ROOT / "docs" / "structure.md").read_text(encoding="utf-8") == made["page"](), (
        "run `make docs`"
    )


def test_pages_show_what_the_demo_measured() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "demo_table.py"))
    measured = json.loads((ROOT / "benchmarks/results/demo.json").read_text(encoding="utf-8"))
    for page, text in made["pages"](measured).items():
        assert page.read_text(encoding="utf-8") == text, f"run docs/demo_table.py --write: {page}"
    assert max(map(len, made["short_table"](measured).splitlines())) <= 80


def test_the_first_example_of_readme_prints_what_it_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", readme.split("## In Python")[1], re.S)[:2]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue() == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
            assert heading in slugs, f"{page.name} links to {target}"


def test_the_readme_lists_every_verb() -> None:
    from typer.main import get_command

    from paceline.cli.app import app

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = [name for name, verb in get_command(app).commands.items() if not verb.hidden]
    assert len(verbs) == 10
    for verb in verbs:
        assert f"`paceline {verb}" in readme, verb


@pytest.mark.full
def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    """`make docs-site` in its strict form: a page outside the menu, or a dead link, is an error."""
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("capacity_factor", "topk_weights", "detach"):
        assert name in api


def test_the_changelog_has_this_version() -> None:
    assert f"## {paceline.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
