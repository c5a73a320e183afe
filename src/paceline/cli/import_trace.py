"""`paceline import`: turn routing that another program wrote into a trace of Paceline's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import check_trace, emit, guarded, print_end, print_lines, progress
from paceline.cli.sources import read_trace
from paceline.cli.trace_loads import count_of


@guarded
def import_trace(
    trace: Annotated[
        list[str],
        typer.Argument(
            help="Trace: a file or folder of any known format; several: ranks, or batches."
        ),
    ],
    out: options.NewTrace,
    experts: options.Experts = None,
    k: options.K = None,
    layers: options.Layers = None,
    model_config: options.ModelConfig = None,
    world_size: options.WorldSize = None,
    physical: options.Physical = False,
    json: options.AsJson = False,
) -> None:
    """Convert routing that vLLM, SGLang, TensorRT-LLM, llama.cpp or others wrote into a trace.

    Every verb that takes a trace also reads such files as they are. A trace of Paceline's own is
    quicker to read, private, and needs none of the options that describe the file.

    Several recordings of forwards are those of the ranks of one run. The tokens of ranks that saw
    their own (data parallelism) come side by side, forward by forward, as a layer computes them;
    ranks that all saw the same (tensor parallelism) count once. Several files that don't tell
    forwards apart, such as a table of counts per kind of traffic, become batches of one trace.

    \b
    Examples:
      paceline import rank0 rank1 rank2 rank3 --out trace
      paceline import completions.jsonl --model-config config.json --out trace
      paceline import expert_distribution_recorder_1764456001.0_0.pt --out trace
      paceline import expert_scores/law --experts 64 --k 6 --out trace
      paceline import monday.json tuesday.json wednesday.json --out trace
    """
    check_trace(out)
    from paceline.traces import save_trace
    from paceline.traces.merge import combined

    traces = [
        read_trace(
            name, experts=experts, k=k, layers=layers, model_config=model_config,
            world_size=world_size, physical=physical,
        )
        for name in trace
    ]  # fmt: skip
    read = combined(traces)
    with progress() as tell:
        count, tokens = save_trace(read, out, tell)
    header = read.header
    result = {
        "schema": "paceline-import/1",
        "trace": str(out),
        "source": header.source,
        "content": header.content,
        "layers": len(header.layers),
        "experts": header.experts,
        "batches": count,
        "batches_are": header.batches,
        "tokens": tokens if header.per_token else None,
        "notes": list(header.notes),
    }
    emit(result, json, _show)


def _show(result: Mapping[str, Any]) -> None:
    count = count_of(result["batches"], result["batches_are"])
    tokens = "" if result["tokens"] is None else f", {result['tokens']:,} tokens"
    print_lines([
        f"{result['content']} of {result['layers']} layers of {result['experts']} experts, "
        f"{count}{tokens}, from {result['source']}.",
        *(f"Note: {note}." for note in result["notes"]),
    ])  # fmt: skip
    print_end([result["trace"]])
