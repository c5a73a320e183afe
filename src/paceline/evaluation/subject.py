"""What is judged: which policies of a model, beside none, and a fingerprint of what was applied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from paceline.evaluation.store import Store, digest
from paceline.evaluation.tally import Tally
from paceline.plan import Plan
from paceline.policy import CapacityPolicy
from paceline.settings import PoliciesLike
from paceline.stand_ins.calibration_file import Calibration
from paceline.stand_ins.identity import plain

BASELINE = "none"
"""Name of the run without a policy, which everything is compared with."""

SAMPLED = 256
"""Values of every weight that a fingerprint looks at."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and how it is run: under each of its policies, after a run without one.

    Attributes:
        model: a Mixture-of-Experts model in evaluation mode.
        tokenizer: its tokenizer.
        policies: name -> what is applied, one for all layers or one a layer; the first is none.
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
        """Name the policies: by their short form, and "plan" for those of the plan.

        Raises:
            ValueError: if a policy is given twice.
        """
        named: dict[str, PoliciesLike] = {BASELINE: None}
        for policy in policies:
            name = str(policy) or "no cap"
            if name in named:
                raise ValueError(f"the policy {name} is given twice: allowed is once.")
            named[name] = policy
        if plan.policies:
            named["plan"] = plan.policies if len(plan.policies) > 1 else plan.policies[0]
        if calibration is None and (folder := plan.calibration_folder()) is not None:
            calibration = Calibration.load(folder)
        return cls(model, tokenizer, named, Plan(placements=plan.placements), calibration)

    def fingerprint(self) -> str:
        """A short hash of the model's weights, its calibration, the placement and the libraries.

        Of every weight, up to SAMPLED values spread over it are looked at.
        """
        seen = hashlib.sha256()
        weights = self.model.state_dict().items()
        for name, weight in (part for own, whole in weights for part in plain(own, whole)):
            seen.update(f"{name} {list(weight.shape)} {weight.dtype} {weight.device.type}".encode())
            if weight.device.type != "meta" and weight.numel():
                step = max(1, weight.numel() // SAMPLED)
                values = weight.detach().flatten()[::step][:SAMPLED].to("cpu", torch.float64)
                seen.update(values.numpy().tobytes())
        for layer in self.calibration.layers if self.calibration else ():
            for name, tensor in layer.tensors().items():
                seen.update(name.encode() + tensor.double().contiguous().numpy().tobytes())
        libraries = [version(name) for name in ("paceline", "torch", "transformers")]
        return digest([seen.hexdigest(), self.plan.to_toml(), *libraries])


def judged(
    pace: Any, store: Store, fingerprint: str, batch: Any, run: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What a batch gives under the policies in force, with its tally: kept, or run now.

    Args:
        pace: handle of the attached model.
        store: of results.
        fingerprint: of the subject.
        batch: JSON-able, what is run.
        run: runs it; JSON-able.
    """
    of_batch = digest(batch)
    key = [fingerprint, [policy.to_json() for policy in pace.policies], of_batch]

    def compute() -> dict[str, Any]:
        pace.reset_stats()
        pace.number_forwards_from(int(of_batch[:8], 16))  # the same draws whatever ran before
        found = run()
        return {**found, "tally": Tally.of(pace.stats()).to_dict()}

    result: dict[str, Any] = store.get(key, compute)
    return result
