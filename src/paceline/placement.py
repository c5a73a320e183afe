"""Where things live: which device hosts which expert."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ExpertPlacement:
    """Expert -> device, over one id space: the experts as the kernel sees them.

    Make one with `contiguous`, `explicit` or `per_expert`. Hashable, so it can key a cache.

    Attributes:
        expert_to_device: [experts] device of each expert.
        num_devices: devices, some of which may host no expert.
        sizes: [devices] experts on each device.
    """

    expert_to_device: tuple[int, ...]
    num_devices: int
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _experts: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.expert_to_device:
            raise ValueError("expert_to_device=() is not allowed: it has at least 1 expert.")
        if self.num_devices < 1:
            raise ValueError(f"num_devices={self.num_devices} is not allowed: it is at least 1.")
        for expert, device in enumerate(self.expert_to_device):
            if not isinstance(device, int) or not 0 <= device < self.num_devices:
                raise ValueError(
                    f"expert_to_device[{expert}]={device!r} is not allowed: with "
                    f"num_devices={self.num_devices} a device is from 0 to {self.num_devices - 1}."
                )
        experts: list[list[int]] = [[] for _ in range(self.num_devices)]
        for expert, device in enumerate(self.expert_to_device):
            experts[device].append(expert)
        object.__setattr__(self, "_experts", tuple(map(tuple, experts)))
        object.__setattr__(self, "_hash", hash((self.expert_to_device, self.num_devices)))
        object.__setattr__(self, "sizes", tuple(map(len, experts)))

    def __hash__(self) -> int:
        return self._hash  # of every expert's device, so computed once

    @classmethod
    def contiguous(cls, num_experts: int, num_devices: int) -> ExpertPlacement:
        """Experts in order over the devices; sizes differ by at most one, larger first.

        Raises:
            ValueError: unless 1 <= num_devices <= num_experts.
        """
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts} is not allowed: it is at least 1.")
        if not 1 <= num_devices <= num_experts:
            raise ValueError(
                f"num_devices={num_devices} is not allowed: "
                f"{num_experts} experts go on 1 to {num_experts} devices."
            )
        size, larger = divmod(num_experts, num_devices)
        sizes = [size + (device < larger) for device in range(num_devices)]
        return cls(tuple(d for d, n in enumerate(sizes) for _ in range(n)), num_devices)

    @classmethod
    def explicit(
        cls,
        expert_to_device: Sequence[int] | Mapping[int, int],
        num_devices: int | None = None,
    ) -> ExpertPlacement:
        """From a list (or a mapping of all experts) of devices; `num_devices` adds empty ones.

        Raises:
            ValueError: on a gap in the experts, or a device outside [0, num_devices).
        """
        if isinstance(expert_to_device, Mapping):
            experts = sorted(expert_to_device)
            if experts != list(range(len(experts))):
                raise ValueError(
                    f"expert_to_device has experts {experts}: allowed is every one from 0 up."
                )
            expert_to_device = [expert_to_device[expert] for expert in experts]
        try:
            devices = tuple(operator.index(device) for device in expert_to_device)
        except TypeError:
            raise ValueError(
                f"expert_to_device={expert_to_device!r} is not allowed: it is one device, "
                "a whole number, for each expert."
            ) from None
        return cls(devices, max(devices, default=0) + 1 if num_devices is None else num_devices)

    @classmethod
    def per_expert(cls, num_experts: int) -> ExpertPlacement:
        """Every expert a device of its own: what is meant where no placement is given."""
        return cls.contiguous(num_experts, num_experts)

    @property
    def num_experts(self) -> int:
        """Experts, over all devices."""
        return len(self.expert_to_device)

    def experts_of(self, device: int) -> tuple[int, ...]:
        """The experts on a device, in order.

        Raises:
            ValueError: for a device outside [0, num_devices).
        """
        if not 0 <= device < self.num_devices:
            raise ValueError(
                f"device={device} is not allowed: it is from 0 to {self.num_devices - 1}."
            )
        return self._experts[device]
