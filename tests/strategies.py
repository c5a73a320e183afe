"""Hypothesis strategies: a routing call as it may really come, ties and oddities included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs
from paceline.policy import KEEPS

FACTORS = [0.1, 1e-3, 1 / 3, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3, 0.1 + 0.2, 1e30]
ID_DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]
WEIGHT_DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
FEW = np.array([0.0, 0.125, 0.25, 0.5, 1.0], dtype=np.float32)
ODD = np.array([np.nan, -np.inf, -0.0, 0.0, 0.5, -0.25, 2.0**-20], dtype=np.float32)
ZEROS = np.array([0.0, -0.0], dtype=np.float32)


@dataclass
class Case:
    """One call of `route`."""

    inputs: RoutingInputs
    policy: CapacityPolicy
    placement: ExpertPlacement | None

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self.inputs).items() if v is not None}
        return f"Case(policy={self.policy!s}, placement={self.placement}, inputs={shown})"


def _noncontiguous(x: torch.Tensor) -> torch.Tensor:
    """The same values behind other strides."""
    return torch.stack([x, x], dim=-1)[..., 0]


@st.composite
def placements(draw: Any, num_experts: int, optional: bool = True) -> ExpertPlacement | None:
    """Contiguous, one device an expert, or any map: devices out of order, some of them empty."""
    kind = draw(st.sampled_from(["none", "contiguous", "explicit", "per_expert"]))
    if kind == "none" and optional:
        return None
    if kind == "contiguous" and num_experts >= 2:
        return ExpertPlacement.contiguous(num_experts, draw(st.integers(2, num_experts)))
    if kind == "per_expert" or num_experts < 2:
        return ExpertPlacement.per_expert(num_experts)
    devices = draw(st.integers(2, 6))
    host = draw(st.lists(st.integers(0, devices - 1), min_size=num_experts, max_size=num_experts))
    return ExpertPlacement.explicit(host, num_devices=devices)


@st.composite
def policies(draw: Any, k: int = 2, expansion: bool | None = None, **fixed: Any) -> CapacityPolicy:
    """Any policy that can be combined; `fixed` fields stay as given."""
    fields: dict[str, Any] = {
        "capacity_factor": draw(st.sampled_from(FACTORS if expansion is not True else FACTORS[3:])),
        "unit": draw(st.sampled_from(["device", "expert"])),
        "pool": draw(st.sampled_from(["batch", "source", "request"])),
        "keep": draw(st.sampled_from(["score", "score", *KEEPS])),
        "min_expert_load": draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2.5, 0.1, "auto"])),
        "phase": draw(st.sampled_from(["all", "all", "prefill"])),
        "mode": draw(st.sampled_from(["enforce"] * 4 + ["shadow"])),
        "renormalize": draw(st.booleans()),
        "compensate": False,
        "seed": draw(st.sampled_from([0, 1, 12345, 2**32 - 1])),
    }
    if draw(st.booleans()) if expansion is None else expansion:
        fields.update(
            expand=draw(st.sampled_from(["own_device", "visited_devices", "all"])),
            expand_limit=draw(st.sampled_from([None, None, 1, 2, 3])),
            expand_rule=draw(st.sampled_from(["fill", "compete"])),
            max_experts=draw(st.sampled_from([None, k, k + 1, k + 2])),
        )
        if fields["expand_rule"] == "fill":
            fields["fill_to"] = draw(st.sampled_from([1.0, 1.0, 0.7, 1.1, 1.5, 0.1 + 0.2]))
    fields.update(fixed)
    if not fields["renormalize"] and "compensate" not in fixed:
        fields["compensate"] = draw(st.booleans())
    return CapacityPolicy(**fields)


@st.composite
def cases(
    draw: Any,
    max_tokens: int = 24,
    expansion: bool | None = None,
    distinct: bool = False,
    plain: bool = False,
    **fixed: Any,
) -> Case:
    """A call of `route`.

    `distinct`: all scores differ and each row's ids are its top-k. `plain`: no repeated and no
    out-of-range ids, no NaN or infinity.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # sizes from the generator: hypothesis would make most batches nearly empty
    T = int(rng.integers(0, 4 if rng.random() < 0.2 else max_tokens + 1))
    E = int(rng.integers(2, 10))
    k = E if rng.random() < 0.1 else int(rng.integers(1, min(E, 4) + 1))
    policy = draw(policies(k=k, expansion=expansion, **fixed))
    placement = draw(placements(E))
    devices = E if placement is None else placement.num_devices

    flavours = ["softmax", "few"] if plain else ["softmax", "few", "odd", "zeros"]
    if expansion:  # zeros and NaN gain nothing
        flavours = ["softmax", "few", "few", "softmax", *flavours[2:3]]
    flavour = "distinct" if distinct else draw(st.sampled_from(flavours))
    if flavour == "distinct":
        scores = (rng.permutation(T * E).reshape(T, E) + 1).astype(np.float32) / 256
    elif flavour == "softmax":
        logits = rng.normal(size=(T, E))
        if draw(st.booleans()):
            logits[:, rng.integers(E)] += 4  # one hot expert
        scores = np.exp(logits)
        scores = (scores / scores.sum(1, keepdims=True)).astype(np.float32)
    else:
        values = {"few": FEW, "odd": ODD, "zeros": ZEROS}[flavour]
        scores = rng.choice(values, size=(T, E)).astype(np.float32)

    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int64)
    choice = "top" if distinct else draw(st.sampled_from(["top", "top", "any", "repeat", "hot"]))
    if choice in ("any", "repeat") and T:
        ids = np.stack([rng.permutation(E)[:k] for _ in range(T)])
    if choice == "repeat" and not plain:
        ids = rng.integers(0, E, size=(T, k))
    if choice == "hot" and T:  # everybody's first choice is the same expert
        hot = int(rng.integers(E))
        others = np.delete(np.arange(E), hot)
        ids = np.stack([np.append(hot, rng.permutation(others))[:k] for _ in range(T)])
    id_dtype = draw(st.sampled_from(ID_DTYPES))
    if not plain and draw(st.integers(0, 3)) == 0:
        odd = [E, E + 1, 255] + ([] if id_dtype == torch.uint8 else [-1, -E, -(2**15)])
        odd += [2**63 - 1, -(2**63)] if id_dtype == torch.int64 else []
        ids = np.where(rng.random((T, k)) < 0.25, rng.choice(odd, size=(T, k)), ids)

    reach = np.clip(ids, 0, E - 1)
    weights = np.take_along_axis(scores, reach, 1)
    kind = draw(st.sampled_from(["scores", "normal", "scaled", "few"] + ["odd"] * (not plain)))
    if kind == "normal":
        with np.errstate(all="ignore"):
            weights = weights / weights.sum(1, keepdims=True)
        weights = np.nan_to_num(weights, nan=0.25, posinf=1.0, neginf=0.0)
    elif kind == "scaled":
        weights = weights * np.float32(2.5)
    elif kind in ("few", "odd"):
        weights = rng.choice(FEW if kind == "few" else ODD, size=(T, k))
    if plain:
        weights = np.abs(weights) + np.float32(0.125)

    t_ids = torch.from_numpy(ids).to(id_dtype)
    t_weights = torch.from_numpy(weights.astype(np.float32)).to(
        draw(st.sampled_from(WEIGHT_DTYPES))
    )
    t_scores: torch.Tensor | None = torch.from_numpy(scores)
    t_topk_scores: torch.Tensor | None = None
    if policy.expand is None:
        ways = ["all", "all", "topk", "both"] + ["neither"] * (not distinct)
        given = draw(st.sampled_from(ways))
        if given in ("topk", "both"):
            t_topk_scores = torch.from_numpy(rng.permutation(scores.T).T[:, :k].copy())
        if given in ("topk", "neither"):
            t_scores = None
        if given == "neither" and policy.keep == "score":
            policy = policy.replace(keep="weight")

    some = (lambda: True) if not T else (lambda: draw(st.booleans()))
    valid = None
    if some():
        share = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
        valid = torch.from_numpy(rng.random(T) < share)
    needs_source = policy.pool == "source" or policy.expand == "own_device"
    source = None
    if needs_source or some():
        hosts = rng.permutation(devices)[: int(rng.integers(1, devices + 1))]  # some without tokens
        source = torch.from_numpy(rng.choice(hosts, size=T, p=_skewed(len(hosts))))
        source = source.to(draw(st.sampled_from([torch.int64, torch.int32])))
    request = None
    if policy.pool == "request" or some():
        labels = np.array([-7, 0, 3, 10**12])[: int(rng.integers(1, 5))]
        request = torch.from_numpy(rng.choice(labels, size=T))
    priority = None
    if draw(st.integers(0, 2)) == 0:
        levels = np.array(
            [[-1, 0, 1], [-1000, -128, -127], [126, 127, 1000], [0, 0, 5]][rng.integers(4)]
        )
        priority = torch.from_numpy(rng.choice(levels, size=T))
    decode = None
    if (policy.phase == "prefill" and draw(st.integers(0, 4))) or some():
        decode = torch.from_numpy(rng.random(T) < draw(st.sampled_from([0.0, 0.3, 1.0])))
    norms = None
    if policy.keep == "contribution" or some():
        shape = E if some() else (T, E)
        norms = torch.from_numpy(rng.choice(np.float32([0, 0.5, 1, 1.5, 3]), size=shape))
    layer, step = draw(st.sampled_from([(0, 0), (3, 17), (40, -1), (1, 2**31)]))
    tensors = {
        "topk_ids": t_ids,
        "topk_weights": t_weights,
        "scores": t_scores,
        "expert_norms": norms,
        "topk_scores": t_topk_scores,
        "valid": valid,
        "token_source": source,
        "token_request": request,
        "token_priority": priority,
        "token_decode": decode,
    }
    if draw(st.integers(0, 3)) == 0:
        tensors = {n: None if x is None else _noncontiguous(x) for n, x in tensors.items()}
    inputs = RoutingInputs(
        **tensors,
        num_experts=E if t_scores is None or draw(st.booleans()) else None,
        layer=layer,
        step=torch.tensor(step) if draw(st.booleans()) else step,
    )
    return Case(inputs, policy, placement)


