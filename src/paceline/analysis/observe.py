"""Expert loads of a model on texts, and the detection of routing unlike real traffic.

Identical rows, untrained weights and routers without a preference all give loads, and often very
uneven ones, which say nothing about real traffic. Three signs, each far from what trained models
show on text:

* two tokens of a batch choose the very same experts far more often than in any text;
* a token's gate scores are all but equal;
* every normalisation weight is a constant, as a random initialisation leaves it
  (`constant_norms`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.analysis.results import Choices, ModelLoads, ObservedLayer, OverallStats
from paceline.balance import combine_peaks, sample_of, share, straggler_loss
from paceline.batches import Sampling, check_length, make_batches, run_batch
from paceline.facts import Facts
from paceline.placement import ExpertPlacement, describe_placements
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.progress import Progress
from paceline.routing import Assignment, RoutingInputs
from paceline.routing.layer_stats import LayerStats
from paceline.settings import PlacementsLike, PoliciesLike

SCHEMA = "paceline-loads/2"
FEW_TOKENS = 16  # below, a chance says nothing
SAME_CHOICE, ONE_CHOICE, SETS = 0.1, 0.5, 4.0
"""Highest chance that two tokens of a batch choose alike, plus SETS / number of sets; ONE_CHOICE is
for one expert per token, where a favourite expert is a choice of its own.

Measured: at most 0.013 on nine texts of the demo model and two DeepSeek-V2-Lite traces, 0.022 on
gpt-oss decode; 0.5 and more where a prompt repeats 11 tokens or fewer, 1 where rows are identical.
"""
FLAT = 0.05
"""Standard deviation / mean of a token's gate scores: 1.2 and more in a trained model, below 0.02
with dummy weights; 0.13 to 0.7 where a random initialisation is left as it is."""


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
) -> ModelLoads:
    """Run the texts and measure every layer's loads.

    Args:
        model: a Mixture-of-Experts model in evaluation mode; it is restored afterwards.
        texts: name -> text.
        devices: devices that share the experts in order, where no placement is given.
        placement: expert -> device, one for all layers or one per layer, as `attach` takes it.
        policy: one for all layers or one per layer; None only observes.
        plan: policies and placements from a file, where `policy` or `placement` is None.
        sampling: which tokens to run.

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
        policies, layers = pace.policies, pace.stats().layers
        placements = [
            own or ExpertPlacement.per_expert(len(layer.expert_loads_before))
            for own, layer in zip(pace.placements, layers, strict=True)
        ]
    observed = [
        ObservedLayer(
            **vars(layer),
            experts=where.num_experts,
            devices=where.num_devices,
            experts_per_device=list(where.sizes),
            expert_to_device=list(where.expert_to_device),
            busiest_expert=int(np.argmax(layer.expert_loads_before)),
            busiest_device=int(np.argmax(layer.device_loads_before)),
            policy=str(own),
            choices=evidence.get(layer.name, LayerEvidence(where.num_experts, 1)).choices(),
        )
        for layer, where, own in zip(layers, placements, policies, strict=True)
    ]
    has_policy = policy is not None or (plan is not None and bool(plan.policies))
    least, here = _threshold(layers)
    return ModelLoads(
        schema=SCHEMA,
        policy=_short_form(policies) if has_policy else None,
        mode=_mode(policies),
        devices=max(where.num_devices for where in placements),
        placement=describe_placements(placements),
        batches=len(batches),
        mixed=sampling.mix,
        tokens_by_text=dict(tokens),
        degenerate=reasons(model, list(evidence.values())),
        min_expert_load=least,
        tokens_an_expert=here,
        overall=_overall(layers),
        layers=observed,
        sample=sample_of(
            sum(tokens.values()), len(batches), evidence[layers[0].name].k, placements[0].sizes
        ),
    )


def _short_form(policies: Sequence[CapacityPolicy]) -> str:
    """Write the policy in its short form; where layers differ, each once, in their order."""
    return "; ".join(dict.fromkeys(str(policy) or "no cap" for policy in policies))


def _mode(policies: Sequence[CapacityPolicy]) -> str:
    modes = [policy.mode if policy.caps else "observe" for policy in policies]
    return next((mode for mode in ("enforce", "shadow") if mode in modes), "observe")


def _threshold(layers: Sequence[LayerStats]) -> tuple[float | None, float | None]:
    """Return the tokens per expert from which on caps apply, and those of a batch here.

    Of the layer that comes nearest to being capped; None where no policy caps.
    """
    capping = [layer for layer in layers if layer.min_expert_load is not None]
    here = [
        layer.assignments / len(layer.expert_loads_before) / max(1, layer.forwards)
        for layer in capping
    ]
    least = [layer.min_expert_load for layer in capping if layer.min_expert_load is not None]
    return min(least, default=None), max(here, default=None)


