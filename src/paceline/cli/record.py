"""`paceline record`: record the choices of a model's routers on your text in a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_trace,
    emit,
    guarded,
    print_end,
    print_lines,
    progress,
)
from paceline.cli.sources import load, read_prompts, read_texts

if TYPE_CHECKING:
    from paceline.batches import Batch


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
    check_trace(out)
    questions = None if prompts is None else read_prompts(prompts)
    texts = None if questions is not None else read_texts(text or [], model)

    from paceline.batches import Sampling, make_batches, padding_token, prompt_batches, run_batch

    network, tokenizer = load(model, dtype.value, trust_remote_code)

    def answer(network: Any, batch: Batch) -> None:
        network.generate(
            batch.ids.to(network.device),
            attention_mask=batch.given["attention_mask"].to(network.device),
            pad_token_id=padding_token(tokenizer),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )

    if texts is not None:
        sampling = Sampling(tokens, batch_size, sequence_length, mix)
        batches, _ = make_batches(tokenizer, texts, sampling)
    else:
        batches = prompt_batches(tokenizer, questions or [], batch_size)
    run = run_batch if texts is not None else answer
    layers, forwards = record_batches(network, model, batches, run, out, content.value)
    result = {
        "schema": "paceline-record/1",
        "trace": str(out),
        "model": model,
        "content": content.value,
        "layers": layers,
        "forwards": forwards,
    }
    emit(result, json, _show)


def _show(result: Mapping[str, Any]) -> None:
    print_lines([f"{result['forwards']} forwards of {result['layers']} layers."])
    print_end([result["trace"]])


def record_batches(
    network: Any,
    name: str,
    batches: Sequence[Batch],
    run: Callable[[Any, Batch], None],
    out: Path,
    content: Literal["counts", "choices", "scores"],
) -> tuple[int, int]:
    """Record a model's routers while it runs batches, in a new trace.

    Returns:
        The numbers of layers and forwards.
    """
    import torch

    from paceline.engines.transformers import attach
    from paceline.traces.record import Recorder

    with (
        attach(network) as pace,
        Recorder(pace, out, content, model=name) as recorder,
        progress() as tell,
        torch.no_grad(),
    ):
        for done, batch in enumerate(batches, start=1):
            run(network, batch)
            recorder.next_requests()
            tell(done, len(batches), f"{recorder.forwards} forwards")
    return len(pace.layers), recorder.forwards
