"""What strangers may hand us: one target a kind of input, with real files to start from.

A target reads bytes as a verb would. Whatever they are, it comes back, or raises one sentence from
Paceline's own code. `violations` says what else happened: another exception, a traceback's text, a
process started, a file written elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_up_server
import torch
from safetensors.torch import save

import paceline
from paceline.analysis.cost import layer_shape
from paceline.analysis.hardware import PRESETS, hardware_of, save_hardware
from paceline.analysis.planner import SCHEMA as PLANNER_SCHEMA
from paceline.checkpoint.folder import open_checkpoint
from paceline.cli.sources import read_prompts
from paceline.cli.trace_loads import read_planned as planned_result
from paceline.engines.serving.control import PATH
from paceline.engines.transformers.config import load_policy
from paceline.model_config import read_model_config
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.stand_ins.calibration_file import Calibration, LayerCalibration
from paceline.traces import ImportOptions, open_trace, sample, save_trace
from paceline.traces.tables import load_tables
from paceline.traces.trace import Trace

SAMPLES = Path(__file__).parents[1] / "traces" / "samples"
OPTIONS = ImportOptions(experts=64, k=6, layers=5)
OURS = str(Path(paceline.__file__).parent)
LONGEST = 1200
"""Characters that one sentence may have: it quotes what it found shortened."""


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes:
        read: takes the bytes, in a folder of its own that is empty at first.
        seeds: inputs that are right, or nearly.
    """

    read: Callable[[bytes, Path], None]
    seeds: Callable[[], list[bytes]]


