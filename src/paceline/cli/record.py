"""`paceline record`: what a model's layers choose on your text, into a trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import model_options
from paceline.cli.output import guarded
from paceline.cli.options import NewTrace


@guarded
def record(
    model: model_options.ModelName,
    out: NewTrace,
    text: model_options.Text = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts to answer: one a line, or JSON lines with a prompt."),
    ] = None,
    content: model_options.Content = model_options.ContentName.counts,
    tokens: model_options.Tokens = 16384,
    batch_size: model_options.BatchSize = 16,
    sequence_length: model_options.SequenceLength = 256,
    mix: model_options.Mix = False,
    max_new_tokens: Annotated[
        int, typer.Option(help="With --prompts: tokens to generate for each.")
    ] = 64,
    dtype: model_options.DType = model_options.DTypeName.auto,
    trust_remote_code: model_options.TrustRemoteCode = False,
) -> None:
    """Record what every layer's router chooses while the model reads texts or answers prompts.

    A trace is a folder that only you can read. It feeds `paceline loads`, `simulate` and what
    builds on them. Interrupted, it keeps all but the last half minute.

    \b
    Examples:
      paceline record demo --out trace
      paceline record ./my-moe --text a.txt --text b.txt --out trace --content choices
      paceline record ./my-moe --prompts questions.txt --max-new-tokens 128 --out trace
    """
    for name, value in (("batch-size", batch_size), ("max-new-tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"--{name} {value} is not allowed: it is at least 1.")
    if text and prompts is not None:
        raise ValueError("--text and --prompts are two ways to run a model: give one of them.")
    questions = None if prompts is None else read_prompts(prompts)

    from paceline.cli.sources import load, read_texts

    texts = None if questions is not None else read_texts(text or [], model)

    from paceline.batches import Sampling, make_batches
    from paceline.cli.progress import progress
    from paceline.engines.transformers import attach
    from paceline.traces.record import Recorder

    network, tokenizer = load(model, dtype.value, trust_remote_code)
    if texts is not None:
        sampling = Sampling(tokens, batch_size, sequence_length, mix)
        batches, _ = make_batches(tokenizer, texts, sampling)
        work = [batch.ids for batch in batches]
    else:
        work = list(_padded(tokenizer, questions or [], batch_size))
    with (
        attach(network) as pace,
        Recorder(pace, out, content.value, model=model) as recorder,
        progress() as tell,
    ):
        for done, batch in enumerate(work, start=1):
            _run(network, batch, None if texts is not None else max_new_tokens)
            recorder.next_requests()
            tell(done, len(work), f"{recorder.forwards} forwards")
    typer.echo(f"{recorder.forwards} forwards of {len(pace.layers)} layers are in {out}.")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: lines, or JSON lines with a "prompt" or "text".

    Raises:
        ValueError: if the file can't be read, or holds none.
    """
    import json

    from paceline.files import MOST_TEXT, read_plain

    try:
        lines = read_plain(path, MOST_TEXT, pipes=True).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {path} is not UTF-8 text.") from None
    except OSError as error:
        raise ValueError(f"--prompts {path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"--prompts {path} can't be read: {error}.") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if line.lstrip().startswith("{") else line
        except (ValueError, RecursionError):
            row = line  # a prompt may begin so
        if isinstance(row, dict):
            row = row.get("prompt", row.get("text"))
        if not isinstance(row, str) or not row:
            raise ValueError(f'--prompts {path}, line {number}: it has no "prompt" or "text".')
        found.append(row)
    if not found:
        raise ValueError(f"--prompts {path} is empty.")
    return found


def _padded(tokenizer: Any, prompts: Sequence[str], batch_size: int) -> Iterator[Any]:
    """Batches of prompts, padded on the left."""
    import torch

    rows = [tokenizer(prompt, verbose=False)["input_ids"] for prompt in prompts]
    if not all(rows):
        raise ValueError("a prompt gives no tokens.")
    pad = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
    for start in range(0, len(rows), batch_size):
        some = rows[start : start + batch_size]
        longest = max(map(len, some))
        ids = [[pad] * (longest - len(row)) + row for row in some]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in some]
        yield {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "pad_token_id": pad,
        }


def _run(model: Any, batch: Any, max_new_tokens: int | None) -> None:
    """Read a batch of ids, or answer a batch of prompts."""
    import torch

    with torch.no_grad():
        if max_new_tokens is None:
            # loads need no logits: where the model can leave them out, that saves a large buffer
            spare = "logits_to_keep" in inspect.signature(model.forward).parameters
            few = {"logits_to_keep": 1} if spare else {}
            model(input_ids=batch.to(model.device), use_cache=False, **few)
            return
        tensors = {
            name: value.to(model.device) if hasattr(value, "to") else value
            for name, value in batch.items()
        }
        model.generate(**tensors, max_new_tokens=max_new_tokens, do_sample=False)
