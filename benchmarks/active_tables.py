"""The tables of docs/decode.md, from the results of active_experts.py, active_time.py and others.

python benchmarks/active_tables.py --write     put them into the page
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from active_experts import GOAL, PLACED
from page_tables import filled, main

from paceline.evaluation.tables import table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "decode.md"
Row = Mapping[str, Any]


def results(name: str, room: str = "benchmarks") -> dict[str, Any]:
    """Read the results of a program."""
    path = ROOT / room / "results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def tables() -> dict[str, str]:
    """Return name in the page -> Markdown."""
    experts = results("active_experts")["results"]
    experts += results("active_rules", "research")["results"]
    timed = results("active_time")["rows"] + results("active_overhead")["rows"]
    made: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {
        "quality": _quality(experts),
        "layers": _layers(experts),
        "choices": _choices(experts),
        "peers": _peers(experts),
        "in-all": _in_all(experts),
        "calls": _calls(timed),
        "devices": _steps(timed, "devices"),
        "model": _steps(timed, "model"),
        "overhead": _overhead(timed),
        "ranks": _ranks(results("active_ranks")["rows"]),
        "models": _models(results("active_models")["rows"]),
    }
    return {name: "\n".join(table(list(head), rows)) + "\n" for name, (head, rows) in made.items()}


def page(text: str) -> str:
    """Replace the tables of the page."""
    return filled(text, tables())


Table = tuple[Sequence[str], list[list[str]]]


def _change(row: Row | None) -> str:
    if row is None:
        return "–"
    found = row["perplexity_change"]
    return f"{found['mean']:+.2%} ± {found['standard_error']:.2%}"


def _read(row: Row) -> str:
    return f"{row['most_active_before']:.2f} to {row['most_active_after']:.2f}"


def _find(rows: Sequence[Row], /, **fields: Any) -> Row | None:
    return next((r for r in rows if all(r.get(k) == v for k, v in fields.items())), None)


def _must(rows: Sequence[Row], /, **fields: Any) -> Row:
    found = _find(rows, **fields)
    assert found is not None, fields
    return found


def _batches(rows: Sequence[Row]) -> list[int]:
    return sorted({row["batch"] for row in rows if "batch" in row})


def _quality(rows: Sequence[Row]) -> Table:
    head = ["B", "batches", "max_active", "read", "dropped", "dropped alone", "with stand-ins",
            "read, placed", "with stand-ins, placed"]  # fmt: skip
    lines = []
    for batch in _batches(rows):
        for kind in ("one domain", "mixed"):
            for most in (3, 2, 1):
                where = {"kind": kind, "batch": batch, "most": most}
                alone = _must(rows, family="max_active", stand_ins=False, **where)
                stand_ins = _must(rows, family="max_active", stand_ins=True, **where)
                placed = _must(rows, family=PLACED, **where)
                lines.append([
                    str(batch), kind, str(most), _read(stand_ins),
                    f"{stand_ins['dropped_share']:.1%}",
                    _change(alone), _change(stand_ins), _read(placed), _change(placed),
                ])  # fmt: skip
    return head, lines


def _layers(rows: Sequence[Row]) -> Table:
    head = ["B", "batches", "max_active by layer", "read", "with stand-ins, placed"]
    chosen = [r for r in rows if r["family"] == PLACED and isinstance(r["most"], list)]
    return head, [
        [str(r["batch"]), r["kind"], ", ".join(map(str, r["most"])), _read(r), _change(r)]
        for r in chosen
    ]


def _choices(rows: Sequence[Row]) -> Table:
    names: dict[str, dict[str, Any]] = {
        "**sum of weights**": {"family": "max_active"},
        **{
            name: {"family": f"by {name}"}
            for name in ("votes", "first votes", "largest weight", "squared weight",
                         "contribution", "random")
        },
        "sum of weights, last step's × 1.25": {"family": "sticky", "bonus": 0.25},
        "sum of weights, last step's × 2": {"family": "sticky", "bonus": 1.0},
        "sum of weights, renormalized": {"family": "renormalized"},
        "sum of weights, refilled": {"family": "refilled"},
    }  # fmt: skip
    head, lines = ["by"], []
    for batch in _batches(rows):
        head += [f"B = {batch}", f"B = {batch}, stand-ins"]
    for name, fields in names.items():
        line = [name]
        for batch in _batches(rows):
            where = {"kind": "one domain", "batch": batch, "most": GOAL[batch], **fields}
            line += [_change(_find(rows, stand_ins=left, **where)) for left in (False, True)]
        lines.append(line)
    return head, lines


def _way(row: Row) -> str:
    stand_ins = ", stand-ins" if row["stand_ins"] else ""
    for key, shown in (("k0", "OEA, k0 = {}"), ("k", "top {}")):
        if key in row:
            return shown.format(row[key])
    return str(row["family"]).removesuffix(", one device") + stand_ins


def _peers(rows: Sequence[Row]) -> Table:
    families = ("max_active", "Lynx", "XShare", "OEA", "top-k truncation")
    head = ["B", "way", "read by the busiest device", "read in all", "perplexity"]
    some = [r for r in rows if r["kind"] == "one domain" and r["family"] in families]
    some = [r for r in some if r["most_active_after"] > 1.5]
    some.sort(key=lambda r: (r["batch"], -round(r["most_active_after"], 1), _mean(r)))
    return head, [
        [str(r["batch"]), _way(r), f"{r['most_active_after']:.2f}", f"{r['active_after']:.1f}",
         _change(r)] for r in some
    ]  # fmt: skip


def _mean(row: Row) -> float:
    mean: float = row["perplexity_change"]["mean"]
    return mean


def _in_all(rows: Sequence[Row]) -> Table:
    families = ("max_active, one device", "OEA")
    some = [r for r in rows if r["kind"] == "one domain" and r["family"] in families]
    some.sort(key=lambda r: (r["batch"], -round(r["active_after"]), _mean(r)))
    return ["B", "way", "read in all, of 32", "perplexity"], [
        [str(r["batch"]), _way(r), f"{r['active_after']:.1f}", _change(r)] for r in some
    ]


NAMES = {"olmoe": "OLMoE", "qwen3-30b-a3b": "Qwen3-30B-A3B"}


def _calls(rows: Sequence[Row]) -> Table:
    calls = [r for r in rows if r["part"] == "calls"]
    cells = list(dict.fromkeys((r["experts"], r["rows"]) for r in calls))
    head = ["layer", *(f"{e} × {n}" if e else "none" for e, n in cells)]
    return head, [
        [NAMES[shape]]
        + [
            f"{1e3 * _must(calls, shape=shape, experts=e, rows=n)['seconds']['median']:.1f}"
            for e, n in cells
        ]
        for shape in dict.fromkeys(r["shape"] for r in calls)
    ]


def _ratio(row: Row) -> str:
    ratio = row["ratio"]
    return f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})"


def _bound(row: Row) -> list[str]:
    return [f"{row['bound']:.2f}", f"{row['ratio']['median'] / row['bound']:.2f}"]


def _steps(rows: Sequence[Row], part: str) -> Table:
    head = ["layer", "B", "max_active", "experts read", "ratio", "bytes", "of it"]
    split: Callable[[Row], list[str]] = lambda _: []  # noqa: E731
    if part == "model":
        head += ["experts, ms", "routing, ms", "rest, ms"]

        def split(row: Row) -> list[str]:
            pairs = ((row["split_before"][k], row["split"][k]) for k in row["split"])
            return [f"{1e3 * before:.1f} to {1e3 * after:.1f}" for before, after in pairs]

    return head, [
        [NAMES[r["shape"]], str(r["batch"]), r["policy"].removeprefix("max_active="),
         f"{r['active_before']:.0f} to {r['active_after']:.0f}", _ratio(r), *_bound(r), *split(r)]
        for r in rows if r["part"] == part and r["bound"] > 1
    ]  # fmt: skip


def _overhead(rows: Sequence[Row]) -> Table:
    head = ["layer", "B", "experts read", "whole step, ratio", "added beside products", "of a step"]
    return head, [
        [NAMES[r["shape"]], str(r["batch"]), f"{r['active_before']:.0f}",
         f"{r['ratio']['median']:.3f} ± {r['median_error']:.3f}",
         f"{1e3 * r['added']['seconds']:.2f} ms",
         f"{r['added']['share']:.2%} ± {r['added']['share_error']:.2%}"]
        for r in rows if r["part"] == "overhead"
    ]  # fmt: skip


def _ranks(rows: Sequence[Row]) -> Table:
    head = ["layer", "batch", "B a batch", "policy", "experts read", "ratio", "bytes", "of it"]
    return head, [
        [NAMES[r["shape"]], r["part"], str(r["batch"]), r["policy"],
         f"{r['active_before']:.0f} to {r['active_after']:.0f}", _ratio(r), *_bound(r)]
        for r in rows if r["bound"] > 1
    ]  # fmt: skip


def _models(rows: Sequence[Row]) -> Table:
    head = ["model", "B", "policy", "experts read per layer", "tokens per second", "ratio", "bytes",
            "perplexity"]  # fmt: skip
    return head, [
        [r["model"], str(r["batch"]), r["policy"],
         f"{r['experts_read_before']:.1f} to {r['experts_read']:.1f}",
         f"{r['tokens_per_second']['median']:.1f}", _ratio(r), f"{r['bound']:.2f}",
         _change(r) if "perplexity_change" in r else "–"]
        for r in rows if r["policy"] != "untouched"
    ]  # fmt: skip


if __name__ == "__main__":
    main(PAGE, tables())