def violations(target: Target, data: bytes) -> list[str]:
    """What must not happen and did, for one input; nothing where all is well."""
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, _watched(Path(name)) as events:
        try:
            target.read(data, Path(name))
        except (ValueError, OSError) as error:
            found += _unclear(error)
        except Exception as error:  # what the user would see as a traceback
            last = traceback.extract_tb(error.__traceback__)[-1]
            found.append(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")
    return found + events


def _unclear(error: Exception) -> list[str]:
    """An expected error is a sentence of ours, raised on purpose, of a length one reads."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    if not last.filename.startswith(OURS):
        return [f"{type(error).__name__} from {last.filename}:{last.lineno}: {text}"]
    if not text or len(text) > LONGEST:
        return [f"{len(text)} characters of {type(error).__name__} at {last.lineno}: {text[:80]}"]
    return []


_EVENTS: list[str] = []
_FOLDER: list[Path] = []
_FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"}
_FORBIDDEN |= {"socket.connect", "pickle.find_class", "os.remove", "os.rename", "shutil.rmtree"}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _FOLDER:
        return
    if event in _FORBIDDEN and not str(args[:1]).count(str(_FOLDER[0])):
        _EVENTS.append(f"{event}{args!r:.200}")
    if event == "open" and isinstance(args[0], str) and isinstance(args[2], int):
        writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not args[0].startswith((str(_FOLDER[0]), "/dev/")):
            _EVENTS.append(f"open for writing {args[0]}")


@contextmanager
def _watched(folder: Path) -> Iterator[list[str]]:
    """Events of this process that no reader has any business with."""
    global _installed
    if not _installed:
        sys.addaudithook(_audit)
        _installed = True
    _EVENTS.clear()
    _FOLDER.append(folder)
    found: list[str] = []
    try:
        yield found
    finally:
        _FOLDER.clear()
        found += _EVENTS


_installed = False

# -- policies, plans, placements ------------------------------------------------------------------


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="surrogateescape")


def _policy_text(data: bytes, folder: Path) -> None:
    policy = CapacityPolicy.parse(_text(data))
    assert CapacityPolicy.from_toml(policy.to_toml()) == policy
    assert CapacityPolicy.from_json(policy.to_json()) == policy


def _policy_json(data: bytes, folder: Path) -> None:
    policy = CapacityPolicy.from_json(_text(data))
    assert CapacityPolicy.from_json(policy.to_json()) == policy


def _policy_toml(data: bytes, folder: Path) -> None:
    policy = CapacityPolicy.from_toml(_text(data))
    assert CapacityPolicy.from_toml(policy.to_toml()) == policy


def _policies() -> list[CapacityPolicy]:
    return [
        CapacityPolicy(capacity_factor=1.25),
        CapacityPolicy(gamma=0.75, unit="expert", keep="random", seed=7, min_expert_load=0),
        CapacityPolicy(gamma=2, pool="source", expand="own_device", expand_limit=2, fill_to=0.5),
        CapacityPolicy(gamma=1, phase="prefill", drop_first=("image", "video"), protect_first=4),
    ]


def _short_forms() -> list[bytes]:
    texts = [
        "capacity_factor=1.25",
        "gamma=1e-3,unit=expert,keep=reverse_order",
        "gamma=inf,pool=request,min_expert_load=auto",
        "gamma=1.5,drop_first=image+video,protect_first=4,mode=shadow",
    ]
    return [text.encode() for text in texts]


def _plan(data: bytes, folder: Path) -> None:
    path = folder / "plan.toml"
    path.write_bytes(data)
    plan = Plan.load(path)
    plan.save(path)
    assert Plan.load(path) == plan
    plan.check_model([8, 8], [2, 2])


def _plans() -> list[bytes]:
    policy = CapacityPolicy(capacity_factor=1.25)
    placement = paceline.ExpertPlacement((0, 1, 1, 0), num_devices=2)
    plans = [
        Plan((policy,), (8,)),
        Plan((policy, policy), (placement, placement), layers=2),
        Plan(placements=(placement,), calibration="found"),
    ]
    return [plan.to_toml().encode() for plan in plans]


_SERVED = made_up_server.app(made_up_server.Client())


def _http(data: bytes, folder: Path) -> None:
    """The routes themselves, with a key: a body is followed or refused, and workers agree."""
    status, answer = made_up_server.call(_SERVED, "POST", PATH, data, pieces=1 + len(data) % 3)
    if status == 200:
        assert answer["agree"]
        assert CapacityPolicy.parse(answer["policy"]) is not None
    else:
        assert status in (400, 413), status
        assert 0 < len(answer["error"]) <= LONGEST


def _bodies() -> list[bytes]:
    return [json.dumps({"policy": text.decode()}).encode() for text in _short_forms()]


# -- traces ----------------------------------------------------------------------------------------


def _consume(trace: Trace) -> None:
    for table in islice(load_tables(trace), 8):
        assert (table.counts >= 0).all()


def _trace_file(data: bytes, folder: Path) -> None:
    path = folder / "input"
    path.write_bytes(data)
    _consume(open_trace(path, OPTIONS))


def _trace_files() -> list[bytes]:
    files = [path for path in sorted(SAMPLES.rglob("*")) if path.is_file()]
    small = [path.read_bytes() for path in files if path.stat().st_size < 1 << 16]
    lines = [b"-1 2 8\n0 3 5\n", b"0 0 1 0:0.5 1:0.5\n", b"layer,expert\n1,0\n", b"0,1\n"]
    return [*small, *lines, b"", b"{}", b"[]", b"\x93NUMPY", b"PK\x03\x04", b"GGUF"]


def _folder_files(source: Path) -> list[tuple[str, bytes]]:
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return [(str(path.relative_to(source)), path.read_bytes()) for path in files]


def _write_but(data: bytes, files: list[tuple[str, bytes]], folder: Path) -> None:
    """The files, but for the one that the first byte names: it holds the other bytes."""
    chosen = data[0] % len(files) if data else 0
    for place, (name, content) in enumerate(files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data[1:] if place == chosen else content)


def _every_file(files: list[tuple[str, bytes]]) -> list[bytes]:
    return [bytes([place]) + content for place, (_, content) in enumerate(files)]


_MADE: dict[str, list[tuple[str, bytes]]] = {}


def _made(name: str, write: Callable[[Path], object]) -> list[tuple[str, bytes]]:
    """Files that Paceline writes, written once a process."""
    if name not in _MADE:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "it")
            _MADE[name] = _folder_files(Path(folder) / "it")
    return _MADE[name]


def _own_trace() -> list[tuple[str, bytes]]:
    return _made("trace", _save_small_trace)


def _save_small_trace(folder: Path) -> None:
    narrow = sample("esft_v2lite_law").select_layers([0, 1]).regrouped(16)
    save_trace(Trace(narrow.header, tuple(islice(narrow.chunks, 1)), narrow.where), folder)


def _trace_folder(data: bytes, folder: Path) -> None:
    _write_but(data, _own_trace(), folder)
    _consume(open_trace(folder, OPTIONS))


def _statistic_folder(data: bytes, folder: Path) -> None:
    _write_but(data, _folder_files(SAMPLES / "trtllm" / "expert_statistic"), folder)
    _consume(open_trace(folder, OPTIONS))


# -- what a run on a user's text leaves, models, machines ------------------------------------------


def _calibration(data: bytes, folder: Path) -> None:
    _write_but(data, _own_calibration(), folder)
    Calibration.load(folder)


def _own_calibration() -> list[tuple[str, bytes]]:
    return _made("calibration", lambda folder: _small_calibration().save(folder))


def _small_calibration() -> Calibration:
    experts, hidden, rank = 2, 3, 1
    layer = LayerCalibration(
        name="model.layers.0.mlp",
        k=1,
        router="0" * 16,
        experts=("1" * 16, "2" * 16),
        ridge=0.1,
        explained=0.5,
        explained_by_text=(0.5,),
        placement=(0, 1),
        bias=torch.zeros(experts, hidden),
        up=torch.zeros(experts, hidden, rank, dtype=torch.bfloat16),
        down=torch.zeros(experts, rank, hidden, dtype=torch.bfloat16),
        mean=torch.zeros(experts, hidden),
        ranks=torch.ones(experts, dtype=torch.int64),
        loads=torch.ones(1, experts, dtype=torch.int64),
        output_norm=torch.ones(experts),
        residual_norm=torch.ones(experts),
        residual_log=torch.zeros(experts),
        residual_slope=torch.zeros(experts, hidden, dtype=torch.bfloat16),
        explained_by_expert=torch.ones(experts),
    )
    return Calibration("MixtralForCausalLM", ("a.txt",), (4,), "parts", (layer,))


def _config() -> bytes:
    fields = {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
        "n_group": 2,
        "capacity_policy": {"version": 1, "policy": {"capacity_factor": 1.25}},
    }
    return json.dumps(fields).encode()


def _model_files() -> list[tuple[str, bytes]]:
    prefix = "model.layers.{}.mlp"
    tensors = {}
    for layer in range(2):
        tensors[f"{prefix.format(layer)}.gate.weight"] = torch.zeros(4, 16)
        for expert in range(4):
            for name, shape in (("gate_proj", (8, 16)), ("down_proj", (16, 8))):
                key = f"{prefix.format(layer)}.experts.{expert}.{name}.weight"
                tensors[key] = torch.zeros(shape)
    return [("config.json", _config()), ("model.safetensors", save(tensors))]


def _model_folder(data: bytes, folder: Path) -> None:
    _write_but(data, _model_files(), folder)
    for name in ("shape", "hidden_layers", "moe_layers", "expert_groups"):
        unclear: list[str] = []
        try:
            file = folder / "config.json"
            layer_shape(file) if name == "shape" else getattr(read_model_config(file), name)
        except ValueError as error:
            unclear = _unclear(error)
        assert unclear == []
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layers() is not None
    assert checkpoint.config.expert_groups >= 1


def _config_policy(data: bytes, folder: Path) -> None:
    try:
        kept = json.loads(data)
    except (ValueError, RecursionError):
        return  # Transformers reads the file
    model = torch.nn.Module()
    model.config = SimpleNamespace(capacity_policy=kept)  # type: ignore[assignment]
    load_policy(model)


def _hardware(data: bytes, folder: Path) -> None:
    path = folder / "hardware.json"
    path.write_bytes(data)
    hardware_of(str(path)).reachable("bf16")


def _hardware_files() -> list[bytes]:
    return [
        content
        for preset in ("h100", "l40s")
        for _, content in _made(
            preset,
            lambda folder, preset=preset: (
                folder.mkdir(),
                save_hardware(PRESETS[preset], folder / "h.json"),
            ),
        )
    ]


def _maps(data: bytes, folder: Path) -> None:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    paceline.ExpertPlacement.explicit(given)


def _prompts(data: bytes, folder: Path) -> None:
    (folder / "prompts").write_bytes(data)
    assert all(read_prompts(folder / "prompts"))


def _planned_json(data: bytes, folder: Path) -> None:
    """What `paceline plan --json` wrote, as `paceline loads` reads it."""
    (folder / "plan.json").write_bytes(b'{"schema": "' + PLANNER_SCHEMA.encode() + b'", ' + data)
    planned_result(str(folder / "plan.json"))


def _plan_results() -> list[bytes]:
    step: dict[str, Any] = {
        "microseconds": 1.0, "stages": {"experts": 1.0}, "bytes_sent": 1.0,
        "receive_buffer_bytes": 1.0, "most_active_experts": 1.0, "dropped_share": 0.1,
        "gate_mass_lost": None, "layers": [1.0], "gain": 0.1,
    }  # fmt: skip
    half = {
        "batches": 1, "ways": {"nothing": step}, "active": [], "perfect_balance_gain": 0.1,
        "frontier": [{"placement": "placed", "budget": 1.0, **step}],
    }  # fmt: skip
    result = {
        "trace": "a", "model": None, "notes": [], "devices": 8, "hardware": "h100",
        "hardware_source": "", "precision": "bf16", "max_mass_loss": 0.01, "min_gain": 0.05,
        "min_expert_load": 8, "batches": 2, "batch_tokens": None, "layers": ["a"],
        "second_half": half, "other_trace": None, "budgets": {"placed": None}, "variants": [],
        "decision": "cap", "verdict": ["Cap."],
    }  # fmt: skip
    return [json.dumps(result)[1:].encode()]


TARGETS = {
    "prompts": Target(_prompts, lambda: [b"one\ntwo\n", b'{"prompt": "a"}\n{"text": "b"}\n']),
    "plan_result": Target(_planned_json, _plan_results),
    "policy_text": Target(_policy_text, _short_forms),
    "policy_json": Target(_policy_json, lambda: [p.to_json().encode() for p in _policies()]),
    "policy_toml": Target(_policy_toml, lambda: [p.to_toml().encode() for p in _policies()]),
    "policy_of_config": Target(
        _config_policy, lambda: [json.dumps(json.loads(_config())["capacity_policy"]).encode()]
    ),
    "plan": Target(_plan, _plans),
    "placement": Target(_maps, lambda: [b"[0, 0, 1, 1]", b'{"0": 1}', b"[true, 1.5]", b"[-1]"]),
    "http_body": Target(_http, _bodies),
    "trace_file": Target(_trace_file, _trace_files),
    "trace_folder": Target(_trace_folder, lambda: _every_file(_own_trace())),
    "statistic_folder": Target(
        _statistic_folder,
        lambda: _every_file(_folder_files(SAMPLES / "trtllm" / "expert_statistic")),
    ),
    "calibration": Target(_calibration, lambda: _every_file(_own_calibration())),
    "model_folder": Target(_model_folder, lambda: _every_file(_model_files())),
    "hardware": Target(_hardware, _hardware_files),
}
