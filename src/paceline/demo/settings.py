"""Settings of the demo: policies, and the size of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.policy import CapacityPolicy

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
        family: name shown to people, without the factor; group for colours and the legend.
        policy: applied in every layer.
        counterpart: key of the entry to compare with, e.g. the same cap without expansion.
        placed: True: the model's calibration places the experts; False: they are in order.
    """

    key: str
    family: str
    policy: CapacityPolicy
    counterpart: str | None = None
    placed: bool = False

    @property
    def label(self) -> str:
        """Name shown to people."""
        factor = self.policy.capacity_factor
        return self.family if factor is None else f"{self.family}, {factor:g}×"


def _entry(key: str, family: str, policy: str, counterpart: str | None = None) -> Entry:
    return Entry(key, family, CapacityPolicy.parse(policy), counterpart, key.endswith("-placed"))


_STAND_INS = "keep=contribution,compensate=true"
_DEVICE, _EXPERT = "Token Drop per device", "Token Drop per expert"
_COMPENSATED, _EXPANDED = "Compensated Drop per device", "Expanded Drop per device"

ENTRIES = (
    Entry(BASELINE, "no cap", CapacityPolicy(capacity_factor=None)),
    _entry(HEADLINE, _COMPENSATED, f"capacity_factor=1,{_STAND_INS}", "device-1-score"),
    _entry(f"{HEADLINE}-placed", "Compensated Drop, placed", f"capacity_factor=1,{_STAND_INS}"),
    _entry("compensated-0.5", _COMPENSATED, f"capacity_factor=0.5,{_STAND_INS}"),
    _entry(
        "compensated-expert-1",
        "Compensated Drop per expert",
        f"capacity_factor=1,unit=expert,{_STAND_INS}",
        "expert-1-score",
    ),
    _entry("device-1.5-score", _DEVICE, "capacity_factor=1.5"),
    _entry("device-1.25-score", _DEVICE, "capacity_factor=1.25"),
    _entry("device-1-score", _DEVICE, "capacity_factor=1"),
    _entry(
        "expanded-1.25", _EXPANDED, "capacity_factor=1.25,expand=own_device", "device-1.25-score"
    ),
    _entry("expanded-1", _EXPANDED, "capacity_factor=1,expand=own_device", "device-1-score"),
    _entry("expert-1.5-score", _EXPERT, "capacity_factor=1.5,unit=expert"),
    _entry("expert-1-score", _EXPERT, "capacity_factor=1,unit=expert"),
    _entry("expert-1-random", f"{_EXPERT}, random", "capacity_factor=1,unit=expert,keep=random"),
)
"""The whole table: no cap, Compensated Drop, Token Drop and Expanded Drop."""

_QUICK = (
    BASELINE, HEADLINE, f"{HEADLINE}-placed", "device-1.25-score", "device-1-score",
    "expanded-1.25", "expert-1-score",
)  # fmt: skip


@dataclass(frozen=True)
class DemoSettings:
    """Size of a demo run; the whole demo takes about two minutes on two cores.

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

    entries: Sequence[Entry] = ENTRIES
    max_domains: int | None = None
    sequences: int = 16
    length: int = 256
    timed_every: int = 2
    timed_mixed: int = 2
    rounds: int = 3
    reduced: bool = False

    @classmethod
    def quick(cls) -> DemoSettings:
        """Return a reduced run that shows that everything works; its figures mean little."""
        entries = [entry for entry in ENTRIES if entry.key in _QUICK]
        return cls(
            entries, max_domains=2, sequences=8, length=128, timed_mixed=1, rounds=2, reduced=True
        )
