"""The hardware and library versions that every report and benchmark result names."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("paceline", "torch", "transformers", "numpy", "plotly")


def processor() -> str:
    """Return the name of the CPU as the operating system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that figures depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def system_info() -> dict[str, Any]:
    """Return hardware and library versions; no host name, no user name, no path."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "load_average_at_start": load,
        },
        "versions": library_versions(),
    }
