"""What the demo runs: which policies, on how much text, for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.policy import CapacityPolicy, Unit

DEVICES = 8
BASELINE, HEADLINE = "none", "compensated-1"
"""Keys of the entries that everything is compared with, and that headline and tiles tell of."""

KINDS = {"one_domain": "one-domain batches", "mixed": "mixed batches"}
"""Kinds of batches: key in results.json -> what people call them."""


@dataclass(frozen=True)
class Entry:
    """A row of the policy table.

    Attributes:
        key: short stable name, used in results.json.
        label: name shown to people.
        family: group for colours and the legend.
        policy: what is applied.
        counterpart: key of the entry to compare with, e.g. the same cap without expansion.
        placed: experts lie where the model's calibration places them, not in order.
    """

    key: str
    label: str
    family: str
    policy: CapacityPolicy
    counterpart: str | None = None
    placed: bool = False


def _token_drop(unit: Unit, factor: float, keep: str) -> Entry:
    family = f"Token Drop per {unit}" + (", random" if keep == "random" else "")
    return Entry(
        key=f"{unit}-{factor:g}-{keep}",
        label=f"{family}, {factor:g}×",
        family=family,
        policy=CapacityPolicy(capacity_factor=factor, unit=unit, keep=keep),
    )


def _compensated(factor: float, unit: Unit = "device", placed: bool = False) -> Entry:
    family = "Compensated Drop, placed" if placed else f"Compensated Drop per {unit}"
    part = "" if unit == "device" else f"{unit}-"
    return Entry(
        key=f"compensated-{part}{factor:g}" + ("-placed" if placed else ""),
        label=f"{family}, {factor:g}×",
        family=family,
        policy=CapacityPolicy(
            capacity_factor=factor, unit=unit, keep="contribution", compensate=True
        ),
        counterpart=f"{unit}-{factor:g}-score" if factor >= 1 and not placed else None,
        placed=placed,
    )


def _expanded(factor: float) -> Entry:
    family = "Expanded Drop per device"
    return Entry(
        key=f"expanded-{factor:g}",
        label=f"{family}, {factor:g}×",
        family=family,
        policy=CapacityPolicy(capacity_factor=factor, unit="device", expand="own_device"),
        counterpart=f"device-{factor:g}-score",
    )


def all_entries() -> list[Entry]:
    """The whole table: no cap, Compensated Drop, Token Drop and Expanded Drop."""
    return [
        Entry(BASELINE, "no cap", "no cap", CapacityPolicy(capacity_factor=None)),
        _compensated(1.0),
        _compensated(1.0, placed=True),
        _compensated(0.5),
        _compensated(1.0, unit="expert"),
        *(_token_drop("device", factor, "score") for factor in (1.5, 1.25, 1.0)),
        *(_expanded(factor) for factor in (1.25, 1.0)),
        *(_token_drop("expert", factor, "score") for factor in (1.5, 1.0)),
        _token_drop("expert", 1.0, "random"),
    ]


@dataclass(frozen=True)
class Plan:
    """Size of a demo run.

    Attributes:
        entries: policies, the uncapped baseline first.
        max_domains: texts used; None: all.
        sequences: sequences of each text, and rows of a batch.
        length: tokens of a sequence.
        timed_every: the timing runs on every so-manyth one-domain batch.
        timed_mixed: mixed batches on which it runs (they are alike).
        rounds: interleaved rounds of the timing.
        reduced: said on the page: too little for its figures to mean much.
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
    def full(cls) -> Plan:
        return cls(entries=all_entries())

    @classmethod
    def quick(cls) -> Plan:
        """A reduced run that shows that everything works; its figures mean little."""
        wanted = (
            BASELINE,
            HEADLINE,
            f"{HEADLINE}-placed",
            "device-1.25-score",
            "device-1-score",
            "expanded-1.25",
            "expert-1-score",
        )
        entries = [entry for entry in all_entries() if entry.key in wanted]
        return cls(
            entries,
            max_domains=2,
            sequences=8,
            length=128,
            timed_mixed=1,
            rounds=2,
            reduced=True,
        )
