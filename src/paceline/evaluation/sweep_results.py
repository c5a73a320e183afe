"""Results of `paceline eval --grid` in the form in which they are written, read back and shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from paceline.evaluation.results import Form, Made, ModelSize, SubjectFacts
from paceline.files import read_plain

SWEEP_SCHEMA = "paceline-sweep/1"
_MOST_BYTES = 1 << 26


class Cost(Form):
    """Cost of one cap, or of none; changes and shares, not percent."""

    change: float
    standard_error: float | None
    changed_next_tokens: float
    dropped_share: float
    device_peak_to_mean: float


ALIKE = 0.02
"""Devices are about equally busy if their loads differ by less than this share."""


def on_frontier(costs: Sequence[Cost]) -> list[bool]:
    """Return True for each cap that no other beats beyond the error of what was measured.

    A cap is beaten by one with about the same busiest device and a change smaller by more than
    twice the standard error of the difference, or with a less busy device and no larger change.
    Of caps with the very same figures the first counts.

    >>> def cap(busiest, change):
    ...     return Cost(change=change, standard_error=0.01, changed_next_tokens=0,
    ...                 dropped_share=0, device_peak_to_mean=busiest)
    >>> on_frontier([cap(0.50, 0.32), cap(0.503, 0.05), cap(1.0, 0.04), cap(1.2, 0.06)])
    [False, True, True, False]
    """
    return [
        not any(
            _beats(other, cap, earlier=at < index)
            for at, other in enumerate(costs)
            if at != index
        )
        for index, cap in enumerate(costs)
    ]  # fmt: skip


def _beats(other: Cost, cap: Cost, earlier: bool) -> bool:
    figures = (other.device_peak_to_mean, other.change)
    if figures == (cap.device_peak_to_mean, cap.change):
        return earlier
    error = math.hypot(other.standard_error or 0, cap.standard_error or 0)
    if other.device_peak_to_mean < cap.device_peak_to_mean * (1 - ALIKE):
        return other.change <= cap.change
    alike = other.device_peak_to_mean <= cap.device_peak_to_mean * (1 + ALIKE)
    return alike and other.change + 2 * error < cap.change


class Point(Cost):
    """Cost of one cap, and True if no other beats it in both quality and the busiest device."""

    capacity_factor: float
    unit: str
    keep: str
    expand: str | None
    compensate: bool
    on_frontier: bool


class Sweep(Form):
    """The part of a sweep that a page shows."""

    model: str
    subject: ModelSize
    tokens_by_text: dict[str, int]
    batch_size: int
    sequence_length: int
    composition: str
    baseline: Cost
    points: Sequence[Point]


class CostByText(Cost):
    """Cost of no cap, with the change of every text."""

    by_text: dict[str, float]


class PointByText(Point, CostByText):
    """Cost of one cap, with the change of every text; why it never applied, if it didn't."""

    capped_nothing: str | None = None


class SweepResult(Made, Sweep):
    """Content of sweep.json."""

    subject: SubjectFacts
    baseline: CostByText
    points: Sequence[PointByText]


def read_sweep(path: Path) -> Sweep:
    """Read sweep.json, as far as a page shows it.

    Raises:
        ValueError: if it can't be read, or is none.
    """
    try:
        swept = Sweep.model_validate_json(read_plain(path, _MOST_BYTES).decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text.") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path} is no sweep ({where}: {first['msg'].lower()}): it must be the sweep.json of "
            "paceline eval --grid --out."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is no sweep: {error}.") from None
    if not swept.points:
        raise ValueError(f"{path} is no sweep: it has no points.")
    return swept
