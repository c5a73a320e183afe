"""The study of docs/study.md: its commands, their results, and the tables made from them.

    python research/study.py            print the tables from results/study/
    python research/study.py --write    run every command again and keep what it says
    python research/study.py --whole --traces FOLDER --write    the same on the whole traces that
                                          the samples are parts of, into results/study_whole/

Nothing is timed; rows are counted. Times in decisions are the cost model's.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.demo.assets import domains, read_text

RESULTS = Path(__file__).resolve().parent / "results" / "study"
WHOLE = RESULTS.with_name("study_whole")
INTENT, LAW = "sample:esft_v2lite_intent", "sample:esft_v2lite_law"
DECODE = "sample:gpt_oss_20b_decode"
CONFIGS: dict[str, dict[str, Any]] = {
    "v2lite.json": {
        "hidden_size": 2048, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "n_shared_experts": 2,
    },
    "gpt_oss.json": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip
"""What the cost model needs of each model's config.json."""

RECORD = (
    "paceline record demo --prompts prompts.jsonl --content choices --max-new-tokens 24 "
    "--batch-size 72 --out demo_trace"
)
"""Prefill and decode of one model: the demo model goes on with the beginnings of its texts."""

COMMANDS = {
    "report_law": f"paceline loads {LAW} --batch-tokens 512 --html report_law.html",
    "report_intent": f"paceline loads {INTENT} --batch-tokens 512 --html report_intent.html",
    "report_decode": f"paceline loads {DECODE} --html report_decode.html",
    "decode_256": f"paceline loads {DECODE} --batch-tokens 256 --html decode_256.html",
    "decode_1024": f"paceline loads {DECODE} --batch-tokens 1024 --html decode_1024.html",
    "place_intent": f"paceline plan {INTENT} --judge {LAW} --place-only --batch-tokens 512 "
    "--out intent.toml",
    "place_law": f"paceline plan {LAW} --judge {INTENT} --place-only --batch-tokens 512 "
    "--out law.toml",
    "transfer_law": f"paceline loads {LAW} --plan intent.toml --batch-tokens 512 "
    "--html transfer_law.html",
    "transfer_intent": f"paceline loads {INTENT} --plan law.toml --batch-tokens 512 "
    "--html transfer_intent.html",
    "plan_prefill": f"paceline plan {LAW} --model-config v2lite.json --hardware h20",
    "plan_turned": f"paceline plan {INTENT} --judge {LAW} --model-config v2lite.json "
    "--hardware h20",
    "loads_demo": "paceline loads demo_trace",
    "plan_decode": f"paceline plan {DECODE} --model-config gpt_oss.json --hardware h100",
}
"""Every command of the study; --json is added."""


def whole(command: str) -> str:
    """Rewrite a command for the whole traces in the folder `traces`, in batches twice as large.

    >>> whole("paceline loads sample:esft_v2lite_law --batch-tokens 512")[:50]
    'paceline loads traces/esft_v2lite_law.npz --batch-'
    """
    words = command.replace("--batch-tokens 512", "--batch-tokens 1024").split()
    config = "gpt_oss.json" if DECODE in words else "v2lite.json"
    said = [f"traces/{w.removeprefix('sample:')}.npz" if w.startswith("sample:") else w
            for w in words]  # fmt: skip
    return " ".join(said if "--model-config" in words else [*said, "--model-config", config])


WHOLE_COMMANDS = {
    name: whole(command) for name, command in COMMANDS.items() if name != "loads_demo"
}
"""The same on the whole traces."""

_KEPT = ("schema", "devices", "batch_tokens", "batches", "batches_are", "judged_batches",
         "judged_on", "placement_is", "keep", "ways", "verdict", "second_half", "other_trace",
         "decision", "hardware", "trace", "groups")  # fmt: skip


