"""`paceline record`: record the choices of a model's routers on your text in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import check_at_least, emit, guarded, progress
from paceline.cli.sources import load, read_prompts, read_texts


@guarded
def record(
    model: options.Model,
    out: options.NewTrace,
    text: options.Text = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts to answer: one per line, or JSON lines with a prompt."),
    ] = None,
    content: options.Content = options.ContentName.counts,
    tokens: options.Tokens = 16384,
    batch_size: options.BatchSize = 16,
    sequence_length: options.SequenceLength = 256,
    mix: options.Mix = False,
    max_new_tokens: Annotated[
        int, typer.Option(help="With --prompts: tokens to generate for each.")
    ] = 64,
    dtype: options.DType = options.DTypeName.auto,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.AsJson = False,
) -> None:
    """Record what every layer's router chooses while the model reads texts or answers prompts.

    A trace is a folder that only you can read. paceline loads and paceline plan read it.
    Interrupted, it keeps all but the last half minute.

    \b
    Examples:
      paceline record demo --out trace
      paceline record ./my-moe --text a.txt --text b.txt --out trace --content choices
      paceline record ./my-moe --prompts questions.txt --max-new-tokens 128 --out trace
    """
    check_at_least(1, batch_size=batch_size, max_new_tokens=max_new_tokens)
    if text and prompts is not None:
        raise ValueError("--text and --prompts are two ways to run a model: give one of them.")
    questions = None if prompts is None else read_prompts(prompts)
    texts = None if questions is not None else read_texts(text or [], model)

    import torch

    from paceline.batches import Sampling, make_batches, padding_token, prompt_batches, run_batch
    from paceline.engines.transformers import attach
    from paceline.traces.record import Recorder

    network, tokenizer = load(model, dtype.value, trust_remote_code)
    if texts is not None:
        sampling = Sampling(tokens, batch_size, sequence_length, mix)
        batches, _ = make_batches(tokenizer, texts, sampling)
    else:
        batches = prompt_batches(tokenizer, questions or [], batch_size)
    with (
        attach(network) as pace,
        Recorder(pace, out, content.value, model=model) as recorder,
        progress() as tell,
        torch.no_grad(),
    ):
        for done, batch in enumerate(batches, start=1):
            if texts is not None:
                run_batch(network, batch)
            else:
                network.generate(
                    batch.ids.to(network.device),
                    attention_mask=batch.given["attention_mask"].to(network.device),
                    pad_token_id=padding_token(tokenizer),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                )
            recorder.next_requests()
            tell(done, len(batches), f"{recorder.forwards} forwards")
    result = {
        "trace": str(out),
        "model": model,
        "content": content.value,
        "layers": len(pace.layers),
        "forwards": recorder.forwards,
    }
    emit(result, json, _show)


def _show(result: Mapping[str, Any]) -> None:
    typer.echo(
        f"{result['forwards']} forwards of {result['layers']} layers are in {result['trace']}."
    )
