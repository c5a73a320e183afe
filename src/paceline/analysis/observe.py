"""Expert loads of a model on texts, with or without a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.analysis.degenerate import LayerEvidence, reasons
from paceline.balance import combine_peaks, straggler_loss
from paceline.batches import Sampling, check_length, make_batches, run_batch
from paceline.facts import Facts
from paceline.placement import ExpertPlacement, describe_placements
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.routing import Assignment, RoutingInputs
from paceline.settings import PlacementsLike, PoliciesLike

SCHEMA = "paceline-loads/2"


def observe_loads(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    devices: int = 8,
    placement: PlacementsLike = None,
    policy: PoliciesLike = None,
    plan: Plan | None = None,
    sampling: Sampling | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the texts and measure every layer's loads, as JSON-able values.

    Args:
        model: a Mixture-of-Experts model in evaluation mode; it is restored afterwards.
        tokenizer: its tokenizer.
        texts: name -> text.
        devices: devices that share the experts in order, where no placement is given.
        placement: expert -> device, one for all layers or one per layer, as `attach` takes it.
        policy: one for all layers or one per layer; None only observes.
        plan: policies and placements from a file, where `policy` or `placement` is None.
        sampling: which tokens to run.
        progress: called after every batch.

    Raises:
        ValueError: if the model has no MoE layer, fewer experts than devices, or a text is empty.
    """
    from paceline.engines.transformers import attach

    sampling = sampling or Sampling()
    if placement is None and (plan is None or not plan.placements):
        placement = devices
    batches, tokens = make_batches(tokenizer, texts, sampling)
    with attach(model, policy, placement, plan=plan, token_source="sequence") as pace:
        check_length(model, sampling.sequence_length)
        evidence: dict[str, LayerEvidence] = {}

        def add_evidence(name: str, inputs: RoutingInputs, assignment: Assignment) -> None:
            layer = LayerEvidence(assignment.num_experts, inputs.topk_ids.shape[1])
            evidence.setdefault(name, layer).add(inputs)

        pace.watch(add_evidence, Facts(scores=True, all_scores=True))
        for done, batch in enumerate(batches, start=1):
            run_batch(model, batch)
            if progress is not None:
                progress(done, len(batches), f"{batch.ids.numel()} tokens")
        policies, layers = pace.policies, pace.stats().to_dict()["layers"]
        placements = [
            own or ExpertPlacement.per_expert(len(layer["expert_loads_before"]))
            for own, layer in zip(pace.placements, layers, strict=True)
        ]
    described = [
        describe_layer(layer, where)
        | {
            "policy": str(own),
            "choices": evidence.get(layer["name"], LayerEvidence(where.num_experts, 1)).to_dict(),
        }
        for layer, where, own in zip(layers, placements, policies, strict=True)
    ]
    named = policy is not None or (plan is not None and bool(plan.policies))
    return {
        "schema": SCHEMA,
        "policy": _shown(policies) if named else None,
        "mode": _mode(policies),
        "devices": max(where.num_devices for where in placements),
        "placement": describe_placements(placements),
        "batches": len(batches),
        "mixed": sampling.mix,
        "tokens_by_text": dict(tokens),
        "degenerate": reasons(model, list(evidence.values())),
        **_threshold(layers),
        "overall": overall(layers),
        "layers": described,
    }


def describe_layer(layer: Mapping[str, Any], placement: ExpertPlacement) -> dict[str, Any]:
    """Add its placement and its busiest units (by summed load) to a layer's statistics."""
    return {
        **layer,
        "experts": placement.num_experts,
        "devices": placement.num_devices,
        "experts_per_device": list(placement.sizes),
        "expert_to_device": list(placement.expert_to_device),
        "busiest_expert": int(np.argmax(layer["expert_loads_before"])),
        "busiest_device": int(np.argmax(layer["device_loads_before"])),
    }


def _shown(policies: Sequence[CapacityPolicy]) -> str:
    """Write the policy in its short form; where layers differ, each once, in their order."""
    return "; ".join(dict.fromkeys(str(policy) or "no cap" for policy in policies))


def _mode(policies: Sequence[CapacityPolicy]) -> str:
    modes = [policy.mode if policy.caps else "observe" for policy in policies]
    return next((mode for mode in ("enforce", "shadow") if mode in modes), "observe")


def _threshold(layers: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Compare the tokens per expert from which on caps apply with those of a batch here.

    Of the layer that comes nearest to being capped; None where no policy caps.
    """
    capping = [layer for layer in layers if layer["min_expert_load"] is not None]
    here = [
        layer["assignments"] / len(layer["expert_loads_before"]) / max(1, layer["forwards"])
        for layer in capping
    ]
    return {
        "min_expert_load": min((layer["min_expert_load"] for layer in capping), default=None),
        "tokens_an_expert": max(here, default=None),
    }


def overall(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the figures of all layers, which run one after the other."""
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
    result["forwards"] = sum(layer["forwards"] for layer in layers)
    for name in ("capped_forwards", "narrowed_forwards", "tokens_without_expert"):
        result[name] = sum(layer[name] for layer in layers)
    for when in ("before", "after"):  # a mean over forwards and layers
        read = [layer[f"most_active_experts_{when}"] for layer in layers]
        result[f"most_active_experts_{when}"] = sum(read) / len(read)
    return result
