"""`paceline bench`: time a layer or a model, emulated or under torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.decided import PlacementFile, PlanFile, decided, most_devices, named
from paceline.cli.errors import check_writable, guarded
from paceline.cli.model_options import AsJson

if TYPE_CHECKING:
    from paceline.bench.run import Results

bench = typer.Typer(
    name="bench",
    help="Time a MoE layer or a model under several policies, beside the bound of the loads.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_LAYER_POLICIES = ["capacity_factor=2.0", "capacity_factor=1.5", "capacity_factor=1.0"]
_MODEL_POLICIES = ["capacity_factor=1.5", "capacity_factor=1.0"]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help="A policy to compare with no cap; may be repeated."),
]
Rounds = Annotated[int, typer.Option(min=1, help="Each round runs every policy once.")]
Out = Annotated[Path | None, typer.Option(help="Write the results as JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Write a plot as an HTML page.")]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Emulated devices (under torchrun: the ranks count).")
]


@bench.command("layer")
@guarded
def bench_layer_verb(
    shape: Annotated[
        str,
        typer.Option(
            help="olmoe, mixtral, deepseek-v2-lite, qwen1.5-moe, small, tiny, or "
            "hidden,intermediate,experts,k,devices."
        ),
    ] = "small",
    model: Annotated[
        str | None, typer.Option(help="Instead of a shape: a model folder, or demo.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text to run through --model.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded routing: a trace of any known format.")
    ] = None,
    layer: Annotated[int, typer.Option(min=0, help="Layer of the model or trace.")] = 0,
    policy: Policies = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each device.")] = 512,
    peak_to_mean: Annotated[
        float, typer.Option(help="Load of the busiest device, for a synthetic routing.")
    ] = 2.0,
    devices: Devices = None,
    placement: PlacementFile = None,
    plan: PlanFile = None,
    batch: Annotated[str, typer.Option(help="own: a batch a device; shared: one for all.")] = "own",
    rounds: Rounds = 5,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time one MoE layer: gate, route, dispatch, experts and combine.

    Run directly, one process plays all devices in turn and nothing is sent: emulated devices. Under
    torchrun every rank is a device.

    \b
    Examples:
      paceline bench layer --shape olmoe --peak-to-mean 2.5
      paceline bench layer --model demo --text prose --layer 2 --devices 8
      torchrun --nproc-per-node 2 -m paceline bench layer --shape small --peak-to-mean 1.5
    """
    from paceline.bench.run import bench_layer
    from paceline.bench.workload import named_shape

    if batch not in ("own", "shared"):
        raise ValueError(f"--batch {batch} is not allowed: it is own or shared.")
    if model is not None and trace is not None:
        raise ValueError("--model and --trace both name a routing: give one of them.")
    if text and model is None:
        raise ValueError("--text needs --model, which it runs through.")
    check_writable(out, plot)
    chosen = decided(devices, placement, plan)
    loaded = ids = None
    if model is not None:
        ranks = int(os.environ.get("WORLD_SIZE", 0))
        loaded, ids = _model_and_text(model, text, tokens * (ranks or most_devices(chosen)))
    policies = policy or ([] if chosen.policies else _LAYER_POLICIES)
    with _ticking(rounds * (len(policies) + 1 + bool(chosen.policies))) as tick:
        results = bench_layer(
            shape=None if model is not None else named_shape(shape),
            policies=policies,
            tokens=tokens,
            rounds=rounds,
            plan=chosen,
            peak_to_mean=peak_to_mean,
            shares_batch=batch == "shared",
            trace=trace,
            layer=layer,
            model=loaded,
            model_name=model or "",
            text_ids=ids,
            progress=tick,
        )
    _finish(results.model_copy(update=named(placement, plan)), out, plot, as_json)


@bench.command("model")
@guarded
def bench_model_verb(
    model: Annotated[
        str,
        typer.Option(
            help="A model folder, demo, random (a skewed mid-size one), or "
            "random:hidden,intermediate,experts,k,layers."
        ),
    ] = "demo",
    text: Annotated[list[str] | None, typer.Option(help="Text of the prompts.")] = None,
    policy: Policies = None,
    sequences: Annotated[int, typer.Option(min=1, help="Prompts of each rank.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for a prompt.")] = 16,
    devices: Devices = None,
    placement: PlacementFile = None,
    plan: PlanFile = None,
    rounds: Rounds = 5,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time a whole model: time to first token, tokens a second.

    \b
    Examples:
      paceline bench model --model demo --text prose
      torchrun --nproc-per-node 2 -m paceline bench model --model random
    """
    import torch

    from paceline.bench.run import bench_model
    from paceline.cli.models import quiet

    quiet()
    check_writable(out, plot)
    chosen = decided(devices, placement, plan)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if model.split(":")[0] == "random":
        from paceline.bench.model_timing import random_model_named

        loaded = random_model_named(model)
        size = loaded.config.vocab_size

        def prompts(rank: int) -> torch.Tensor:
            rng = torch.Generator().manual_seed(rank)
            return torch.randint(1, size, (sequences, prompt_tokens), generator=rng)
    else:
        loaded, ids = _model_and_text(model, text, sequences * prompt_tokens * ranks, prompt_tokens)

        def prompts(rank: int) -> torch.Tensor:
            own: torch.Tensor = ids[rank * sequences : (rank + 1) * sequences]
            return own

    policies = policy or ([] if chosen.policies else _MODEL_POLICIES)
    with _ticking(rounds * (len(policies) + 1 + bool(chosen.policies))) as tick:
        results = bench_model(
            model=loaded,
            model_name=model,
            prompt_ids=prompts,
            policies=policies,
            new_tokens=new_tokens,
            rounds=rounds,
            plan=chosen,
            progress=tick,
        )
    _finish(results.model_copy(update=named(placement, plan)), out, plot, as_json)


def _model_and_text(
    model: str, text: list[str] | None, tokens: int, length: int = 256
) -> tuple[Any, Any]:
    """A model, and [sequences, length] token ids of a text, repeated where it is too short."""
    import torch

    from paceline.cli.models import load, read_texts

    loaded, tokenizer = load(model)
    texts = read_texts(text or [], model)
    ids = [i for content in texts.values() for i in tokenizer(content)["input_ids"]]
    wanted = -(-tokens // length) * length
    ids = (ids * (-(-wanted // max(1, len(ids)))))[:wanted]
    return loaded, torch.tensor(ids).view(-1, length)


@contextmanager
def _ticking(total: int) -> Iterator[Callable[[], None]]:
    """Progress of the rounds, told by rank 0; yields what to call after each step."""
    from paceline.cli.progress import progress

    with progress(quiet=os.environ.get("RANK", "0") != "0") as tell:
        steps = count(1)
        yield lambda: tell(next(steps), total, "timing")


def _finish(results: Results, out: Path | None, plot: Path | None, as_json: bool) -> None:
    """Show a table, and write what was asked for; rank 0 alone."""
    if os.environ.get("RANK", "0") != "0":
        return
    from paceline.bench.show import bench_page, show
    from paceline.files import to_json, write_text

    results.created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results.command = shlex.join(["paceline", *sys.argv[1:]])
    results.seconds = None
    if as_json:
        typer.echo(to_json(results.to_dict()), nl=False)
    else:
        show(results)
    if out is not None:
        write_text(out, to_json(results.to_dict()), private=False)
    if plot is not None:
        write_text(plot, bench_page(results), private=False)
