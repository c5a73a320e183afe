"""Fit the calibration that comes with the demo model, on text that the model was trained on.

`python examples/calibrate_demo_model.py` gets the training texts as `train_demo_model.py prepare`
does, takes the first 12 kB of documents until each domain has enough tokens, and writes stand-ins
of rank 27 and a placement on 8 devices to src/paceline/demo/calibration. The held-out texts, on
which the demo judges, take no part. `--third 0`, `1` and `2` take disjoint thirds of the documents.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import demo_corpus
import typer

from paceline.batches import Sampling
from paceline.calibration.collect import calibrate
from paceline.cli.output import progress
from paceline.cli.sources import load
from paceline.cli.tune_ladder import PLAN
from paceline.demo.settings import DEVICES

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".demo-build"
SEED = 7
BYTES_A_TOKEN = 5  # more than any of the texts has


def training_texts(tokens: int, third: int | None) -> dict[str, str]:
    """Domain -> enough training text for so many tokens of each."""
    texts = {}
    for domain in demo_corpus.DOMAINS:
        whole = (BUILD / "train" / f"{domain}.txt").read_text(encoding="utf-8")
        documents = whole.split(demo_corpus.END_OF_TEXT)
        random.Random(SEED).shuffle(documents)
        if third is not None:
            documents = documents[third::3]
        parts: list[str] = []
        while documents and sum(map(len, parts)) < BYTES_A_TOKEN * tokens:
            parts.append(documents.pop()[: demo_corpus.DOCUMENT_BYTES])
        texts[domain] = "\n\n".join(parts)
    return texts


def main(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = ROOT
    / "src/paceline/demo/calibration",
    rank: Annotated[int, typer.Option(help="Of the stand-ins.")] = 27,
    tokens: Annotated[int, typer.Option(help="Of each domain.")] = 32768,
    third: Annotated[int | None, typer.Option(help="Of the documents, 0 to 2; else all.")] = None,
) -> None:
    if not (BUILD / "train").is_dir():
        demo_corpus.prepare(BUILD)
    model, tokenizer = load("demo")
    texts = training_texts(tokens, third)
    sampling = Sampling(tokens * len(texts), batch_size=16, sequence_length=256)
    with progress() as tell:
        found = calibrate(
            model, tokenizer, texts, rank=rank, devices=DEVICES, sampling=sampling, progress=tell
        )
    path = found.save(out)
    found.plan(".").save(out / PLAN)
    for file in (path, out / PLAN):  # these texts are public
        file.chmod(0o644)
    for layer in found.layers:
        print(f"{layer.name}: ridge {layer.ridge:g}, {layer.explained:.0%} of texts left out")
    for said in found.warnings():
        print(said)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    typer.run(main)
