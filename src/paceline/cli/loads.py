"""`paceline loads`: where the stragglers of a model or of recorded traffic are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options, trace_loads
from paceline.cli.output import (
    check_at_least,
    check_folder,
    check_new,
    check_writable,
    emit,
    guarded,
    print_lines,
    print_table,
    print_verdict,
    progress,
    run_facts,
    writing,
)
from paceline.cli.record import record_batches
from paceline.cli.sources import (
    like_hub_name,
    load,
    plan_files,
    plan_from_options,
    read_texts,
    read_trace,
)
from paceline.shipped import DEMO

if TYPE_CHECKING:
    from paceline.analysis.results import ModelLoads
    from paceline.plan import Plan


@guarded
def loads(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|TRACE",
            help="Model folder, hub name, or: demo. Or a trace, sample:NAME, or the JSON of "
            "paceline plan --json.",
        ),
    ],
    text: options.Text = None,
    devices: options.Devices = None,
    policy: options.Policies = None,
    plan: options.PlanFiles = None,
    placement: options.PlacementFiles = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Of a model: only count what the policy would drop.")
    ] = False,
    calibration: options.CalibrationFolder = None,
    html: options.Html = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for the page's figures as SVG and PNG (needs kaleido)."),
    ] = None,
    judge: options.Judge = None,
    hardware: options.Hardware = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="sweep.json of paceline eval --grid: what caps cost in quality."),
    ] = None,
    tokens: options.Tokens = 16384,
    batch_size: options.BatchSize = 16,
    sequence_length: options.SequenceLength = 256,
    mix: options.Mix = False,
    dtype: options.DType = options.DTypeName.auto,
    trust_remote_code: options.TrustRemoteCode = False,
    batch_tokens: options.BatchTokens = None,
    without: Annotated[
        str | None,
        typer.Option(help="Leave out rows of a trace: the commonest, or all repeats."),
    ] = None,
    experts: options.Experts = None,
    k: options.K = None,
    layers: options.Layers = None,
    model_config: options.ModelConfig = None,
    world_size: options.WorldSize = None,
    physical: options.Physical = False,
    force: options.Force = False,
    json: options.AsJson = False,
) -> None:
    """Show how uneven the expert loads of a model on your text, or of recorded traffic, are.

    Per layer: the busiest expert and device, how far above the mean they are, and how long an
    average device waits. A model runs under one --policy or --plan, and the table shows what it
    drops. On a trace each --policy, --plan and --placement is tried on the same batches, and the
    table shows what each drops and gains; several for a model are tried on a recording of its own
    choices. Gains are bounds from the loads: nothing is timed, and a trace can't tell what a drop
    does to quality.

    --html writes a page that only you can read. The page of a trace has every cap behind a slider,
    a placement that is searched on the first half of the batches and judged on the second (with
    --judge: searched on all of the trace, judged on the other), and with --hardware and
    --model-config the decision of paceline plan.

    \b
    Examples:
      paceline loads demo
      paceline loads demo --text german --policy capacity_factor=1.25
      paceline loads demo --policy capacity_factor=1.25 --policy capacity_factor=1,unit=expert
      paceline loads ./my-moe --text prompts.txt --devices 8 --html loads.html
      paceline loads sample:esft_v2lite_law --batch-tokens 1024
      paceline loads sample:esft_v2lite_law --policy capacity_factor=1.0 --policy max_active=3
      paceline loads monday --judge friday --html page.html
      paceline loads response.json --model-config config.json
      paceline loads plan.json --html page.html
    """
    from paceline.traces import is_trace, open_trace

    check_at_least(1, devices=devices)
    check_writable(html=html)
    check_folder(figures=figures)
    check_new(force, html=html, figures=figures)
    policies, plans, placements = policy or [], plan or [], placement or []
    facts: dict[str, Any] = {
        "experts": experts, "k": k, "layers": layers, "model_config": model_config,
        "world_size": world_size, "physical": physical,
    }  # fmt: skip
    if text or source == DEMO or not is_trace(source):
        of_trace = {
            "figures": figures, "judge": judge, "hardware": hardware, "sweep": sweep,
            "batch_tokens": batch_tokens, "without": without, **facts,
        }  # fmt: skip
        _check_found(source, text or [], of_trace)
        _refuse("a trace, not a model", **of_trace)
        from paceline.analysis.observe import observe_loads
        from paceline.analysis.verdict import model_verdict
        from paceline.batches import Sampling, make_batches, run_batch

        if any(len(each) > 1 for each in (policies, plans, placements)):
            _refuse("one policy of a model, not several", shadow=shadow, html=html)
            cases = trace_loads.cases(policies, plans, placements, devices)
            texts = read_texts(text or [], source)
            network, tokenizer = load(source, dtype.value, trust_remote_code)
            sampling = Sampling(tokens, batch_size, sequence_length, mix)
            batches, _ = make_batches(tokenizer, texts, sampling)
            with TemporaryDirectory() as folder:
                recorded = Path(folder) / "trace"
                record_batches(network, source, batches, run_batch, recorded, "scores")
                trace = replace(open_trace(recorded), where=source)
                return trace_loads.compare(trace, cases, None, None, json)
        chosen = _shadowed(_one_plan(devices, policies, plans, placements), shadow)
        if calibration is not None:
            chosen = chosen.replace(calibration=str(calibration.absolute()))
        sampling = Sampling(tokens, batch_size, sequence_length, mix)
        texts = read_texts(text or [], source)
        network, tokenizer = load(source, dtype.value, trust_remote_code)
        with progress() as tell:
            found = observe_loads(
                network, tokenizer, texts, plan=chosen, sampling=sampling, progress=tell
            )
        verdict = model_verdict(found)
        files = plan_files(next(iter(placements), None), next(iter(plans), None))
        more = {"model": source, "verdict": verdict, **run_facts(), **files}
        emit(found, json, lambda result: _show(result, verdict), **more)
        if html is not None:
            from paceline.reporting.pages import loads_page, write_page

            with writing() as write:
                page = loads_page(found.to_dict() | more)
                write("html", html, lambda: write_page(page, html))
        return None
    _refuse("a model, not a trace", shadow=shadow, calibration=calibration)
    planned = trace_loads.read_planned(source)
    if planned is not None or any(each is not None for each in (html, figures, judge, hardware,
                                                                sweep)):  # fmt: skip
        given = any((policies, plans, placements))
        return trace_loads.study(
            source, planned, facts, judge, without,
            devices=devices, batch_tokens=batch_tokens,
            plan=_one_plan(None, policies, plans, placements) if given else None,
            plan_file=next(iter(plans), None), hardware=hardware, sweep=sweep, html=html,
            figures=figures, as_json=json,
        )  # fmt: skip
    trace = trace_loads.without_rows(read_trace(source, **facts), without)
    if policies or plans or len(placements) > 1:
        cases = trace_loads.cases(policies, plans, placements, devices)
        return trace_loads.compare(trace, cases, batch_tokens, without, json)
    place = plan_from_options(devices, next(iter(placements), None), None)
    trace_loads.balance(trace, place, batch_tokens, json)


def _check_found(source: str, text: Sequence[str], of_trace: Mapping[str, Any]) -> None:
    """Check that a source is there, or may be a model on the Hugging Face hub.

    Args:
        of_trace: options that only a trace has; who gives one means a trace.
    """
    from paceline.traces import is_trace

    if source == DEMO or is_trace(source) or Path(source).exists():
        return
    if not like_hub_name(source):
        raise ValueError(f"there is no trace and no model folder {source}")
    too_many = [_option(name) for name, value in of_trace.items() if value not in (None, False)]
    if too_many or not text:
        without = f" and leave out {' '.join(too_many)}" if too_many else ""
        raise ValueError(
            f"there is no trace {source}; for a model of that name give at least one --text"
            f"{without}."
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(kind: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{_option(name)} is for {kind}.")


def _one_plan(
    devices: int | None, policies: Sequence[str], plans: Sequence[Path], placements: Sequence[Path]
) -> Plan:
    """Return the only plan that options name, for one run of a model or a page.

    Raises:
        ValueError: if they name several, or contradict each other.
    """
    from paceline.policy import CapacityPolicy

    for name, values in (("policy", policies), ("plan", plans), ("placement", placements)):
        if len(values) > 1:
            raise ValueError(
                f"--{name} must be given once for a page, got {len(values)}: without --html a "
                "table compares several."
            )
    plan = next(iter(plans), None)
    chosen = plan_from_options(devices, next(iter(placements), None), plan)
    if not policies:
        return chosen
    if chosen.policies:
        raise ValueError(f"--policy and {plan} both name a policy: give one of them.")
    return chosen.replace(policies=(CapacityPolicy.parse(policies[0]),))


def _shadowed(plan: Plan, shadow: bool) -> Plan:
    if not shadow:
        return plan
    if not plan.policies:
        raise ValueError("--shadow needs a --policy, or a plan with one, to count for.")
    return plan.replace(policies=tuple(each.replace(mode="shadow") for each in plan.policies))


def _show(result: ModelLoads, verdict: list[str]) -> None:
    from paceline.text import percent, times

    columns = ("layer", "expert", "× mean", "device", "× mean", "waits", "dropped", "after")
    rows = [
        (
            layer.name,
            str(layer.busiest_expert),
            times(layer.expert_peak_to_mean_before),
            str(layer.busiest_device),
            times(layer.device_peak_to_mean_before),
            percent(layer.straggler_loss_before),
            percent(layer.dropped_share),
            times(layer.device_peak_to_mean_after),
        )
        for layer in result.layers
    ]
    shown = len(columns) if result.policy is not None else columns.index("dropped")
    print_verdict(verdict)
    texts = ", ".join(f"{name} ({count:,} tokens)" for name, count in result.tokens_by_text.items())
    print_lines([f"Text: {texts}."])
    print_table(
        "Busiest expert and device of every layer; how long an average device waits",
        columns[:shown],
        [row[:shown] for row in rows],
    )
