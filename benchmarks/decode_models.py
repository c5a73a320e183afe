"""Random models to time decode steps of, counters of the weights read, and rows of results."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import attach
from paceline.bench.timing import ratios, spread
from paceline.bench.workload import Shape
from paceline.stand_ins.calibration_file import Calibration, LayerCalibration

Row = dict[str, Any]

_PRODUCTS = ("mm", "addmm", "bmm", "linear", "matmul", "_grouped_mm")


def random_model(shape: Shape, layers: int, dtype: torch.dtype, seed: int = 1) -> Any:
    """Build a model of OLMoE's architecture with layers of this shape and random weights."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=512,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.k,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = OlmoeForCausalLM(config).to(dtype)
    model = model.to_empty(device="cpu").eval()
    rng = torch.Generator().manual_seed(seed)
    small = type(config)(**config.to_dict())
    small.num_experts, small.intermediate_size, small.vocab_size = 8, 8, 8
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            else:
                weight.uniform_(-0.03, 0.03, generator=rng)
        for name, buffer in OlmoeForCausalLM(small).named_buffers():
            model.get_buffer(name).copy_(buffer)  # positions, which to_empty forgot
    model.set_experts_implementation("grouped_mm")
    return model


def random_stand_ins(model: Any, rank: int = 16) -> Calibration:
    """Draw stand-ins of a model of `random_model`, for their time: their output means nothing."""
    rng, layers = torch.Generator().manual_seed(0), []
    hidden = model.config.hidden_size
    with attach(model) as pace:
        identity = pace.identity()
    for layer in identity:
        count = layer.num_experts
        layers.append(
            LayerCalibration(
                name=layer.name,
                k=layer.k,
                router=layer.router,
                experts=tuple(layer.experts.values()),
                ridge=0.1,
                explained=0.0,
                explained_by_text=(0.0,),
                placement=(),
                bias=torch.randn(count, hidden, generator=rng),
                up=0.01 * torch.randn(count, hidden, rank, generator=rng).bfloat16(),
                down=0.01 * torch.randn(count, rank, hidden, generator=rng).bfloat16(),
                mean=torch.randn(count, hidden, generator=rng),
                ranks=torch.full((count,), rank),
                loads=torch.ones(1, count, dtype=torch.int64),
                output_norm=torch.ones(count),
                residual_norm=torch.ones(count),
                residual_log=torch.zeros(count),
                residual_slope=torch.zeros(count, hidden).bfloat16(),
                explained_by_expert=torch.zeros(count),
            )
        )
    return Calibration(type(model).__name__, ("none",), (1,), "parts", tuple(layers))


class WeightsRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the weights that matrix products read inside it, below every Python layer.

    It knows nothing of Paceline: it looks at each product that reaches torch, and of a grouped one
    at which groups have rows.

    Attributes:
        bytes: of all weights that took part in a product.
        experts: name of each experts module -> [experts] bool, read by any product.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.experts: dict[str, Tensor] = {}
        self._known: dict[int, tuple[str, Tensor]] = {}
        for name, weight in model.named_parameters():
            self._known[weight.untyped_storage().data_ptr()] = (name.rsplit(".", 1)[0], weight)

    def most_experts(self) -> float:
        """Return the experts read per layer, a mean over layers."""
        return sum(int(read.sum()) for read in self.experts.values()) / len(self.experts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            for operand in args:
                if isinstance(operand, Tensor):
                    self._read(operand, kwargs.get("offs", args[2] if len(args) > 2 else None))
        return out

    def _read(self, operand: Tensor, ends: Any) -> None:
        module, weight = self._known.get(operand.untyped_storage().data_ptr(), ("", None))
        if weight is None:
            return
        size = weight.numel() * weight.element_size()
        if weight.dim() == 3:
            read = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.int64)) > 0
            size = size // len(read) * int(read.sum())
            self.experts[module] = self.experts.get(module, torch.zeros_like(read)) | read
        self.bytes += size


class ProductTime:
    """Clock of the processor time of grouped matrix products inside it: of reading experts.

    What is left of a step is small beside them, so that what a cap adds to it stands out from the
    noise of a machine that others use too.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._real = torch.nn.functional.grouped_mm

    def __enter__(self) -> ProductTime:
        torch.nn.functional.grouped_mm = self._timed
        return self

    def __exit__(self, *_: Any) -> None:
        torch.nn.functional.grouped_mm = self._real

    def _timed(self, *args: Any, **kwargs: Any) -> Tensor:
        start = time.thread_time()
        out = self._real(*args, **kwargs)
        self.seconds += time.thread_time() - start
        return out


class Split:
    """Split of a step's processor time: experts, the rest of MoE blocks, everything else.

    Args:
        model: of `random_model`.
        pace: its handle, which calls the experts.
    """

    def __init__(self, model: Any, pace: Any) -> None:
        self.experts = self.blocks = 0.0
        self._began = 0.0
        blocks = [layer.mlp for layer in model.model.layers]
        self._undo: list[Callable[[], None]] = [pace.replace_experts(self._run)]
        for block in blocks:
            self._undo.append(block.register_forward_pre_hook(self._before).remove)
            self._undo.append(block.register_forward_hook(self._after).remove)

    def close(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()

    def of(self, seconds: float) -> Mapping[str, float]:
        """Return the parts of a step that took so many seconds."""
        routed = self.blocks - self.experts
        return {"experts": self.experts, "routing": routed, "rest": seconds - self.blocks}

    def _run(self, _: str, run: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        start = time.thread_time()
        out: Tensor = run(hidden, ids, weights)
        self.experts += time.thread_time() - start
        return out

    def _before(self, *_: Any) -> None:
        self._began = time.thread_time()

    def _after(self, *_: Any) -> None:
        self.blocks += time.thread_time() - self._began


def results(
    base: str,
    seconds: Mapping[str, list[float]],
    active: Mapping[str, float],
    read: Mapping[str, float],
    batch: int,
) -> list[Row]:
    """Compare each policy with `base`: experts, and bytes of weights, read in a step."""
    return [
        {
            "batch": batch,
            "policy": name,
            "active_before": active[base],
            "active_after": active[name],
            "bound": read[base] / read[name],
            "ratio": ratios(seconds[base], seconds[name]),
            "median_error": standard_error(
                [a / b for a, b in zip(seconds[base], seconds[name], strict=True)]
            ),
            "seconds": spread(seconds[name]),
        }
        for name in seconds
        if name != base
    ]


def standard_error(found: Sequence[float], draws: int = 400) -> float:
    """Return the standard error of the median of some rounds, by bootstrap."""
    rng = random.Random(0)
    medians = [statistics.median(rng.choices(found, k=len(found))) for _ in range(draws)]
    return statistics.stdev(medians)
