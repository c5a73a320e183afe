"""Hardware figures that the cost of a MoE layer depends on: presets, and a file form.

Sources of the presets: peak dense FLOP/s, memory and links are the makers'; reachable bfloat16
FLOP/s (of large matrix products) are those measured in stas00/ml-engineering (744d01e), peaks also
in pytorch/torchtitan (b5bcd76); the H20's are from the press, since its maker publishes none. Where
no reachable figure was measured, it is 0.8 of the peak, as on H100. Links: one way, per device,
within a machine; between machines 400 Gbit/s per device. The latency of an exchange and the share
of a network link that it reaches are DeepEP's on H800 (its README).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from paceline.files import MOST_SETTINGS, atomic_file, read_plain
from paceline.text import shortened

Precision = Literal["bf16", "fp8", "fp4"]
BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""Bytes of a weight, scales not counted."""


@dataclass(frozen=True)
class Hardware:
    """Figures of one device of many alike.

    Attributes:
        flops: reachable FLOP/s in bfloat16 (float32 where a calibration says so).
        memory: bytes/s from its memory.
        memory_size: bytes of it.
        link: bytes/s to other devices of the same machine, one way, in all.
        network: bytes/s to devices of other machines.
        devices_per_node: devices of a machine.
        fp8: reachable FLOP/s in 8 bits; 0: it has none.
        launch: seconds that running a layer's experts takes at least.
        per_expert: seconds of each expert that gets rows, beside its weights and rows.
        exchange: seconds that a dispatch or a combine takes at least.
        tile: rows of an expert are computed in multiples of this.
        slow_rows: the first rows of each expert that run at another speed.
        slow_flops: reachable FLOP/s of those; 0: the same as the others.
        activations: bytes/s of what is read and written for each row; 0: as `memory`.
        precision: the one that was measured; "": any that it computes in.
        source: where the figures are from.

    Raises:
        ValueError: if a rate is not above 0, or a time below it.

    >>> Hardware("mine", flops=1e15, memory=3e12, memory_size=8e10, link=4e11).tile
    128
    """

    name: str
    flops: float
    memory: float
    memory_size: float
    link: float
    network: float = 50e9 * 0.92
    devices_per_node: int = 8
    fp8: float = 0.0
    launch: float = 5e-6
    per_expert: float = 0.0
    exchange: float = 20e-6
    tile: int = 128
    slow_rows: int = 0
    slow_flops: float = 0.0
    activations: float = 0.0
    precision: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "memory_size", "link", "network"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"hardware {self.name}: {name} must be above 0, got {getattr(self, name)}"
                )
        for name in ("fp8", "launch", "per_expert", "exchange", "slow_flops", "activations"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"hardware {self.name}: {name} must be at least 0, got {getattr(self, name)}"
                )
        if self.tile < 1 or self.devices_per_node < 1 or self.slow_rows < 0:
            raise ValueError(
                f"hardware {self.name}: tile and devices_per_node must be at least 1 and slow_rows "
                f"at least 0, got {self.tile}, {self.devices_per_node} and {self.slow_rows}"
            )

    def reachable(self, precision: str) -> float:
        """Return the FLOP/s of matrix products in a precision; weights of 4 bits are computed in 8.

        Raises:
            ValueError: if the device doesn't compute in it.
        """
        if precision == self.precision or (not self.precision and precision in ("bf16", "fp32")):
            return self.flops
        if self.precision:
            raise ValueError(
                f"{self.name} was measured in {self.precision}: {precision} is not known."
            )
        if not self.fp8:
            raise ValueError(f"{self.name} doesn't compute in {precision}: allowed is bf16.")
        return self.fp8


def _preset(
    name: str,
    peak: float,
    reached: float | None,
    fp8: float,
    memory: float,
    size: float,
    link: float,
    source: str = "stas00/ml-engineering 744d01e, pytorch/torchtitan b5bcd76",
) -> Hardware:
    """Make a preset from TFLOPS, TB/s, GB and GB/s."""
    flops = 0.8 * peak if reached is None else reached
    return Hardware(
        name=name,
        flops=flops * 1e12,
        memory=memory * 1e12,
        memory_size=size * 1e9,
        link=link * 1e9,
        fp8=fp8 * flops / peak * 1e12,
        source=source,
    )


PRESETS = {
    hardware.name: hardware
    for hardware in (
        _preset("h20", 148, None, 296, 4.0, 96, 376, "figures from the press"),
        _preset("h100", 989, 794, 1979, 3.35, 80, 376),
        _preset("h200", 989, 794, 1979, 4.8, 141, 376),
        _preset("b200", 2250, 1745, 4500, 8.0, 180, 752),
        _preset("a100", 312, 271, 0, 2.04, 80, 250),
        _preset("l40s", 362, None, 733, 0.864, 48, 27),
        _preset("mi300x", 1307, 668, 2610, 5.3, 192, 374),
    )
}
"""By name. Links are at 0.836 of the makers' figure, the share measured on H100 (376 of 450)."""


def hardware_of(name: str) -> Hardware:
    """Return a preset, or read a file from `paceline bench hardware`.

    Raises:
        ValueError: if there is neither, or the file holds no hardware.

    >>> hardware_of("h20").memory_size / 1e9
    96.0
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"hardware must be one of {', '.join(PRESETS)}, or a file from paceline bench "
            f"hardware, got {name!r}"
        )
    try:
        values: Any = json.loads(read_plain(path, MOST_SETTINGS).decode("utf-8"))["hardware"]
        known = {field.name for field in fields(Hardware)}
        if not isinstance(values, dict) or not set(values) <= known:
            raise ValueError(f"its fields are {', '.join(sorted(known))}")
        return Hardware(**values)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no hardware: {shortened(str(error), 200)}.") from None


def save_hardware(hardware: Hardware, path: Path, more: dict[str, Any] | None = None) -> None:
    """Write a file that `hardware_of` reads.

    Args:
        more: further content, such as how it was measured.

    Raises:
        OSError: if the file can't be written.
    """
    content = {"hardware": asdict(hardware), **(more or {})}
    with atomic_file(path, private=False) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def linked(hardware: Hardware, link: float | None, network: float | None) -> Hardware:
    """Replace the links of a device.

    Args:
        link: bytes/s within a machine, None: as it is.
        network: bytes/s between machines, None: as it is.
    """
    return replace(
        hardware,
        link=hardware.link if link is None else link,
        network=hardware.network if network is None else network,
    )
