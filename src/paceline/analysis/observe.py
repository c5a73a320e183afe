"""Measure the expert loads of a model on texts, with or without a policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.loads import busiest, combine_peaks, straggler_loss
from paceline.evaluation.batches import Batch, Sequences, cut, mixed, separate, tokens_by_source
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy

Progress = Callable[[int, int, str], None]
SCHEMA = "paceline-loads/1"
_CHARACTERS = 64  # more than a token has on average, in any text


@dataclass(frozen=True)
class Sampling:
    """Which tokens to run and how.

    Attributes:
        tokens: at most so many in all, shared equally by the texts.
        batch_size: sequences a batch.
        sequence_length: tokens a sequence.
        mix: deal the sequences of all texts into every batch, else batches of one text.
    """

    tokens: int = 16384
    batch_size: int = 16
    sequence_length: int = 256
    mix: bool = False

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("batch_size", 1), ("sequence_length", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def make_batches(
    tokenizer: Any, texts: Mapping[str, str], sampling: Sampling
) -> tuple[list[Batch], Mapping[str, int]]:
    """Batches of the texts and the tokens used of each.

    Raises:
        ValueError: if a text is empty, or mixing needs longer texts.
    """
    if not texts:
        raise ValueError("texts must name at least one text")
    share = max(2, sampling.tokens // len(texts))
    parts: list[Sequences] = []
    for name, text in texts.items():
        start = text[: _CHARACTERS * share]  # a huge file is not tokenised to its end
        ids = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(cut(name, ids[:share], sampling.sequence_length))
    deal = mixed if sampling.mix else separate
    return deal(parts, sampling.batch_size), tokens_by_source(parts)


def observe_loads(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    devices: int,
    policy: CapacityPolicy | None = None,
    sampling: Sampling | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the texts and report every layer's loads, as JSON-able values.

    Args:
        model: a Mixture-of-Experts model in evaluation mode; it is restored afterwards.
        tokenizer: its tokenizer.
        texts: name -> text.
        devices: devices that share the experts, contiguously.
        policy: None only observes.
        sampling: which tokens to run.
        progress: told after every batch.

    Raises:
        ValueError: if the model has no MoE layer, fewer experts than devices, or a text is empty.
    """
    from paceline.engines.transformers import attach

    sampling = sampling or Sampling()
    batches, tokens = make_batches(tokenizer, texts, sampling)
    with attach(model, policy, devices, token_source="sequence") as pace:
        _check_length(model, sampling.sequence_length)
        for done, batch in enumerate(batches, start=1):
            _run(model, batch)
            if progress is not None:
                progress(done, len(batches), f"{batch.ids.numel()} tokens")
        layers = pace.stats().to_dict()["layers"]
    return {
        "schema": SCHEMA,
        "policy": None if policy is None else str(policy),
        "mode": "observe" if policy is None else policy.mode,
        "devices": devices,
        "batches": len(batches),
        "mixed": sampling.mix,
        "tokens_by_text": dict(tokens),
        "overall": overall(layers),
        "layers": [describe_layer(layer, devices) for layer in layers],
    }


def describe_layer(layer: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """A layer's statistics with its experts per device and its busiest units (by summed load)."""
    loads = layer["expert_loads_before"]
    sizes = ExpertPlacement.contiguous(len(loads), devices).sizes
    return {
        **layer,
        "experts": len(loads),
        "experts_per_device": list(sizes),
        "busiest_expert": busiest(loads).index,
        "busiest_device": busiest(layer["device_loads_before"], sizes).index,
    }


def overall(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures over all layers, which run one after the other (weighted by assignments)."""
    weights = [layer["assignments"] for layer in layers]
    result: dict[str, Any] = {}
    for when in ("before", "after"):
        for unit in ("device", "expert"):
            key = f"{unit}_peak_to_mean_{when}"
            result[key] = combine_peaks([layer[key] for layer in layers], weights)
        result[f"straggler_loss_{when}"] = straggler_loss(result[f"device_peak_to_mean_{when}"])
    result["worst_device_peak_to_mean_before"] = max(
        layer["worst_device_peak_to_mean_before"] for layer in layers
    )
    result["dropped_share"] = sum(layer["dropped"] for layer in layers) / max(1, sum(weights))
    result["capped_forwards"] = sum(layer["capped_forwards"] for layer in layers)
    return result


def _run(model: Any, batch: Batch) -> None:
    import torch

    # Loads need no logits: where the model can leave them out, that saves the largest buffer.
    spare = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.inference_mode():
        model(
            input_ids=batch.ids.to(model.device),
            use_cache=False,
            **({"logits_to_keep": 1} if spare else {}),
        )


def _check_length(model: Any, length: int) -> None:
    config = model.config.get_text_config() if hasattr(model, "config") else None
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        raise ValueError(f"sequence_length must be at most {limit} for this model, got {length}")
