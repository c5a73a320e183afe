"""`paceline loads`: where the stragglers of a model are, on your text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import model_options
from paceline.cli import trace_options as options
from paceline.cli.decided import Devices, PlacementFile, PlanFile, decided, named
from paceline.cli.errors import check_writable, guarded
from paceline.cli.trace_loads import loads_of_trace


@guarded
def loads(
    model: Annotated[
        str, typer.Argument(help="Model folder, hub name, or: demo. Or a trace, or sample:NAME.")
    ],
    text: model_options.Text = None,
    devices: Devices = None,
    placement: PlacementFile = None,
    plan: PlanFile = None,
    policy: Annotated[
        str | None,
        typer.Option(help="What to apply, like capacity_factor=1.25; none: observe only."),
    ] = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Only count what the policy would drop.")
    ] = False,
    tokens: model_options.Tokens = 16384,
    batch_size: model_options.BatchSize = 16,
    sequence_length: model_options.SequenceLength = 256,
    mix: model_options.Mix = False,
    dtype: model_options.DType = model_options.DTypeName.auto,
    trust_remote_code: model_options.TrustRemoteCode = False,
    json: model_options.AsJson = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page, readable by you only.")
    ] = None,
    batch_tokens: options.BatchTokens = None,
    experts: options.Experts = None,
    k: options.K = None,
    layers: options.Layers = None,
    model_config: options.ModelConfig = None,
    world_size: options.WorldSize = None,
    physical: options.Physical = False,
) -> None:
    """Show how uneven a model's expert loads are on your text, or those of recorded traffic.

    Per layer: the busiest expert and device, how far above the mean they are, and how long an
    average device waits; with a policy also what it drops and what remains.

    \b
    Examples:
      paceline loads demo
      paceline loads demo --text german --policy capacity_factor=1.25
      paceline loads ./my-moe --text prompts.txt --devices 8 --html loads.html
      paceline loads ./my-moe --text prompts.txt --placement placed.toml
      paceline loads allenai/OLMoE-1B-7B-0924 --text a.txt --text b.txt --mix --json
      paceline loads trace --batch-tokens 1024
      paceline loads response.json --model-config config.json
    """
    from paceline.policy import CapacityPolicy
    from paceline.traces import is_trace

    chosen = decided(devices, placement, plan)
    if policy is not None:
        if chosen.policies:
            raise ValueError(f"--policy and {plan} both name a policy: give one of them.")
        chosen = chosen.replace(policies=(CapacityPolicy.parse(policy),))
    if shadow:
        if not chosen.policies:
            raise ValueError("--shadow needs a --policy, or a plan with one, to count for.")
        policies = tuple(each.replace(mode="shadow") for each in chosen.policies)
        chosen = chosen.replace(policies=policies)
    check_writable(html)
    if not text and is_trace(model):
        if html is not None:
            raise ValueError(f"--html is for a model: of the trace {model} there is --json")
        trace = options.read_trace(
            model, experts=experts, k=k, layers=layers, model_config=model_config,
            world_size=world_size, physical=physical,
        )  # fmt: skip
        return loads_of_trace(trace, chosen, batch_tokens, json)
    options.refuse_for_a_model(
        batch_tokens=batch_tokens, experts=experts, k=k, layers=layers, model_config=model_config,
        world_size=world_size, physical=physical or None,
    )  # fmt: skip

    from paceline.cli.models import load, read_texts

    texts = read_texts(text or [], model)

    from paceline.analysis.observe import observe_loads
    from paceline.analysis.verdict import verdict
    from paceline.batches import Sampling
    from paceline.cli.progress import progress
    from paceline.system_info import system_info

    sampling = Sampling(tokens, batch_size, sequence_length, mix)
    network, tokenizer = load(model, dtype.value, trust_remote_code)
    with progress() as tell:
        result = observe_loads(
            network,
            tokenizer,
            texts,
            plan=chosen,
            sampling=sampling,
            progress=tell,
        )
    result |= {
        "model": model,
        **named(placement, plan),
        "verdict": verdict(result),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        **system_info(),
        "seconds": None,
    }
    if html is not None:
        from paceline.reporting.pages import loads_page, write_page

        write_page(loads_page(result), html)
    if json:
        from paceline.files import to_json

        typer.echo(to_json(result), nl=False)
    else:
        _show(result)


def _show(result: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paceline.text import percent, times

    capped = result["policy"] is not None
    title = "Busiest expert and device of every layer; how long an average device waits"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )
    table.add_column("layer", no_wrap=True)
    for name in ("expert", "× mean", "device", "× mean", "waits"):
        table.add_column(name, justify="right")
    if capped:
        table.add_column("dropped", justify="right")
        table.add_column("after", justify="right")
    for layer in result["layers"]:
        row = [
            layer["name"],
            str(layer["busiest_expert"]),
            times(layer["expert_peak_to_mean_before"]),
            str(layer["busiest_device"]),
            times(layer["device_peak_to_mean_before"]),
            percent(layer["straggler_loss_before"]),
        ]
        if capped:
            row += [percent(layer["dropped_share"]), times(layer["device_peak_to_mean_after"])]
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for line in result["verdict"]:
        console.print(line, markup=False)