def run(name: str, commands: Mapping[str, str] = COMMANDS) -> dict[str, Any]:
    """Run a command in a folder that has the configs: its result, without machine details.

    Raises:
        RuntimeError: if it fails.
    """
    done = CliRunner().invoke(app, [*shlex.split(commands[name])[1:], "--json"])
    if done.exit_code:
        raise RuntimeError(f"{commands[name]}: {done.stderr}")
    found = json.loads(done.stdout)
    kept = {key: found[key] for key in _KEPT if key in found}
    if str(kept["schema"]).startswith("paceline-report"):
        kept["ways"] = [{k: v for k, v in way.items() if k != "layers"} for way in kept["ways"]]
    for part in ("second_half", "other_trace"):  # figures layer by layer would fill pages
        for each in (kept.get(part) or {}).get("ways", {}).values():
            each.pop("layers", None)
    return {"command": f"{commands[name]} --json", **kept}


def way(result: Mapping[str, Any], placement: str, unit: Any, gamma: Any) -> Mapping[str, Any]:
    """Find one of a report's ways."""
    found: Mapping[str, Any]
    for found in result["ways"]:
        if (found["placement"], found["unit"], found["gamma"]) == (placement, unit, gamma):
            return found
    raise KeyError((placement, unit, gamma))


def tables(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Write the tables of docs/study.md, by the question they answer."""
    traffics = {"law": "report_law", "intent": "report_intent", "gpt-oss, decode": "report_decode"}
    out = {}
    rows = []
    for traffic, name in traffics.items():
        for gamma in (1.0, 1.25, 1.5, 2.0):
            cells = [traffic, f"{gamma:g}"]
            for unit in ("device", "expert"):
                cells += _cap(way(results[name], "in order", unit, gamma))
            rows.append(cells)
    out["device against expert"] = _table(
        ["traffic", "factor", "device: dropped", "mass lost", "gain",
         "expert: dropped", "mass lost", "gain"],
        rows,
    )  # fmt: skip
    rows = []
    for traffic, name in traffics.items():
        result = results[name]
        rows.append(
            [
                traffic,
                _times(way(result, "in order", None, None)["busiest_device"]),
                _gain(way(result, "placed", None, None)),
                *_cap(way(result, "in order", "device", 1.25))[1:],
                *_cap(way(result, "placed", "device", 1.25))[1:],
                *_cap(way(result, "in order", "device", 1.0))[1:],
                *_cap(way(result, "placed", "device", 1.0))[1:],
            ]
        )
    out["place, cap, both"] = _table(
        ["traffic", "busiest device", "place", "cap 1.25: mass lost", "gain",
         "place, cap 1.25: mass lost", "gain", "cap 1.0: mass lost", "gain",
         "place, cap 1.0: mass lost", "gain"],
        rows,
    )  # fmt: skip
    rows = []
    for judge, fitted in (("law", "intent"), ("intent", "law")):
        own, other = results[f"place_{judge}"], results[f"place_{fitted}"]
        turned = results[f"transfer_{judge}"]
        rows.append(
            [
                judge,
                _times(other["other_trace"]["ways"]["in_order"]["overall"]),
                _times(own["second_half"]["ways"]["search"]["overall"]),
                _times(other["other_trace"]["ways"]["search"]["overall"]),
                *_cap(way(turned, "in order", "device", 1.25))[1:],
                *_cap(way(turned, "placed", "device", 1.25))[1:],
            ]
        )
    out["transfer"] = _table(
        ["judged on", "in order", "placed for it (second half)", "placed for the other",
         "in order, cap 1.25: mass lost", "gain", "placed for the other, cap 1.25: mass lost",
         "gain"],
        rows,
    )  # fmt: skip
    rows = []
    sizes = {"64, a step": "report_decode", "256": "decode_256", "1,024": "decode_1024"}
    for size, name in sizes.items():
        result = results[name]
        rows.append(
            [
                size,
                _times(way(result, "in order", None, None)["busiest_device"]),
                _gain(way(result, "placed", None, None)),
                *_cap(way(result, "in order", "device", 1.25)),
            ]
        )
    out["batch size"] = _table(
        ["tokens per batch", "busiest device", "place", "cap 1.25: dropped", "mass lost", "gain"],
        rows,
    )
    if "loads_demo" in results:
        out["phases"] = _table(
            ["phase", "tokens", "busiest device"],
            [
                [group["phase"], f"{group['tokens']:,}", _times(group["device_peak_to_mean"])]
                for group in sorted(results["loads_demo"]["groups"], key=lambda g: -g["tokens"])
            ],
        )
    part = results["plan_decode"]["second_half"]
    nothing = part["ways"]["nothing"]
    rows = [["in order", "none", f"{nothing['most_active_experts']:.2f}", "0", "0", "+0.0%"]]
    for point in part["active"]:
        rows.append(
            [
                point["placement"].replace("_", " "),
                str(point["max_active"]),
                f"{point['most_active_experts']:.2f}",
                f"{point['dropped_share']:.1%}",
                f"{point['gate_mass_lost']:.1%}",
                f"{point['gain']:+.1%}",
            ]
        )
    out["active experts"] = _table(
        ["experts", "max_active", "read per device", "dropped", "mass lost", "gain in time"], rows
    )
    rows = []
    for name, what in (
        ("plan_prefill", "law, its second half; H20"),
        ("plan_turned", "intent, judged on law; H20"),
        ("plan_decode", "gpt-oss, decode; H100"),
    ):
        part = results[name].get("other_trace") or results[name]["second_half"]
        ways = part["ways"]
        rows.append(
            [
                what,
                f"{part['perfect_balance_gain']:+.1%}",
                *(f"{ways[w]['gain']:+.1%}" for w in ("place", "cap", "place and cap")),
                results[name]["decision"],
            ]
        )
    out["decisions"] = _table(
        ["traffic; hardware", "perfect balance", "place", "cap", "both", "decision"], rows
    )
    return out


def load(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Load the committed results."""
    names = COMMANDS if folder == RESULTS else WHOLE_COMMANDS
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def _cap(found: Mapping[str, Any]) -> list[str]:
    return [f"{found['dropped_share']:.2%}", f"{found['gate_mass_lost']:.2%}", _gain(found)]


def _gain(found: Mapping[str, Any]) -> str:
    return _times(found["gain"])


def _times(value: float) -> str:
    return f"{value:.2f}"


def _table(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def prepare(folder: Path) -> None:
    """Write the files that commands name: configs, prompts, the demo model's trace.

    Raises:
        RuntimeError: if the trace can't be recorded.
    """
    for name, config in CONFIGS.items():
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
    texts = [read_text(name) for name in domains()]
    prompts = [text[start : start + 300] for start in range(0, 3200, 400) for text in texts]
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    done = CliRunner().invoke(app, shlex.split(RECORD)[1:])
    if done.exit_code:
        raise RuntimeError(f"{RECORD}: {done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="run all again")
    parser.add_argument("--whole", action="store_true", help="on the whole traces")
    parser.add_argument("--traces", type=Path, help="folder of the whole traces (.npz)")
    options = parser.parse_args()
    results, commands = (WHOLE, WHOLE_COMMANDS) if options.whole else (RESULTS, COMMANDS)
    if options.write:
        if options.whole and options.traces is None:
            parser.error("--whole --write needs --traces")
        results.mkdir(exist_ok=True)
        traces = options.traces and options.traces.absolute()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            prepare(Path())
            if options.whole:
                Path("traces").symlink_to(traces)
            for name in commands:
                text = json.dumps(run(name, commands), indent=1) + "\n"
                (results / f"{name}.json").write_text(text, encoding="utf-8")
            os.chdir(results)
    for title, table in tables(load(results)).items():
        print(f"\n## {title}\n\n{table}")


if __name__ == "__main__":
    main()
