"""The page of `paceline loads --html`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.files import write_text
from paceline.reporting import figures
from paceline.reporting.load_map import load_map
from paceline.reporting.page import render


def write_loads(result: Mapping[str, Any], path: Path) -> None:
    """Write the page, readable by its owner only: expert loads say something about the text.

    Raises:
        OSError: if the file can't be written.
    """
    write_text(path, loads_page(result), private=True)


def loads_page(result: Mapping[str, Any]) -> str:
    """The HTML page of a result of `observe_loads` with `environment` and `verdict`."""
    layers = result["layers"]
    names = [str(number) for number in range(len(layers))]
    plots = {
        "peaks": figures.layer_peaks(
            names,
            {
                "busiest device": [x["device_peak_to_mean_before"] for x in layers],
                **(
                    {"with the policy": [x["device_peak_to_mean_after"] for x in layers]}
                    if result["policy"] is not None
                    else {}
                ),
                "busiest expert": [x["expert_peak_to_mean_before"] for x in layers],
            },
        )
    }
    if len({layer["experts"] for layer in layers}) == 1:  # one map needs one number of experts
        loads = [figures.relative(layer["expert_loads_before"]) for layer in layers]
        devices = [layer["expert_to_device"] for layer in layers]
        plots["map"] = load_map({"": loads}, devices, [f"layer {name}" for name in names])
    return render(
        "loads.html.j2", plots, title="Paceline: expert loads", results=result, plots=list(plots)
    )
