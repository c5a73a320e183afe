"""What experts and devices had to do in some forwards, all layers together: sums that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Tally:
    """Sums over layers and forwards; two tallies add up to that of both.

    Attributes:
        assignments: (token, expert) pairs that the model chose.
        dropped: of these.
        extras: assignments beyond a token's own choice.
        device_before: peak-to-mean of the busiest device times assignments, as the model chose.
        device_after: likewise, of what remained.
        worst_after: highest peak-to-mean of a device in one forward and layer.
        forwards: a forward of a layer each.
        capped_forwards: of these.
    """

    assignments: int = 0
    dropped: int = 0
    extras: int = 0
    device_before: float = 0.0
    device_after: float = 0.0
    worst_after: float = 0.0
    forwards: int = 0
    capped_forwards: int = 0

    @classmethod
    def of(cls, stats: Any) -> Tally:
        """From what an attached model counted (`Pace.stats()`)."""
        total = cls()
        for layer in stats.layers:
            total += cls(
                layer.assignments,
                layer.dropped,
                layer.extras,
                layer.device_peak_to_mean_before * layer.assignments,
                layer.device_peak_to_mean_after * layer.assignments,
                layer.worst_device_peak_to_mean_after if layer.assignments else 0.0,
                layer.forwards,
                layer.capped_forwards,
            )
        return total

    def __add__(self, other: Tally) -> Tally:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Tally(**{**sums, "worst_after": max(self.worst_after, other.worst_after)})

    def to_dict(self) -> dict[str, Any]:
        """The sums, for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tally:
        """From `to_dict`'s form."""
        return cls(**values)

    def shares(self) -> dict[str, Any]:
        """What people ask for: shares, and the busiest device relative to the mean.

        A mean over forwards and layers, which run one after the other, weighted with assignments;
        without any load every device is at its mean.
        """
        total = self.assignments
        return {
            "assignments": total,
            "dropped_share": self.dropped / total if total else 0.0,
            "extras_share": self.extras / total if total else 0.0,
            "device_peak_to_mean_before": self.device_before / total if total else 1.0,
            "device_peak_to_mean": self.device_after / total if total else 1.0,
            "device_peak_to_mean_worst": self.worst_after if total else 1.0,
            "capped_share_of_forwards": self.capped_forwards / max(1, self.forwards),
        }
