"""`paceline calibrate`: learn on your text what dropped assignments should leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import model_options
from paceline.cli.errors import guarded


@guarded
def calibrate(
    model: model_options.ModelName,
    out: Annotated[Path, typer.Option(help="Folder for the calibration, readable by you only.")],
    text: model_options.Text = None,
    rank: Annotated[int, typer.Option(help="Of an expert's stand-in, at most.")] = 16,
    tokens: model_options.Tokens = 65536,
    batch_size: model_options.BatchSize = 16,
    sequence_length: model_options.SequenceLength = 256,
    dtype: model_options.DType = model_options.DTypeName.auto,
    trust_remote_code: model_options.TrustRemoteCode = False,
) -> None:
    """Fit a small stand-in of every expert, for policies with compensate=true.

    Calibrate on text like that which the model will see: the shares printed are of text that a
    stand-in was not fitted to. Each --text is left out in turn, so give several.

    \b
    Examples:
      paceline calibrate demo --text prose --text german --out calibrated
      paceline calibrate ./my-moe --text a.txt --text b.txt --rank 32 --out calibrated
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: allowed is a folder, made if need be.")

    from paceline.cli.models import load, read_texts

    texts = read_texts(text or [], model)

    from paceline.analysis.observe import Sampling
    from paceline.calibration.collect import calibrate as run
    from paceline.cli.progress import progress

    sampling = Sampling(tokens, batch_size, sequence_length)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    out.mkdir(parents=True, exist_ok=True)
    with progress() as tell:
        found = run(network, tokenizer, texts, rank=rank, sampling=sampling, progress=tell)
    path = found.save(out)
    typer.echo("layer: share of the outputs' energy that stand-ins explain on text left out")
    for layer in found.layers:
        least = int(layer.loads.sum(0).min())
        without = int((layer.ranks == 0).sum())
        note = f"; {without} of {len(layer.ranks)} experts have no stand-in" if without else ""
        typer.echo(f"{layer.name}: {layer.explained:.0%}; at least {least} rows an expert{note}")
    if found.held_out == "parts":
        typer.echo("With one text only, parts of it were left out: give several with --text.")
    typer.echo(f"{sum(found.tokens)} tokens; written to {path}")