def _overall(layers: Sequence[LayerStats]) -> OverallStats:
    """Combine the statistics of all layers, which run one after the other."""
    weights = [layer.assignments for layer in layers]
    peaks: dict[str, Any] = {
        f"{unit}_peak_to_mean_{when}": combine_peaks(
            [getattr(layer, f"{unit}_peak_to_mean_{when}") for layer in layers], weights
        )
        for unit in ("device", "expert")
        for when in ("before", "after")
    }
    active: dict[str, Any] = {
        name: sum(getattr(layer, name) for layer in layers) / len(layers)
        for name in ("most_active_experts_before", "most_active_experts_after")
    }
    sums: dict[str, Any] = {
        name: sum(getattr(layer, name) for layer in layers)
        for name in ("forwards", "capped_forwards", "narrowed_forwards", "tokens_without_expert")
    }
    return OverallStats(
        **peaks,
        straggler_loss_before=straggler_loss(peaks["device_peak_to_mean_before"]),
        straggler_loss_after=straggler_loss(peaks["device_peak_to_mean_after"]),
        worst_device_peak_to_mean_before=max(x.worst_device_peak_to_mean_before for x in layers),
        dropped_share=share(sum(layer.dropped for layer in layers), sum(weights)),
        **sums,
        **active,
    )


class LayerEvidence:
    """Choices of the tokens of one layer, added up over batches; see the module."""

    def __init__(self, num_experts: int, k: int) -> None:
        self.num_experts, self.k = num_experts, k
        self._pairs = self._alike = self._rows = 0
        self._largest = self._scored = 0
        self._spread = 0.0
        self._distinct: set[int] = set()

    def add(self, inputs: RoutingInputs) -> None:
        """Count one batch of this layer."""
        ids, scores, valid = inputs.topk_ids.long(), inputs.scores, inputs.valid
        if scores is None and self.k > 1:
            scores = inputs.topk_weights  # where the router's rule is unknown
        if valid is not None:
            ids = ids[valid]
            scores = None if scores is None else scores[valid]
        rows = len(ids)
        if not rows:
            return
        choice, count = torch.unique(_hash_sets(ids), return_counts=True)
        self._rows += rows
        self._pairs += rows * (rows - 1)
        self._alike += int((count * (count - 1)).sum())
        self._largest += int(count.max())
        self._distinct.update(choice.tolist())
        if scores is not None:
            wide = scores.double()
            relative = wide.std(-1, correction=0) / wide.mean(-1).abs()
            self._spread += float(relative.nan_to_num(nan=0.0, posinf=0.0).sum())
            self._scored += rows

    @property
    def same_choice(self) -> float:
        """Chance that two tokens of a batch choose the same set of experts."""
        return share(self._alike, self._pairs)

    @property
    def identical(self) -> bool:
        """True if tokens choose alike more often than those of any text."""
        sets = math.comb(self.num_experts, self.k)
        enough = self._rows >= FEW_TOKENS and sets > 1
        least = ONE_CHOICE if self.k == 1 else SAME_CHOICE
        return enough and self.same_choice > min(0.9, least + SETS / sets)

    @property
    def flat(self) -> bool:
        """True if the router hardly prefers an expert (equal scores are a rule of the model's)."""
        return self._scored >= FEW_TOKENS and 0 < self._spread / self._scored < FLAT

    def choices(self) -> Choices:
        """Sum up the sets of experts chosen, and the scores."""
        return Choices(
            distinct_choices=len(self._distinct),
            largest_choice_share=share(self._largest, self._rows),
            same_choice_chance=self.same_choice,
            score_spread=self._spread / self._scored if self._scored else None,
        )


def constant_norms(model: nn.Module) -> bool:
    """Return True if every normalisation weight of a model is one constant, so it is untrained.

    False where the model has none. A trained model whose normalisation was folded into its other
    weights has such constants too.

    >>> constant_norms(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    True
    """
    weights = [
        weight.detach()
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for weight in [getattr(module, "weight", None)]
        if isinstance(weight, Tensor) and weight.dim() == 1 and weight.numel() > 1
        if not weight.is_meta
    ]
    return bool(weights) and all(bool(weight.min() == weight.max()) for weight in weights)


def reasons(model: nn.Module, layers: Sequence[LayerEvidence]) -> list[str]:
    """List the reasons why the loads of these layers say nothing, as parts of a sentence.

    A sign in fewer than half of the layers is no reason.
    """
    found = []
    if constant_norms(model):
        found.append(
            "the model looks untrained: all its normalisation weights are constants, as a random "
            "initialisation leaves them"
        )
    identical = [layer for layer in layers if layer.identical]
    if identical and 2 * len(identical) >= len(layers):
        chance = sum(layer.same_choice for layer in identical) / len(identical)
        found.append(
            f"in {len(identical)} of {len(layers)} layers two tokens choose the very same experts "
            f"with a chance of {chance:.0%}, as identical rows or dummy weights make them"
        )
    flat = [layer for layer in layers if layer.flat]
    if flat and 2 * len(flat) >= len(layers):
        found.append(
            f"in {len(flat)} of {len(layers)} layers the router prefers no expert: the gate scores "
            "of a token are all but equal"
        )
    return found


def _hash_sets(ids: Tensor) -> Tensor:
    """Hash each set of experts, whatever its order, [tokens] int64."""
    sets = torch.zeros(ids.shape[:1], dtype=torch.int64, device=ids.device)
    for column in ids.sort(1).values.unbind(1):
        # a multiplicative hash that wraps: two of a batch's sets share one with a chance of 2^-40
        sets = (sets + column + 1) * 6364136223846793005
        sets = sets ^ (sets >> 29)
    return sets
