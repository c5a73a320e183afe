"""Pictures of clothes on a grid and questions about them, for the picture model to learn.

The clothes are Fashion-MNIST (28 x 28 pixels, MIT licence), got as a Debian package. A picture has
3 x 3 cells, some of them empty, and a conversation asks several things about it, in words:
what is in a cell, how many of a kind there are, whether there is one, and, which needs two looks,
whether two cells hold the same and whether one kind is left of another.
"""

from __future__ import annotations

import gzip
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIDE, CELL, PATCH = 3, 28, 14
GRID = SIDE * CELL // PATCH
IMAGE_TOKENS = GRID * GRID
# label in Fashion-MNIST -> word; coats and shirts are left out: too like pullovers at this size
KINDS = {0: "top", 1: "trousers", 2: "pullover", 3: "dress", 5: "sandal", 7: "sneaker",
         8: "bag", 9: "boot"}  # fmt: skip
NUMBERS = ("zero", "one", "two", "three", "four")
CATEGORIES = {"place": "perception", "count": "perception", "any": "perception",
              "same": "cognition", "left": "cognition"}  # fmt: skip
SPECIAL = ("<pad>", "<image>", "<video>", "<start>", "<end>")
PLACES = tuple(f"{row}{column}" for row in "abc" for column in "123")
ASKED = ("how-many", "any", "same", "left-of")
WORDS = (*SPECIAL, *KINDS.values(), *NUMBERS, "nothing", "yes", "no", *ASKED, *PLACES)
ID = {word: number for number, word in enumerate(WORDS)}
IGNORED = -100
PACKAGE = "dataset-fashion-mnist"
Array = NDArray[np.uint8]


@dataclass(frozen=True)
class Conversations:
    """Pictures and questions about them, as the model is given them.

    Attributes:
        given: arguments of the model's forward; input_ids [batch, length], padded on the left.
        labels: [batch, length] id of the answer that follows a token, IGNORED elsewhere.
        held: [batch, length] id of the word for what an image token's cell holds, likewise.
        category: [batch, length] index in CATEGORIES of the question a label answers.
    """

    given: dict[str, Tensor]
    labels: Tensor
    held: Tensor
    category: Tensor


