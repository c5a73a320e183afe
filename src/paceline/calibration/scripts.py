"""Scripts that a tokenizer knows and texts don't have: languages that a fit may not cover."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

_TOKENS = 20_000  # of a vocabulary that are read, spread over it
_KNOWN, _USED = 0.01, 0.001


def scripts_left_out(tokenizer: Any, texts: Iterable[str]) -> str | None:
    """Say which scripts texts leave out; None if they leave out none.

    Args:
        tokenizer: knows a script if 1 in 100 of its tokens with letters has one of it.
        texts: use a script if 1 in 1,000 of their letters is of it.
    """
    size = len(tokenizer)
    drawn = [[at] for at in range(0, size, -(-size // _TOKENS))]
    known = _shares(set(map(_script, piece)) for piece in tokenizer.batch_decode(drawn))
    used = _shares({_script(letter)} for text in texts for letter in text)
    missing = [
        f"{name} ({share:.0%} of its tokens)"
        for name, share in sorted(known.items(), key=lambda item: -item[1])
        if share >= _KNOWN and used.get(name, 0) < _USED
    ]
    if not missing:
        return None
    return (
        f"The tokenizer also knows {', '.join(missing)}, and the texts have none of it: if the "
        "model will see such text, give some."
    )


def _script(letter: str) -> str | None:
    """Return the first word of a letter's Unicode name, which is its script.

    >>> _script("a"), _script("\u044f"), _script("1")
    ('Latin', 'Cyrillic', None)
    """
    if not letter.isalpha():
        return None
    name = unicodedata.name(letter, "").split(" ")[0].split("-")[0]
    return "CJK" if name == "CJK" else name.capitalize() or None


def _shares(found: Iterable[set[str | None]]) -> dict[str, float]:
    """Return the share of the sets with a script that hold each one."""
    counts: Counter[str] = Counter()
    total = 0
    for scripts in found:
        named = [script for script in scripts if script is not None]
        counts.update(named)
        total += bool(named)
    return {name: count / total for name, count in counts.items()}
