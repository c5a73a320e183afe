"""Others' wrappers around an attached model's methods, and modules that others replace."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from accelerate import Accelerator, cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from made_up_calibration import made_up
from model_runs import fingerprint, output
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from paceline import CapacityPolicy, attach
from paceline.engines.transformers.patching import patch_of
from paceline.traces.record import Recorder

CAP = CapacityPolicy(capacity_factor=0.7, min_expert_load=0)
GIVEN = {**tiny_models.inputs(batch=2, length=24), "use_cache": False}
PARTS = ("model", "block", "experts", "gate")
ORDERS = ("before attach", "while attached")


def build(dtype: torch.dtype = torch.float32) -> Any:
    return tiny_models.build("mixtral", dtype=dtype)


def part_of(model: Any, name: str) -> Any:
    block = model.model.layers[0].mlp
    return {"model": model, "block": block, "experts": block.experts, "gate": block.gate}[name]


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Counting(ModelHook):  # type: ignore[misc]
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(1)
        return args, kwargs


Wrapper = Callable[[nn.Module, list[int]], Callable[[], Any]]
"""Wraps a module's forward, which adds to the calls, and returns what takes it back."""


def accelerate_hook(module: nn.Module, calls: list[int]) -> Callable[[], Any]:
    add_hook_to_module(module, Counting(calls))
    return lambda: remove_hook_from_module(module)


def _assigned(module: Any, forward: Any) -> Callable[[], Any]:
    former = module.forward
    module.forward = forward
    return lambda: setattr(module, "forward", former)


