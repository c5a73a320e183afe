"""The model under evaluation with its policies, and the batches that have been computed of it.

A result is kept under a hash of everything that it depends on: the model's weights, the policies
applied, and the batch. A killed run so continues where it was, and another policy, text or task
computes what is new and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline.engines.transformers import attach
from paceline.evaluation.results import LayerLoads, NamedPolicy, SubjectFacts
from paceline.files import write_text
from paceline.placement import ExpertPlacement
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.settings import PoliciesLike
from paceline.stand_ins.calibration_file import Calibration
from paceline.stand_ins.identity import plain_parts

BASELINE = "none"
"""Name of the run without a policy, which everything is compared with."""

STATE = "state"
"""Folder of computed batches, inside that of the results."""

_SAMPLED = 256  # values of every weight that a fingerprint reads
_FORM = 4  # of what is kept of a batch


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and how it is run: under each of its policies, after a run without one.

    Attributes:
        model: a Mixture-of-Experts model in evaluation mode.
        tokenizer: its tokenizer.
        policies: name -> one policy for all layers or one per layer; the first is None.
        plan: where experts are.
        calibration: for policies that compensate.
    """

    model: Any
    tokenizer: Any
    policies: dict[str, PoliciesLike]
    plan: Plan
    calibration: Calibration | None

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Any,
        policies: Sequence[CapacityPolicy],
        plan: Plan,
        calibration: Calibration | None = None,
    ) -> Subject:
        """Name the policies by their short form, and those of the plan "plan".

        Raises:
            ValueError: if a policy is given twice.
        """
        named: dict[str, PoliciesLike] = {BASELINE: None}
        for policy in policies:
            name = str(policy) or "no cap"
            if name in named:
                raise ValueError(f"policies must differ, got {name} twice.")
            named[name] = policy
        if plan.policies:
            named["plan"] = plan.policies if len(plan.policies) > 1 else plan.policies[0]
        if calibration is None and (folder := plan.calibration_folder()) is not None:
            calibration = Calibration.load(folder)
        return cls(model, tokenizer, named, Plan(placements=plan.placements), calibration)

    def attach(self) -> Any:
        """Attach to the model without a policy; every sequence of a batch is on one device."""
        return attach(
            self.model,
            None,
            plan=self.plan,
            calibration=self.calibration,
            token_source="sequence",
        )

    def describe(self) -> SubjectFacts:
        """Describe the model, where its experts are, and the policies.

        Raises:
            ValueError: if a policy can't be applied to the model.
        """
        with self.attach() as pace:
            for policy in self.policies.values():  # refused before the work, not in the middle
                pace.policy = policy
            layers = pace.stats().layers
            placements = [
                placement or ExpertPlacement.per_expert(len(layer.expert_loads_before))
                for placement, layer in zip(pace.placements, layers, strict=True)
            ]
        fitted = self.calibration
        return SubjectFacts(
            architecture=type(self.model).__name__,
            parameters=sum(weight.numel() for weight in self.model.parameters()),
            dtype=str(self.model.dtype).removeprefix("torch."),
            layers=len(layers),
            experts=len(layers[0].expert_loads_before),
            devices=max(placement.num_devices for placement in placements),
            experts_per_device=list(placements[0].sizes),
            calibrated_on=None
            if fitted is None
            else dict(zip(fitted.texts, fitted.tokens, strict=True)),
            weights=weights_hash(self.model),
            policies=[
                NamedPolicy(name=name, policy=_short_form(policy))
                for name, policy in self.policies.items()
            ],
        )

    def fingerprint(self) -> str:
        """Hash the model's weights, its calibration, the placement and the libraries."""
        seen = hashlib.sha256()
        for layer in self.calibration.layers if self.calibration else ():
            for name, tensor in layer.tensors().items():
                seen.update(name.encode() + tensor.double().contiguous().numpy().tobytes())
        libraries = [version(name) for name in ("paceline", "torch", "transformers")]
        return digest(
            [_FORM, weights_hash(self.model), seen.hexdigest(), self.plan.to_toml(), *libraries]
        )


def weights_hash(model: Any) -> str:
    """Hash a model's weights: of each up to 256 values spread over it, with its dtype."""
    seen = hashlib.sha256()
    weights = model.state_dict().items()
    for name, weight in (part for own, whole in weights for part in plain_parts(own, whole)):
        seen.update(f"{name} {list(weight.shape)} {weight.dtype} {weight.device.type}".encode())
        if weight.device.type != "meta" and weight.numel():
            step = max(1, weight.numel() // _SAMPLED)
            values = weight.detach().flatten()[::step][:_SAMPLED].to("cpu", torch.float64)
            seen.update(values.numpy().tobytes())
    return seen.hexdigest()[:32]


def _short_form(policy: Any) -> str | list[str] | None:
    if policy is None:
        return None
    return list(map(str, policy)) if isinstance(policy, (list, tuple)) else str(policy)


class Store:
    """Results by their keys, on disk where a folder is given.

    Args:
        folder: made if need be, closed to others; None keeps nothing beyond the run.

    Attributes:
        computed: results that weren't there.
        found: results that were.

    Raises:
        OSError: if the folder can't be made.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self.computed, self.found = folder, 0, 0
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return the result under a JSON-able key; compute and keep it if it isn't there."""
        if self._folder is None:
            self.computed += 1
            return compute()
        path = self._folder / f"{digest(key)}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or broken by somebody else: computed anew
            kept = json.loads(json.dumps(compute()))
            write_text(path, json.dumps(kept), private=True)
            self.computed += 1
        else:
            self.found += 1
        return kept


def digest(value: Any) -> str:
    """Return a short hash of a JSON-able value.

    >>> digest([1, "a"]) == digest([1, "a"]), digest([1, "a"]) == digest([1, "b"])
    (True, False)
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def run_or_read(
    pace: Any, store: Store, fingerprint: str, batch: Any, run: Callable[[], Any]
) -> tuple[Any, list[LayerLoads]]:
    """Run a batch under the current policies, or read what an earlier run found.

    Args:
        pace: handle of the attached model.
        store: of results.
        fingerprint: of the subject.
        batch: JSON-able, identifies what is run.
        run: returns the answers, JSON-able.

    Returns:
        The answers, and the loads of every layer.
    """
    of_batch = digest(batch)
    key = [fingerprint, [policy.to_json() for policy in pace.policies], of_batch]

    def compute() -> list[Any]:
        pace.reset_stats()
        pace.number_forwards_from(int(of_batch[:8], 16))  # the same draws whatever ran before
        found = run()
        layers = [LayerLoads.model_validate(layer) for layer in pace.stats().layers]
        return [found, [layer.to_dict() for layer in layers]]

    found, layers = store.get(key, compute)
    return found, [LayerLoads(**layer) for layer in layers]