def clothes(folder: Path, part: str) -> tuple[Array, Array]:
    """Load Fashion-MNIST's images [n, 28, 28] of the known kinds, and their kind [n].

    Args:
        folder: keeps what was got; filled through apt-get where it is empty.
        part: train or t10k.
    """
    root = folder / "usr" / "share" / "datasets" / "fashion-mnist"
    if not root.exists():
        with tempfile.TemporaryDirectory() as where:
            subprocess.run(["apt-get", "download", PACKAGE], cwd=where, check=True)
            package = next(Path(where).glob("*.deb"))
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    raw = gzip.decompress((root / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    labels = np.frombuffer(raw, np.uint8, offset=8)
    raw = gzip.decompress((root / f"{part}-images-idx3-ubyte.gz").read_bytes())
    images = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, CELL, CELL)
    known = np.isin(labels, list(KINDS))
    kind = np.searchsorted(list(KINDS), labels[known]).astype(np.uint8)
    return images[known], kind


def _picture(
    draw: np.random.Generator, images: Array, kinds: Array
) -> tuple[Array, NDArray[np.int64]]:
    """Draw a picture [84, 84] and the contents of its cells [9]: a kind, or -1 for nothing."""
    filled = draw.integers(3, SIDE * SIDE)
    cells = np.full(SIDE * SIDE, -1)
    canvas = np.zeros((SIDE * CELL, SIDE * CELL), np.uint8)
    favoured = draw.integers(len(KINDS))  # one kind is often there more than once
    for cell in draw.permutation(SIDE * SIDE)[:filled]:
        chosen = draw.integers(len(images))
        for _ in range(3 if draw.random() < 0.3 else 0):
            if kinds[chosen] == favoured:
                break
            chosen = draw.integers(len(images))
        item = np.roll(images[chosen], draw.integers(-2, 3, 2), (0, 1))
        if draw.random() < 0.5:
            item = item[:, ::-1]
        row, column = divmod(int(cell), SIDE)
        canvas[row * CELL :, column * CELL :][:CELL, :CELL] = item
        cells[cell] = kinds[chosen]
    return canvas, cells


def _question(draw: np.random.Generator, cells: NDArray[np.int64]) -> tuple[str, list[str], str]:
    """Ask a question that these cells [9] answer: (category, words, answer)."""
    kind = list(KINDS.values())
    full, there = np.flatnonzero(cells >= 0), np.unique(cells[cells >= 0])
    absent = np.setdiff1d(np.arange(len(kind)), there)
    category = str(draw.choice(list(CATEGORIES), p=[0.5, 0.125, 0.125, 0.125, 0.125]))
    wanted = draw.random() < 0.5  # where the answer is yes or no: as often one as the other
    if category == "place":
        at = draw.choice(full) if draw.random() < 0.7 else draw.integers(SIDE * SIDE)
        return category, [PLACES[at]], kind[cells[at]] if cells[at] >= 0 else "nothing"
    if category == "count":
        one = draw.choice(there) if draw.random() < 0.8 else draw.integers(len(kind))
        return category, ["how-many", kind[one]], NUMBERS[min(4, int((cells == one).sum()))]
    if category == "any":
        yes = len(absent) == 0 or wanted
        one = draw.choice(there if yes else absent)
        return category, ["any", kind[one]], "yes" if yes else "no"
    if category == "same":
        for _ in range(60):
            at, other = draw.choice(full, 2, replace=False)
            if (cells[at] == cells[other]) == wanted:
                break
        yes = cells[at] == cells[other]
        return category, ["same", PLACES[at], PLACES[other]], "yes" if yes else "no"
    for _ in range(20):
        one, other = draw.choice(there, 2, replace=len(there) < 2)
        columns = [np.flatnonzero(cells == k) % SIDE for k in (one, other)]
        yes = columns[0].min() < columns[1].max()
        if yes == wanted:
            break
    return category, ["left-of", kind[one], kind[other]], "yes" if yes else "no"


def conversations(
    draw: np.random.Generator, images: Array, kinds: Array, batch: int, questions: int
) -> Conversations:
    """Make a batch of pictures, each with so many questions and answers behind it."""
    pixels, ids, labels, held, categories = [], [], [], [], []
    words = np.array([*(ID[w] for w in KINDS.values()), ID["nothing"]])
    for _ in range(batch):
        canvas, cells = _picture(draw, images, kinds)
        patches = canvas.reshape(GRID, PATCH, GRID, PATCH).swapaxes(1, 2)
        pixels.append(patches.reshape(IMAGE_TOKENS, PATCH * PATCH))
        row = [ID["<start>"], *[ID["<image>"]] * IMAGE_TOKENS, ID["<end>"]]
        label, category = [IGNORED] * len(row), [-1] * len(row)
        for _ in range(questions):
            asked, asking, answer = _question(draw, cells)
            row += [ID[w] for w in (*asking, answer)]
            label += [IGNORED] * (len(asking) - 1) + [ID[answer], IGNORED]
            category += [-1] * (len(asking) - 1) + [list(CATEGORIES).index(asked), -1]
        of_patches = (
            words[cells].reshape(SIDE, SIDE).repeat(CELL // PATCH, 0).repeat(CELL // PATCH, 1)
        )
        held.append(
            [IGNORED, *of_patches.flatten().tolist()] + [IGNORED] * (len(row) - IMAGE_TOKENS - 1)
        )
        ids.append(row)
        labels.append(label)
        categories.append(category)
    length = max(map(len, ids))

    def padded(rows: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([[filler] * (length - len(row)) + row for row in rows])

    tokens = padded(ids, ID["<pad>"])
    given = {
        "input_ids": tokens,
        "attention_mask": (tokens != ID["<pad>"]).long(),
        "mm_token_type_ids": (tokens == ID["<image>"]).long(),
        "pixel_values": torch.from_numpy(np.concatenate(pixels)).float() / 127.5 - 1,
        "image_grid_thw": torch.tensor([[1, GRID, GRID]] * batch),
    }
    labelled = padded(labels, IGNORED), padded(held, IGNORED), padded(categories, -1)
    return Conversations(given, *labelled)