def wrapped_partial(module: Any, calls: list[int]) -> Callable[[], Any]:
    def run(former: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return former(*args, **kwargs)

    made = functools.partial(run, module.forward)
    return _assigned(module, functools.update_wrapper(made, module.forward))


def bare_partial(module: Any, calls: list[int]) -> Callable[[], Any]:
    """`functools.partial` of the method itself, which copies its attributes."""
    undo = wrapped_partial(module, calls)
    made = functools.partial(module.forward)
    made.__dict__.update(module.forward.__dict__)
    module.forward = made
    return undo


def own_method(module: Any, calls: list[int]) -> Callable[[], Any]:
    former = module.forward

    @functools.wraps(former)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return former(*args, **kwargs)

    return _assigned(module, MethodType(forward, module))


WRAPPERS: list[Wrapper] = [accelerate_hook, wrapped_partial, bare_partial, own_method]


def loads(model: Any) -> list[list[int]]:
    with attach(model, CAP, placement=4) as pace:
        output(model, GIVEN)
        return [layer.expert_loads_after for layer in pace.stats().layers]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_stays(wrap: Wrapper, part: str, order: str) -> None:
    model = build()
    untouched, want, after = fingerprint(model), output(model, GIVEN), loads(model)
    calls: list[int] = []
    module = part_of(model, part)
    if order == "before attach":
        undo = wrap(module, calls)
    pace = attach(model, CAP, placement=4)
    if order != "before attach":
        undo = wrap(module, calls)
        wrapper = module.forward
    calls.clear()
    output(model, GIVEN)
    assert calls == [1]
    assert [layer.expert_loads_after for layer in pace.stats().layers] == after
    pace.detach()
    if order != "before attach":
        assert module.forward == wrapper
    calls.clear()
    assert torch.equal(output(model, GIVEN), want)
    assert calls == [1]
    copied = copy.deepcopy(model)  # with what is left of the patch
    assert torch.equal(output(copied, GIVEN), want)
    assert loads(model) == after
    undo()
    assert torch.equal(output(model, GIVEN), want)
    assert loads(model) == after
    for name, value in module.__dict__.items():
        assert patch_of(value) is None, name
    if wrap is accelerate_hook:
        module.__dict__.pop("forward", None)  # its own way back leaves the method there
        assert fingerprint(model) == untouched


@pytest.mark.parametrize("part", ["model", "gate"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_that_comes_and_goes_leaves_nothing(wrap: Wrapper, part: str) -> None:
    model = build()
    untouched, after = fingerprint(model), loads(model)
    with attach(model, CAP, placement=4) as pace:
        for _ in range(2):
            undo = wrap(part_of(model, part), [])
            output(model, GIVEN)
            undo()
            pace.reset_stats()
            output(model, GIVEN)
            assert [layer.expert_loads_after for layer in pace.stats().layers] == after
    assert fingerprint(model) == untouched


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("part", "name"), [("gate", "weight"), ("experts", "gate_up_proj"), ("experts", "down_proj")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parametrisation(part: str, name: str, order: str, dtype: torch.dtype) -> None:
    model, halved = build(dtype), build(dtype)
    untouched, want = fingerprint(model), output(model, GIVEN)
    parametrize.register_parametrization(part_of(halved, part), name, Halved())
    other, after = output(halved, GIVEN), loads(halved)
    if order == "before attach":
        parametrize.register_parametrization(part_of(model, part), name, Halved())
    with attach(model, CAP, placement=4) as pace:
        if order != "before attach":
            parametrize.register_parametrization(part_of(model, part), name, Halved())
        output(model, GIVEN)
        assert [layer.expert_loads_after for layer in pace.stats().layers] == after
    assert torch.equal(output(model, GIVEN), other)
    assert not torch.equal(other, want)
    assert loads(model) == after
    parametrize.remove_parametrizations(part_of(model, part), name, leave_parametrized=False)
    assert torch.equal(output(model, GIVEN), want)
    assert fingerprint(model) == untouched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_offloaded_while_attached(dtype: torch.dtype) -> None:
    model = build(dtype)
    want, after = output(model, GIVEN), loads(model)
    with attach(model, CAP, placement=4) as pace:
        capped = output(model, GIVEN)
        cpu_offload(model, execution_device=torch.device("cpu"))
        pace.reset_stats()
        assert torch.equal(output(model, GIVEN), capped)
        assert [layer.expert_loads_after for layer in pace.stats().layers] == after
    assert torch.equal(output(model, GIVEN), want)
    assert loads(model) == after
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(output(model, GIVEN), want)
    assert loads(model) == after


# -- modules that are replaced ---------------------------------------------------------------------


class Around(nn.Module):
    """A wrapper of a module, as an adapter is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def replace_experts(model: Any, fresh: Any) -> None:
    model.model.layers[1].mlp.experts = fresh.model.layers[1].mlp.experts


def replace_block(model: Any, fresh: Any) -> None:
    model.model.layers[1].mlp = fresh.model.layers[1].mlp


def replace_decoder_layer(model: Any, fresh: Any) -> None:
    model.model.layers[1] = fresh.model.layers[1]


def replace_all_layers(model: Any, fresh: Any) -> None:
    model.model.layers = fresh.model.layers


def set_experts_forward(model: Any, fresh: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.forward = MethodType(type(experts).forward, experts)


def set_block_forward(model: Any, fresh: Any) -> None:
    """A kernel that reads the weights, and calls neither router nor experts."""
    own = fresh.model.layers[1].mlp
    model.model.layers[1].mlp.forward = lambda hidden: own(hidden)


REPLACEMENTS = [
    replace_experts,
    replace_block,
    replace_decoder_layer,
    replace_all_layers,
    set_experts_forward,
    set_block_forward,
]
POLICIES = [
    None,
    CAP,
    CAP.replace(mode="shadow"),
    CapacityPolicy(max_active=1, min_expert_load=1000),
]
ERROR = r"layer model\.layers\.[012]\.mlp can't be handled"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_replaced_module_is_an_error(replace: Any, policy: Any) -> None:
    model, fresh = build(), build()
    with attach(model, policy, placement=4) as pace:
        output(model, GIVEN)
        replace(model, fresh)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=ERROR):
                output(model, GIVEN)
    assert pace.stats().layers[0].forwards >= 1
    assert output(model, GIVEN).isfinite().all()


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_replaced_module_is_an_error_while_recorded(replace: Any, tmp_path: Path) -> None:
    model = build()
    with attach(model) as pace, Recorder(pace, tmp_path / "trace", "counts"):
        replace(model, build())
        with pytest.raises(RuntimeError, match=ERROR):
            output(model, GIVEN)


def test_experts_that_lost_their_patch_with_a_hook_are_an_error() -> None:
    model = build()
    undo = accelerate_hook(part_of(model, "experts"), [])
    with attach(model):
        undo()
        with pytest.raises(RuntimeError, match=ERROR):
            output(model, GIVEN)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_experts_put_back_are_no_error(policy: Any) -> None:
    model = build()
    untouched = fingerprint(model)
    own = model.model.layers[1].mlp.experts
    with attach(model, policy, placement=4) as pace:
        replace_experts(model, build())
        with pytest.raises(RuntimeError, match=ERROR):
            output(model, GIVEN)
        model.model.layers[1].mlp.experts = own
        pace.reset_stats()
        output(model, GIVEN)
        assert [layer.forwards for layer in pace.stats().layers] == [1, 1, 1]
    assert fingerprint(model) == untouched


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("part", ["experts", "gate", "mlp"])
def test_a_module_put_around_another_is_no_error(part: str, policy: Any) -> None:
    model = build()
    with attach(model, policy, placement=4) as pace:
        want = output(model, GIVEN)
        after = [layer.expert_loads_after for layer in pace.stats().layers]
        holder = model.model.layers[1] if part == "mlp" else model.model.layers[1].mlp
        inner = getattr(holder, part)
        setattr(holder, part, Around(inner))
        pace.reset_stats()
        assert torch.equal(output(model, GIVEN), want)
        assert [layer.expert_loads_after for layer in pace.stats().layers] == after
        setattr(holder, part, inner)
        pace.reset_stats()
        assert torch.equal(output(model, GIVEN), want)
        assert [layer.expert_loads_after for layer in pace.stats().layers] == after


def test_a_layer_taken_out_is_no_error() -> None:
    model = build()
    with attach(model) as pace:
        model.model.layers = model.model.layers[:1]
        output(model, GIVEN)
        assert [layer.forwards for layer in pace.stats().layers] == [1, 0, 0]


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("order", ORDERS)
def test_offloaded_weights(place: str, order: str, tmp_path: Path) -> None:
    """Layers are probed, capped and compensated wherever their weights are between forwards."""
    model = build()
    calibration, want, after = made_up(model), output(model, GIVEN), loads(model)
    policy = CAP.replace(compensate=True)
    with attach(model, policy, placement=4, calibration=calibration):
        capped = output(model, GIVEN)

    def offload() -> None:
        if place == "cpu":
            cpu_offload(model)
            return
        places = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")
        places |= {f"model.layers.{index}": "disk" for index in range(len(model.model.layers))}
        places["model.rotary_emb"] = "cpu"
        dispatch_model(model, places, offload_dir=tmp_path, main_device="cpu")

    if order == "before attach":
        offload()
        assert loads(model) == after
    with attach(model, policy, placement=4, calibration=calibration) as pace:
        if order != "before attach":
            offload()
        assert torch.equal(output(model, GIVEN), capped)
        assert pace.stats().layers[0].min_expert_load == 0
        with pytest.raises(ValueError, match="already attached"):
            attach(model)
    assert torch.equal(output(model, GIVEN), want)
    experts = model.model.layers[1].mlp.experts
    assert all(weight.is_meta for weight in experts.parameters())


def test_weights_that_nobody_loads_are_named() -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match=r"its weight .* is on the meta device, and no hook of"):
        attach(model)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", ["FSDP2", "DDP"])
def test_data_parallel_wrappers(how: str, order: str, one_rank: Any) -> None:
    model: Any = build()
    calibration, want, after = made_up(model), output(model, GIVEN), loads(model)

    def wrap() -> Any:
        if how == "DDP":
            return DistributedDataParallel(model).eval()
        for layer in model.model.layers:
            fully_shard(layer, mesh=one_rank)
        return fully_shard(model, mesh=one_rank)

    wrapped = wrap() if order == "before attach" else model
    with attach(wrapped, CAP, placement=4, calibration=calibration) as pace:
        if order != "before attach":
            wrapped = wrap()
        wrapped(**GIVEN)[0].square().mean().backward()
        assert [layer.expert_loads_after for layer in pace.stats().layers] == after
    assert torch.equal(output(wrapped, GIVEN), want)


@pytest.mark.parametrize("order", ORDERS)
def test_accelerate_prepares_and_unwraps(order: str) -> None:
    """With mixed precision, which wraps the forward, and unwrapped again to single precision."""
    model = build()
    want, after = output(model, GIVEN), loads(model)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model) if order == "before attach" else model
    pace = attach(prepared, CAP, placement=4)
    prepared = accelerator.prepare(model)
    assert not torch.equal(output(prepared, GIVEN), want)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    pace.reset_stats()
    output(unwrapped, GIVEN)
    assert [layer.expert_loads_after for layer in pace.stats().layers] == after
    pace.detach()
    assert torch.equal(output(unwrapped, GIVEN), want)


def test_functions_of_parameters() -> None:
    model = build()
    scaled = {name: weight.detach() * 1.1 for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(model, weights, (), GIVEN)[0].square().mean()

    want, want_gradient = loss(scaled), torch.func.grad(loss)(scaled)
    with attach(model) as pace:
        assert torch.equal(loss(scaled), want)
        gradient = torch.func.grad(loss)(scaled)
        assert all(torch.equal(gradient[name], each) for name, each in want_gradient.items())
        assert pace.stats().layers[0].forwards == 2
        stacked = {name: torch.stack([weight, weight]) for name, weight in scaled.items()}
        with pytest.raises(RuntimeError, match="nor under a cap"):
            torch.func.vmap(loss)(stacked)
        pace.policy = CAP
        assert not torch.equal(loss(scaled), want)
        with pytest.raises(RuntimeError, match="nor under a cap"):
            torch.func.grad(loss)(scaled)
        assert not torch.equal(loss(scaled), want)  # and it goes on


def test_experts_replaced_in_a_compiled_model() -> None:
    """A graph notices nothing: reading the counts tells."""
    model = build()
    pace = attach(model)
    compiled = torch.compile(model, backend="eager")
    output(compiled, GIVEN)
    pace.stats()
    model.model.layers[0].mlp.experts = copy.deepcopy(model.model.layers[1].mlp.experts)
    output(compiled, GIVEN)
    with pytest.raises(RuntimeError, match="another module has taken the place of its experts"):
        pace.stats()
    pace.detach()
    pace.stats()
