"""What `sweep` found, as it is read back from a file: its form is checked before it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.files import read_plain

SCHEMA = "paceline-sweep/1"
_MAX_BYTES = 1 << 26


class _Finite(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Baseline(_Finite):
    """What was measured of one cap, or of none; changes and shares, not percent."""

    change: float
    standard_error: float | None
    changed_next_tokens: float
    dropped_share: float
    device_peak_to_mean: float


class Point(Baseline):
    """One cap, and whether no other beats it in both quality and the busiest device."""

    capacity_factor: float
    unit: str
    keep: str
    expand: str | None
    compensate: bool
    on_frontier: bool


class Subject(_Finite):
    """The model, as far as a page names it."""

    layers: int
    experts: int
    devices: int


class Swept(_Finite):
    """What a page shows of a sweep."""

    model: str
    subject: Subject
    tokens_by_text: dict[str, int]
    batch_size: int
    sequence_length: int
    composition: str
    baseline: Baseline
    points: list[Point]


def read_sweep(path: Path) -> dict[str, Any]:
    """The result of a sweep from its file (sweep.json), with what a page shows of it alone.

    Raises:
        ValueError: if it can't be read, or is none.
    """
    try:
        text = read_plain(path, _MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text.") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{path} is no sweep: {error}.") from None
    try:
        swept = Swept.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path} is no sweep ({where}: {first['msg'].lower()}): it is the sweep.json of "
            "paceline eval --grid --out."
        ) from None
    if not swept.points:
        raise ValueError(f"{path} is no sweep: it has no points.")
    return swept.model_dump()