SHARES = [0.01, 0.1, 1 / 3, 0.5, 0.6, 0.1 + 0.2]


@st.composite
def narrow_cases(draw: Any, capped: bool | None = None, **options: Any) -> Case:
    """A call of `route` with a max_active that may bind, and a threshold near its size.

    `capped`: whether there is a capacity_factor too.
    """
    fixed = {"pool": draw(st.sampled_from(["batch", "batch", "source"])), "phase": "all"}
    loads = [10**6, 10**6, 1, 2.5, 0.1, "auto"]
    fixed["min_expert_load"] = draw(st.sampled_from(loads))
    if capped is False or (capped is None and draw(st.booleans())):
        fixed["capacity_factor"] = None
    case = draw(cases(**{**fixed, **options}))
    experts = case.inputs.experts(case.placement)
    devices = experts if case.placement is None else case.placement.num_devices
    some = draw(st.integers(1, max(1, min(devices, experts // 2))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    host = rng.permutation(devices)[:some][rng.integers(0, some, size=experts)]
    host[: experts // some + 1] = host[0]  # a device that hosts several
    placement = ExpertPlacement.explicit(host.tolist(), num_devices=devices)
    largest = max(placement.sizes)
    shares = [x for x in SHARES if math.ceil(Fraction(str(x)) * largest) < largest]
    most = draw(st.sampled_from([*range(1, min(largest, 5)), *shares]))
    return Case(case.inputs, case.policy.replace(max_active=most), placement)


def _skewed(n: int) -> np.ndarray:
    """Uneven shares of n sources."""
    p = 1.0 / np.arange(1, n + 1) ** 1.5
    return p / p.sum()
