"""`paceline calibrate-hardware`: fit the cost model to this machine, or judge the presets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.errors import guarded
from paceline.cli.model_options import AsJson

_QUIET = 0.03  # difference of two runs of one case


@guarded
def calibrate_hardware(
    out: Annotated[
        Path | None, typer.Option(help="File to write; paceline plan --hardware reads it.")
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(help="GB/s between devices, one way, which is not measured here."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Runs of every case; the fastest counts.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads on a CPU: one device's.")] = 1,
    published: Annotated[
        bool,
        typer.Option(
            "--published", help="Measure nothing: print presets beside published timings."
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Fit the cost model's device to this machine, and judge it on shapes it hasn't seen.

    Times the experts of layers of several sizes, from one row an expert to hundreds, one to two
    minutes on a CPU. Without it `paceline plan` goes by presets, made from published figures; how
    far those are from published timings is what --published prints.

    \b
    Examples:
      paceline calibrate-hardware --out here.json
      paceline calibrate-hardware --published
    """
    for name, value in (("rounds", rounds), ("threads", threads)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if link is not None and not link > 0:
        raise ValueError(f"--link must be above 0, got {link}")
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    result = _published() if published else _measured(out, link, rounds, threads)
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
    elif published:
        _show_published(result)
    else:
        _show_measured(result, out)


def _published() -> dict[str, Any]:
    from paceline.analysis.hardware import PRESETS
    from paceline.analysis.published import distances, paper_figures, paper_unrecorded

    return {
        "presets": {name: hardware.source for name, hardware in PRESETS.items()},
        "distances": [
            {
                "table": d.table,
                "case": d.case,
                "unit": d.unit,
                "published": d.published,
                "predicted": d.predicted,
                "error": d.error,
            }
            for d in [*distances(), *paper_figures(), *paper_unrecorded()]
        ],
    }


def _measured(out: Path | None, link: float | None, rounds: int, threads: int) -> dict[str, Any]:
    from dataclasses import asdict

    import torch

    from paceline.analysis.hardware import save_hardware
    from paceline.bench import hardware as bench
    from paceline.bench.timing import keep_freed_memory
    from paceline.cli.progress import progress
    from paceline.system_info import system_info

    torch.set_num_threads(threads)
    keep_freed_memory()
    sizes = bench.FIT_SIZES + bench.HELD_OUT_SIZES
    with progress() as tell:
        timings = bench.measure(sizes, rounds=rounds, progress=tell)
    seen = [t for t in timings if (t.shape.hidden, t.shape.expert_size) in bench.FIT_SIZES]
    unseen = [t for t in timings if t not in seen]
    found = bench.fit(seen, unseen, link=None if link is None else link * 1e9)
    cases = [
        {
            "hidden": timing.shape.hidden,
            "expert_size": timing.shape.expert_size,
            "rows": list(timing.rows),
            "decode": bench.is_decode(timing),
            "seconds": timing.seconds,
            "error": error,
        }
        for timing, error in zip(unseen, found.held_out, strict=True)
    ]
    decode = [e for t, e in zip(unseen, found.held_out, strict=True) if bench.is_decode(t)]
    several = len(bench.FIT_SIZES) > 2  # what is left must do for a fit
    others = bench.left_out(seen) if several else []
    more = {
        "held_out": cases,
        "held_out_within_15_percent": bench.within(found.held_out),
        "held_out_worst": max(map(abs, found.held_out)),
        "decode_cases": len(decode),
        "decode_within_15_percent": bench.within(decode),
        "each_size_left_out": len(others),
        "each_size_left_out_within_15_percent": bench.within(others),
        "each_size_left_out_worst": max(map(abs, others), default=None),
        "unrest": bench.unrest(timings),
        "threads": threads,
        **system_info(),
    }
    if out is not None:
        save_hardware(found.hardware, out, more)
    return {"hardware": asdict(found.hardware), **more}


def _show_measured(result: Mapping[str, Any], out: Path | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    hardware = result["hardware"]
    console.print(
        f"{hardware['flops'] / 1e9:.0f} GFLOP/s in large products, "
        f"{hardware['memory'] / 1e9:.1f} GB/s of weights, {hardware['per_expert'] * 1e6:.0f} us an "
        "expert."
    )
    table = Table(title="Layers that took no part in the fit", title_justify="left", box=box.SIMPLE)
    for name in ("hidden x size", "rows an expert", "measured ms", "model's error"):
        table.add_column(name, justify="right")
    for case in result["held_out"]:
        table.add_row(
            f"{case['hidden']} x {case['expert_size']}",
            f"{sum(case['rows']) / len(case['rows']):.1f}",
            f"{case['seconds'] * 1e3:.2f}",
            f"{case['error']:+.0%}",
        )
    console.print(table)
    console.print(
        f"{result['held_out_within_15_percent']} of {len(result['held_out'])} of them within 15%, "
        f"the worst off by {result['held_out_worst']:.0%}; of {result['decode_cases']} decode "
        f"cases (few rows an expert, weights rule) {result['decode_within_15_percent']}."
    )
    if result["each_size_left_out"]:
        console.print(
            f"Of the others, each size left out of the fit in turn: "
            f"{result['each_size_left_out_within_15_percent']} of {result['each_size_left_out']} "
            f"within 15%, the worst off by {result['each_size_left_out_worst']:.0%}."
        )
    console.print(f"The fastest two runs of a case differ by {result['unrest']:.0%}.")
    if result["unrest"] > _QUIET:
        console.print("That is not a quiet machine: the fit can't be better than its timings.")
    if out is None:
        console.print("Not kept: --out FILE does that.")
    else:
        console.print(f"Kept in {out}: paceline plan --hardware {out}", markup=False)


def _show_published(result: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Presets beside published timings", title_justify="left", box=box.SIMPLE)
    table.add_column("published by")
    table.add_column("case")
    for name in ("published", "model", "error"):
        table.add_column(name, justify="right")
    for row in result["distances"]:
        table.add_row(
            row["table"],
            row["case"],
            f"{row['published']:.4g} {row['unit']}",
            f"{row['predicted']:.4g}",
            f"{row['error']:+.0%}",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "LLEP pays for moving experts, which isn't modelled; Mega MoE overlaps what is added here. "
        "SYNTHETIC: nobody recorded that model's routing here, and the paper gives the peak of its "
        "worst layer alone, so that such a figure bounds the whole model's."
    )
