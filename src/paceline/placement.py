"""Expert placements: which device hosts which expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.numbers import whole_number
from paceline.text import shortened

MAX_DEVICES = 2**20
"""Limit on the devices of a placement: a typing error must not fill the memory."""


@dataclass(frozen=True)
class ExpertPlacement:
    """The device of every expert, with the experts numbered as the kernel sees them.

    Make one with `contiguous`, `explicit` or `per_expert`. Hashable, so it can key a cache.
    Whole numbers may be of any library.

    Attributes:
        expert_to_device: [experts] device of each expert.
        num_devices: devices, some of which may host no expert.
        sizes: [devices] experts on each device.

    Raises:
        ValueError: if anything is no whole number, or a device outside [0, num_devices).

    Examples:
        >>> ExpertPlacement((0, 0, 1, 1, 1), num_devices=2).sizes
        (2, 3)
    """

    expert_to_device: tuple[int, ...]
    num_devices: int
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _experts: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        hosts, count = _listed(self.expert_to_device), whole_number(self.num_devices)
        if count is None or not 1 <= count <= MAX_DEVICES:
            raise ValueError(
                f"num_devices must be a whole number from 1 to {MAX_DEVICES}, got "
                f"{shortened(self.num_devices)}"
            )
        devices: list[int] = []
        for expert, host in enumerate(hosts):
            device = whole_number(host)
            if device is None or not 0 <= device < count:
                raise ValueError(
                    f"expert_to_device[{expert}] must be a device from 0 to {count - 1}, with "
                    f"num_devices={count}, got {shortened(host)}"
                )
            devices.append(device)
        if not devices:
            raise ValueError("expert_to_device must have at least 1 expert, got none")
        experts: list[list[int]] = [[] for _ in range(count)]
        for expert, device in enumerate(devices):
            experts[device].append(expert)
        object.__setattr__(self, "expert_to_device", tuple(devices))
        object.__setattr__(self, "num_devices", count)
        object.__setattr__(self, "_experts", tuple(map(tuple, experts)))
        object.__setattr__(self, "_hash", hash((self.expert_to_device, self.num_devices)))
        object.__setattr__(self, "sizes", tuple(map(len, experts)))

    def __hash__(self) -> int:
        return self._hash  # of every expert's device, so computed once

    @classmethod
    def contiguous(cls, num_experts: int, num_devices: int) -> ExpertPlacement:
        """Place experts in order over the devices; sizes differ by at most one, larger first.

        Raises:
            ValueError: unless 1 <= num_devices <= num_experts, both whole numbers.

        Examples:
            >>> ExpertPlacement.contiguous(num_experts=6, num_devices=4).expert_to_device
            (0, 0, 1, 1, 2, 3)
        """
        experts, devices = whole_number(num_experts), whole_number(num_devices)
        if experts is None or experts < 1:
            raise ValueError(f"num_experts must be a whole number >= 1, got {num_experts!r}")
        if devices is None or not 1 <= devices <= experts:
            raise ValueError(
                f"num_devices must be from 1 to {experts} for {experts} experts, got "
                f"{num_devices!r}"
            )
        size, larger = divmod(experts, devices)
        sizes = [size + (device < larger) for device in range(devices)]
        return cls(tuple(d for d, n in enumerate(sizes) for _ in range(n)), devices)

    @classmethod
    def explicit(
        cls,
        expert_to_device: Sequence[int] | Mapping[int, int],
        num_devices: int | None = None,
    ) -> ExpertPlacement:
        """Make a placement from a list (or mapping) of devices; `num_devices` adds empty ones.

        Raises:
            ValueError: on a gap in the experts, or a device outside [0, num_devices).

        Examples:
            >>> ExpertPlacement.explicit([0, 0, 1, 0]).sizes
            (3, 1)
        """
        hosts: Any = expert_to_device
        if isinstance(hosts, Mapping):
            experts = list(hosts)
            if {whole_number(expert) for expert in experts} != set(range(len(experts))):
                raise ValueError(
                    f"expert_to_device must have every expert from 0 up, got {experts}"
                )
            hosts = [hosts[expert] for expert in sorted(experts)]
        hosts = _listed(hosts)
        if num_devices is None:
            num_devices = max([0, *(whole_number(host) or 0 for host in hosts)]) + 1
        return cls(hosts, num_devices)

    @classmethod
    def per_expert(cls, num_experts: int) -> ExpertPlacement:
        """Place every expert on a device of its own, the default without a placement.

        Examples:
            >>> ExpertPlacement.per_expert(3).num_devices
            3
        """
        return cls.contiguous(num_experts, num_experts)

    @property
    def num_experts(self) -> int:
        """Number of experts on all devices."""
        return len(self.expert_to_device)  # a constant to a compiler, which a field is not

    def experts_of(self, device: int) -> tuple[int, ...]:
        """Return the experts on a device, in order.

        Raises:
            ValueError: for a device outside [0, num_devices).

        Examples:
            >>> ExpertPlacement.contiguous(num_experts=6, num_devices=4).experts_of(1)
            (2, 3)
        """
        index = whole_number(device)
        if index is None or not 0 <= index < self.num_devices:
            raise ValueError(f"device must be from 0 to {self.num_devices - 1}, got {device!r}")
        return self._experts[index]


def _listed(hosts: Any) -> tuple[Any, ...]:
    """Return the devices of the experts as a tuple, from any sequence or array."""
    try:
        if not isinstance(hosts, (str, bytes)):
            return tuple(hosts)
    except TypeError:  # it can't be iterated over
        pass
    raise ValueError(f"expert_to_device must be one device per expert, got {hosts!r}")


def describe_placements(placements: Sequence[ExpertPlacement]) -> str:
    """Describe how experts are placed, in one layer or in several.

    >>> describe_placements([ExpertPlacement.contiguous(8, 4)] * 2)
    'experts placed in order'
    >>> describe_placements([ExpertPlacement.explicit([1, 0])])
    'experts placed as given'
    """
    if all(_in_order(placement) for placement in placements):
        return "experts placed in order"
    return "experts placed " + ("as given" if len(set(placements)) == 1 else "layer by layer")


def _in_order(placement: ExpertPlacement) -> bool:
    experts, devices = placement.num_experts, placement.num_devices
    return devices <= experts and placement == ExpertPlacement.contiguous(experts, devices)
