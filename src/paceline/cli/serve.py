"""`paceline serve`: the server of vLLM or SGLang, capped, with policy and counts over HTTP."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.output import guarded


class Engine(str, Enum):
    """Choices of --engine."""

    vllm = "vllm"
    sglang = "sglang"


@guarded
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Model folder, hub name, or: demo. Before the engine's flags.")
    ],
    engine: Annotated[Engine, typer.Option(help="Engine that serves.")] = Engine.vllm,
    policy: options.Policy = None,
    devices: Annotated[
        int | None,
        typer.Option(help="Devices that share the experts, without expert parallelism."),
    ] = None,
    plan: options.PlanFile = None,
    calibration: options.CalibrationFolder = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Folder for a trace of what the layers choose, to be made."),
    ] = None,
    record_content: options.Content = options.ContentName.counts,
    accept_shared_budget: Annotated[
        bool,
        typer.Option(
            "--accept-shared-budget",
            help="Keep prefix caching though users who share a batch affect each other.",
        ),
    ] = False,
) -> None:
    """Serve a model with vLLM or SGLang, capped; every other flag is the engine's.

    Without a policy loads are counted and nothing is capped. With expert parallelism a device is a
    rank; without it and without --devices every expert is a device. The policy of the running
    server is at /paceline/policy (GET, POST, DELETE), its effect on /metrics.

    \b
    Examples:
      paceline serve demo
      paceline serve demo --policy capacity_factor=1.25 --devices 8 --port 8001
      paceline serve ./my-moe --policy capacity_factor=1.25,pool=request --max-model-len 8192
      paceline serve ./my-moe --record trace       then: paceline loads trace, paceline plan trace
      paceline serve ./my-moe --policy capacity_factor=1.25 -tp 8 --enable-expert-parallel
      paceline serve ./my-moe --engine sglang --policy capacity_factor=1.25 --tp 8 --ep 8
    """
    if model.startswith("-"):
        flag = model.partition("=")[0]  # the value may be a secret, as in --api-key=...
        raise ValueError(f"{flag} must come after the model: paceline serve MODEL {flag} ...")
    from paceline.engines.serving.environment import plugin_environment

    content = record_content.value
    environ = plugin_environment(
        policy, devices, plan, accept_shared_budget, record, content, calibration
    )
    if engine is Engine.sglang:
        from paceline.engines.sglang.command import serve as run
    else:
        from paceline.engines.vllm.command import serve as run
    run(model, context.args, environ)
