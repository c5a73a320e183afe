"""`paceline bench`: time a layer, a model, or this machine, emulated or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import (
    check_at_least,
    check_new,
    check_writable,
    command_line,
    emit,
    guarded,
    print_end,
    progress,
    writing,
)
from paceline.cli.sources import (
    load,
    most_devices,
    plan_files,
    plan_from_options,
    quiet,
    read_texts,
)

if TYPE_CHECKING:
    from paceline.bench.run import Results

bench = typer.Typer(
    name="bench",
    help="Time a MoE layer, a model or this machine's experts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_LAYER_POLICIES = ["capacity_factor=2.0", "capacity_factor=1.5", "capacity_factor=1.0"]
_MODEL_POLICIES = ["capacity_factor=1.5", "capacity_factor=1.0"]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; each runs every case once.")]
Out = Annotated[Path | None, typer.Option(help="File (JSON) to write.")]


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
    text: options.Text = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded routing: a trace of any known format.")
    ] = None,
    layer: Annotated[int, typer.Option(min=0, help="Layer of the model or trace.")] = 0,
    workload: Annotated[
        str | None,
        typer.Option(help="Synthetic routing with exact loads: W0 to W7; W6:2 for another step."),
    ] = None,
    policy: options.Policies = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each device.")] = 512,
    peak_to_mean: Annotated[
        float, typer.Option(help="Load of the busiest device, for a synthetic routing.")
    ] = 2.0,
    devices: options.Devices = None,
    placement: options.PlacementFile = None,
    plan: options.PlanFile = None,
    batch: Annotated[
        str, typer.Option(help="own: a batch per device; shared: one for all.")
    ] = "own",
    rounds: Rounds = 5,
    out: Out = None,
    html: options.Html = None,
    force: options.Force = False,
    json: options.AsJson = False,
) -> None:
    """Time one MoE layer: gate, route, dispatch, experts and combine.

    Run directly, one process plays all devices in turn and nothing is sent: emulated devices. Under
    torchrun every rank is a device.

    Workloads (Megatron-LM#7488): W0 balanced, W1 hot experts, W2 a hot device, W3 hot experts
    spread over the devices, W4 sources of unequal size, W5 experts and a device without load, W6 a
    hot device that moves at every step, W7 a burst in every fourth step (W7:3).

    \b
    Examples:
      paceline bench layer --shape olmoe --peak-to-mean 2.5
      paceline bench layer --model demo --text prose --layer 2 --devices 8
      paceline bench layer --workload W2 --peak-to-mean 1.8
      torchrun --nproc-per-node 2 -m paceline bench layer --shape small --peak-to-mean 1.5
    """
    from paceline.bench.patterns import named_pattern
    from paceline.bench.run import bench_layer
    from paceline.bench.workload import named_shape

    if batch not in ("own", "shared"):
        raise ValueError(f"--batch must be own or shared, got {batch}.")
    routings = {"model": model, "trace": trace, "workload": workload}
    given = [f"--{name}" for name, value in routings.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} name a routing each: give one of them.")
    if text and model is None:
        raise ValueError("--text needs --model, which it runs through.")
    check_writable(out=out, html=html)
    check_new(force, out=out, html=html)
    chosen = plan_from_options(devices, placement, plan)
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
            pattern=None if workload is None else named_pattern(workload),
            trace=trace,
            layer=layer,
            model=loaded,
            model_name=model or "",
            text_ids=ids,
            progress=tick,
        )
    _finish(results.model_copy(update=plan_files(placement, plan)), out, html, json)


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
    text: options.Text = None,
    policy: options.Policies = None,
    sequences: Annotated[int, typer.Option(min=1, help="Prompts of each rank.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for a prompt.")] = 16,
    devices: options.Devices = None,
    placement: options.PlacementFile = None,
    plan: options.PlanFile = None,
    rounds: Rounds = 5,
    out: Out = None,
    html: options.Html = None,
    force: options.Force = False,
    json: options.AsJson = False,
) -> None:
    """Time a whole model: time to first token, tokens per second.

    \b
    Examples:
      paceline bench model --model demo --text prose
      torchrun --nproc-per-node 2 -m paceline bench model --model random
    """
    import torch

    from paceline.bench.run import bench_model

    quiet()
    check_writable(out=out, html=html)
    check_new(force, out=out, html=html)
    chosen = plan_from_options(devices, placement, plan)
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
    _finish(results.model_copy(update=plan_files(placement, plan)), out, html, json)


def _model_and_text(
    model: str, text: list[str] | None, tokens: int, length: int = 256
) -> tuple[Any, Any]:
    """Load a model and [sequences, length] token ids of texts."""
    from paceline.bench.workload import token_rows

    loaded, tokenizer = load(model)
    texts = read_texts(text or [], model)
    return loaded, token_rows(tokenizer, texts.values(), tokens, length)


@contextmanager
def _ticking(total: int) -> Iterator[Callable[[], None]]:
    """Show progress on rank 0; yield a function to call after each step."""
    with progress(quiet=os.environ.get("RANK", "0") != "0") as tell:
        steps = count(1)
        yield lambda: tell(next(steps), total, "timing")


def _finish(results: Results, out: Path | None, html: Path | None, as_json: bool) -> None:
    """Print a table and write the files, on rank 0 alone."""
    if os.environ.get("RANK", "0") != "0":
        return
    from paceline.bench.page import bench_page
    from paceline.cli.bench_tables import show
    from paceline.files import to_json, write_text

    results.created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results.command = command_line()
    results.seconds = None
    emit(results, as_json, show)
    written = []
    with writing() as write:
        if out is not None and write(
            "out", out, lambda: write_text(out, to_json(results.to_dict()), private=False)
        ):
            written.append(out)
        if html is not None and write(
            "html", html, lambda: write_text(html, bench_page(results), private=False)
        ):
            written.append(html)
        if not as_json:
            print_end(written)


@bench.command("hardware")
@guarded
def bench_hardware_verb(
    out: Out = None,
    link: options.Link = None,
    rounds: Rounds = 7,
    threads: Annotated[int, typer.Option(help="Threads on a CPU: those of one device.")] = 1,
    force: options.Force = False,
    json: options.AsJson = False,
) -> None:
    """Fit the cost model of paceline plan to this machine, and judge it on shapes it hasn't seen.

    Times the experts of layers of several sizes, from one row per expert to hundreds: one to two
    minutes on a CPU. The link between devices is not measured: --link says it. Without such a file
    paceline plan uses presets, made from published figures.

    \b
    Examples:
      paceline bench hardware --out here.json
      paceline plan trace --model-config model --hardware here.json
    """
    check_at_least(1, threads=threads)
    if link is not None and not link > 0:
        raise ValueError(f"--link must be above 0, got {link}.")
    check_writable(out=out)
    check_new(force, out=out)

    from paceline.analysis.hardware import Hardware, save_hardware
    from paceline.bench.hardware import fit_this_machine
    from paceline.cli.bench_tables import show_fit

    with progress() as tell:
        result = fit_this_machine(None if link is None else link * 1e9, rounds, threads, tell)
    emit(result, json, show_fit)
    if out is None:
        return
    fitted = Hardware(**result["hardware"])
    more = {name: value for name, value in result.items() if name != "hardware"}
    with writing() as write:
        if write("out", out, lambda: save_hardware(fitted, out, more)) and not json:
            print_end([out], [["plan", "TRACE", "--model-config", "MODEL", "--hardware", str(out)]])
