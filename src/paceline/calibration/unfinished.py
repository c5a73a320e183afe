"""Finished layers of a calibration that runs, kept so that a run which was ended can go on."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.stand_ins.file import SCHEMA, Calibration, CalibrationError
from paceline.stand_ins.layer import LayerCalibration

FOLDER = "unfinished"
"""In the folder of a calibration, while it is made."""


class Unfinished:
    """Layers of one run, a calibration file each, under a name that tells runs apart.

    Args:
        folder: in which they are kept.
        settings: whatever else than tokens decides what is found.
        tokens: [rows, length] of every batch.
        calibration: makes a calibration of some layers.
    """

    def __init__(
        self,
        folder: Path,
        settings: Any,
        tokens: Iterable[Tensor],
        calibration: Callable[..., Calibration],
    ) -> None:
        seen = hashlib.sha256(f"{SCHEMA}{settings!r}".encode())
        for ids in tokens:
            seen.update(f"{list(ids.shape)}".encode() + ids.numpy().tobytes())
        self._folder, self._calibration = folder / seen.hexdigest()[:16], calibration

    def found(self, layers: int) -> dict[int, LayerCalibration]:
        """Those of so many layers that were finished."""
        found: dict[int, LayerCalibration] = {}
        for index in range(layers):
            with suppress(CalibrationError):
                (found[index],) = Calibration.load(self._folder / str(index)).layers
        return found

    def keep(self, index: int, layer: LayerCalibration) -> None:
        """Write a layer, whole or not at all."""
        self._calibration(layer).save(self._folder / str(index))


def remove(folder: Path) -> None:
    """Remove what runs left in it."""
    shutil.rmtree(folder, ignore_errors=True)
