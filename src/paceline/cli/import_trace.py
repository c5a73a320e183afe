"""`paceline import`: routing that another program wrote, as a trace of Paceline's own."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.output import guarded


@guarded
def import_trace(
    trace: Annotated[
        list[str],
        typer.Argument(
            help="Trace: a file or folder of any known format; several: the ranks of one run."
        ),
    ],
    out: options.NewTrace,
    experts: options.Experts = None,
    k: options.K = None,
    layers: options.Layers = None,
    model_config: options.ModelConfig = None,
    world_size: options.WorldSize = None,
    physical: options.Physical = False,
) -> None:
    """Convert routing that vLLM, SGLang, TensorRT-LLM, llama.cpp or others wrote into a trace.

    Every verb that takes a trace reads such files as they are; a trace of its own is quicker to
    read, private, and says by itself what its file had to be told.

    Several recordings are those of the ranks of one run: the tokens of ranks that saw their own
    (data parallelism) come side by side, forward by forward, as a layer computes them; ranks that
    all saw the same (tensor parallelism) count once.

    \b
    Examples:
      paceline import rank0 rank1 rank2 rank3 --out trace
      paceline import completions.jsonl --model-config config.json --out trace
      paceline import expert_distribution_recorder_1764456001.0_0.pt --out trace
      paceline import expert_scores/law --experts 64 --k 6 --out trace
    """
    from paceline.cli.progress import progress
    from paceline.traces import save_trace
    from paceline.traces.merge import merged

    ranks = [
        options.read_trace(
            name, experts=experts, k=k, layers=layers, model_config=model_config,
            world_size=world_size, physical=physical,
        )
        for name in trace
    ]  # fmt: skip
    read = ranks[0] if len(ranks) == 1 else merged(ranks)
    with progress() as tell:
        batches, tokens = save_trace(read, out, tell)
    header = read.header
    said = options.batches_said(
        {"batches": batches, "batches_are": header.batches, "batch_tokens": None}
    )
    many = f", {tokens:,} tokens" if header.per_token else ""
    typer.echo(
        f"{header.content} of {len(header.layers)} layers of {header.experts} experts, "
        f"{said}{many}, from {header.source}, are in {out}."
    )
    for note in header.notes:
        typer.echo(f"Note: {note}.")
