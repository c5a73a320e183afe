"""Settings of the demo: policies, and the size of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.policy import CapacityPolicy, Unit

DEVICES = 8
BASELINE, HEADLINE = "none", "compensated-1"
"""Keys of the entry that all are compared with, and of the one in headline and tiles."""

KINDS = {"one_domain": "one-domain batches", "mixed": "mixed batches"}
"""Kinds of batches: key in results.json -> name for people."""

REPEATS = 2
"""Timed runs of a device in a round, the fastest of which counts."""


@dataclass(frozen=True)
class Entry:
    """A row of the policy table.

    Attributes:
        key: short stable name, used in results.json.
        label: name shown to people.
        family: group for colours and the legend.
        policy: applied in every layer.
        counterpart: key of the entry to compare with, e.g. the same cap without expansion.
        placed: True: the model's calibration places the experts; False: they lie in order.
    """

    key: str
    label: str
    family: str
    policy: CapacityPolicy
    counterpart: str | None = None
    placed: bool = False


def _entry(
    key: str, family: str, factor: float, counterpart: str | None = None, **policy: object
) -> Entry:
    fields = {"capacity_factor": factor, **policy}
    label = f"{family}, {factor:g}×"
    return Entry(key, label, family, CapacityPolicy.model_validate(fields), counterpart)


def _token_drop(unit: Unit, factor: float, keep: str = "score") -> Entry:
    family = f"Token Drop per {unit}" + (", random" if keep == "random" else "")
    return _entry(f"{unit}-{factor:g}-{keep}", family, factor, unit=unit, keep=keep)


def _compensated(factor: float, unit: Unit = "device", placed: bool = False) -> Entry:
    per_expert, suffix = "expert-" if unit == "expert" else "", "-placed" if placed else ""
    entry = _entry(
        f"compensated-{per_expert}{factor:g}{suffix}",
        "Compensated Drop, placed" if placed else f"Compensated Drop per {unit}",
        factor,
        f"{unit}-{factor:g}-score" if factor >= 1 and not placed else None,
        unit=unit,
        keep="contribution",
        compensate=True,
    )
    return replace(entry, placed=placed)


def _expanded(factor: float) -> Entry:
    counterpart = f"device-{factor:g}-score"
    return _entry(
        f"expanded-{factor:g}", "Expanded Drop per device", factor, counterpart, expand="own_device"
    )


def all_entries() -> list[Entry]:
    """Return the whole table: no cap, Compensated Drop, Token Drop and Expanded Drop."""
    return [
        Entry(BASELINE, "no cap", "no cap", CapacityPolicy(capacity_factor=None)),
        _compensated(1.0),
        _compensated(1.0, placed=True),
        _compensated(0.5),
        _compensated(1.0, unit="expert"),
        *(_token_drop("device", factor) for factor in (1.5, 1.25, 1.0)),
        *(_expanded(factor) for factor in (1.25, 1.0)),
        *(_token_drop("expert", factor) for factor in (1.5, 1.0)),
        _token_drop("expert", 1.0, "random"),
    ]


_QUICK = (
    BASELINE, HEADLINE, f"{HEADLINE}-placed", "device-1.25-score", "device-1-score",
    "expanded-1.25", "expert-1-score",
)  # fmt: skip


@dataclass(frozen=True)
class DemoSettings:
    """Size of a demo run.

    Attributes:
        entries: policies, the uncapped baseline first.
        max_domains: texts used; None: all.
        sequences: sequences of each text, and rows of a batch.
        length: tokens of a sequence.
        timed_every: the timing runs on every n-th one-domain batch.
        timed_mixed: mixed batches on which it runs (they are alike).
        rounds: interleaved rounds of the timing.
        reduced: True: the page says that this is too little for its figures to mean much.
    """

    entries: Sequence[Entry]
    max_domains: int | None = None
    sequences: int = 16
    length: int = 256
    timed_every: int = 2
    timed_mixed: int = 2
    rounds: int = 3
    reduced: bool = False

    @classmethod
    def full(cls) -> DemoSettings:
        """Return the settings of the whole demo, about two minutes on two cores."""
        return cls(entries=all_entries())

    @classmethod
    def quick(cls) -> DemoSettings:
        """Return a reduced run that shows that everything works; its figures mean little."""
        entries = [entry for entry in all_entries() if entry.key in _QUICK]
        return cls(
            entries, max_domains=2, sequences=8, length=128, timed_mixed=1, rounds=2, reduced=True
        )
