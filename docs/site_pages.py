"""What the site needs beside docs/: the root's pages, and links that stay inside it."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages, with their links as seen from docs/."""
    for source, page in PAGES.items():
        if (ROOT / source).is_file():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=_links(text, PurePosixPath("."))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/ lead to the root's pages, or name the file where the site has none."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return _links(markdown, PurePosixPath("docs"))


def _links(text: str, folder: PurePosixPath) -> str:
    def moved(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, hash_, heading = target.partition("#")
        if "://" in target or not path:
            return match.group(0)
        file = _normal(folder / path)
        if file in PAGES:
            return f"[{label}]({PAGES[file]}{hash_}{heading})"
        if file.startswith("docs/"):
            return f"[{label}]({file.removeprefix('docs/')}{hash_}{heading})"
        return f"{label} (`{file}`)" if label.strip("`") != file else f"`{file}`"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", moved, text)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
