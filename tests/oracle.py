"""The slow, obvious form of the routing rules: loops, sorted() with tuple keys, exact fractions.

`route_oracle` answers what `paceline.route` must answer. It reads a policy only through its
fields and shares no code with the package, so that a mistake has to be made twice to go unseen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

INT64_MAX = 2**63 - 1
DECODE_CLASS = 128  # above every priority a token can have


@dataclass(eq=False)
class Item:
    """One (token, expert) pair that asks for a place."""

    token: int
    slot: int
    expert: int
    score: float
    weight: float
    metric: float = 0.0


@dataclass
class Expected:
    """What `route` must return; lists of lists, shapes as in `Assignment`."""

    topk_ids: list[list[int]]
    topk_weights: list[list[float]]
    kept: list[list[bool]]
    capacity: list[list[int]]
    loads_before: list[list[int]]
    loads_after: list[list[int]]
    expert_loads_before: list[int]
    expert_loads_after: list[int]
    dropped: int
    extras: int
    gate_mass_kept: float
    narrowed: bool
    active_before: list[int]
    active_after: list[int]
    tokens_without_expert: int
    renormalized: set[int] = field(default_factory=set)  # tokens whose weights were rescaled


def capacity_of(factor: Fraction, tokens: int, k: int, hosted: int, experts: int) -> int:
    """ceil(factor * tokens * k * hosted / experts), at most the largest int64."""
    above, below = factor.numerator * tokens * k * hosted, factor.denominator * experts
    return min(-(-above // below), INT64_MAX)


def mix32(x: int) -> int:
    """The 32-bit finaliser of the `random` order."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def random_metric(seed: int, layer: int, step: int, rank: int, expert: int) -> int:
    """The hash that `keep="random"` prefers the larger of."""
    h = mix32(seed % 2**32)
    for value in (layer, step, rank, expert):
        h = mix32(h ^ (value % 2**32 * 0x9E3779B9 % 2**32))
    return h


def descending(x: float) -> tuple[int, float]:
    """Sort key: larger first, then -inf, then NaN; -0.0 and 0.0 are equal."""
    return (1, 0.0) if math.isnan(x) else (0, -x)


def route_oracle(inputs: Any, policy: Any, placement: Any = None) -> Expected:
    """Route as docs/method.md says, one pair at a time. Shapes as in `RoutingInputs`."""
    ids = inputs.topk_ids.tolist()
    weights = inputs.topk_weights.double().tolist()
    T, k = inputs.topk_ids.shape
    scores = None if inputs.scores is None else inputs.scores.float().tolist()
    topk_scores = None if inputs.topk_scores is None else inputs.topk_scores.float().tolist()

    # How many experts there are, which device hosts each, and what is capped.
    if placement is not None:
        E, host, devices = placement.num_experts, placement.expert_to_device, placement.num_devices
    else:
        E = inputs.scores.shape[1] if scores is not None else inputs.num_experts
        host, devices = tuple(range(E)), E
    if policy.unit == "device":
        unit_of, units = host, devices
    else:
        unit_of, units = tuple(range(E)), E
    hosted = [sum(1 for e in range(E) if unit_of[e] == u) for u in range(units)]

    # Which rows count, and which budget each of them shares.
    valid = [True] * T if inputs.valid is None else inputs.valid.tolist()
    tokens = [t for t in range(T) if valid[t]]
    if policy.pool == "batch":
        pools, pool_of = 1, dict.fromkeys(tokens, 0)
    elif policy.pool == "source":
        pools, pool_of = devices, {t: int(inputs.token_source[t]) for t in tokens}
    else:
        labels = sorted({int(inputs.token_request[t]) for t in tokens})
        pools, pool_of = T, {t: labels.index(int(inputs.token_request[t])) for t in tokens}
    members = [[t for t in tokens if pool_of[t] == p] for p in range(pools)]
    rank = {t: members[pool_of[t]].index(t) for t in tokens}

    # Which pools are capped in this forward?
    factor = policy.capacity_factor
    watches = policy.mode == "observe"
    caps = factor is not None and math.isfinite(factor) and not watches
    minimum = 8 if policy.min_expert_load == "auto" else policy.min_expert_load  # 8: on a CPU
    decode = [False] * T
    if policy.phase == "prefill" and inputs.token_decode is not None:
        decode = inputs.token_decode.tolist()

    def is_capped(pool: list[int]) -> bool:
        judged = pool if policy.pool == "request" else tokens
        if Fraction(len(judged) * k, E) < Fraction(str(minimum)):
            return False
        if policy.phase == "prefill" and inputs.token_decode is not None:
            return any(not decode[t] for t in pool)
        return True

    capped = [caps and is_capped(pool) for pool in members]
    f = Fraction(str(factor)) if caps else None
    capacity = [
        [capacity_of(f, len(pool), k, n, E) if f is not None and cap else INT64_MAX for n in hosted]
        for pool, cap in zip(members, capped, strict=True)
    ]

    # With few tokens weights are what costs: which experts may a device read for each pool?
    few = Fraction(len(tokens) * k, E) < Fraction(str(minimum))
    narrowed = policy.max_active is not None and not watches and few

    def may_read(pool: list[int]) -> set[int]:
        sums: dict[int, Fraction] = {}
        for t in pool:
            for e, w in zip(ids[t], weights[t], strict=True):
                if 0 <= e < E:
                    counted = Fraction(0 if math.isnan(w) else max(-128.0, min(128.0, w)))
                    sums[e] = sums.get(e, Fraction(0)) + counted
        allowed: set[int] = set()
        for d in range(devices):
            mine = [e for e in range(E) if host[e] == d]
            most = policy.max_active
            if not isinstance(most, int):
                most = math.ceil(Fraction(str(most)) * len(mine))
            wanted = sorted((e for e in mine if e in sums), key=lambda e: (-sums[e], e))
            allowed.update(wanted[:most])
        return allowed

    readable = [may_read(pool) if narrowed else set(range(E)) for pool in members]

    # The order of preference.
    priority = [0] * T
    if inputs.token_priority is not None:
        priority = [max(-128, min(127, int(p))) for p in inputs.token_priority]
    priority = [DECODE_CLASS if decode[t] else priority[t] for t in range(T)]

    def order(item: Item) -> tuple[Any, ...]:
        return (-priority[item.token], descending(item.metric), item.token, item.slot)

    def set_metric(item: Item) -> None:
        step = int(inputs.step)
        if policy.keep == "score":
            item.metric = item.score
        elif policy.keep == "weight":
            item.metric = item.weight
        elif policy.keep == "contribution":
            norms = inputs.expert_norms.float()
            norm = float((norms[item.token] if norms.dim() == 2 else norms)[item.expert])
            item.metric = float(np.float32(item.weight) * np.float32(norm))
        elif policy.keep == "first":
            item.metric = -item.token
        elif policy.keep == "last":
            item.metric = item.token
        else:
            assert policy.keep == "random"
            item.metric = random_metric(
                policy.seed, inputs.layer, step, rank[item.token], item.expert
            )

    # The model's own choices.
    genuine: list[Item] = []
    for t in tokens:
        for j in range(k):
            e = ids[t][j]
            if 0 <= e < E:
                s = math.nan
                if scores is not None:
                    s = scores[t][e]
                elif topk_scores is not None:
                    s = topk_scores[t][j]
                genuine.append(Item(t, j, e, s, weights[t][j]))
    own: dict[int, list[Item]] = {t: [] for t in tokens}
    for item in genuine:
        own[item.token].append(item)

    # Candidates beyond them, best score first.
    slots = k
    extras: list[Item] = []
    if policy.expand is not None and policy.mode != "observe" and factor is not None:
        largest = max(sum(1 for h in host if h == d) for d in range(devices))
        width = {"own_device": largest, "visited_devices": min(E, k * largest), "all": E}
        limit = E if policy.expand_limit is None else policy.expand_limit
        slots = k + min(limit, width[policy.expand])
        for t in [t for t in tokens if capped[pool_of[t]]]:
            assert scores is not None
            sum_w, sum_s = sum(a.weight for a in own[t]), sum(a.score for a in own[t])
            if not (0 < sum_w < math.inf and 0 < sum_s < math.inf):
                continue
            where = set(range(devices))
            if policy.expand == "own_device":
                where = {int(inputs.token_source[t])}
            elif policy.expand == "visited_devices":
                where = {host[a.expert] for a in own[t]}
            mine = {a.expert for a in own[t]}
            options = [e for e in range(E) if host[e] in where and e not in mine]
            options = [e for e in options if scores[t][e] > -math.inf]  # nor NaN
            options.sort(key=lambda e: (-scores[t][e], e))
            for i, e in enumerate(options[:limit]):
                exact = torch.tensor(scores[t][e] * sum_w / sum_s, dtype=torch.float64)
                w = exact.float().to(inputs.topk_weights.dtype).item()
                extras.append(Item(t, k + i, e, scores[t][e], w))
    for item in genuine + extras:
        set_metric(item)

    # Who survives.
    def by_unit(items: list[Item]) -> list[list[list[Item]]]:
        groups: list[list[list[Item]]] = [[[] for _ in range(units)] for _ in range(pools)]
        for a in items:
            groups[pool_of[a.token]][unit_of[a.expert]].append(a)
        return groups

    survivors: list[Item] = []
    compete = policy.expand is not None and policy.expand_rule == "compete"
    asking = by_unit(genuine + extras if compete else genuine)
    for p in range(pools):
        for u in range(units):
            here = [a for a in asking[p][u] if a.expert in readable[p]]
            survivors += sorted(here, key=order)[: capacity[p][u]]
    if compete and policy.max_experts is not None:
        for t in tokens:
            best = sorted(
                (a for a in survivors if a.token == t),
                key=lambda a: (descending(a.score), a.slot),
            )
            for loser in best[policy.max_experts :]:
                survivors.remove(loser)
    if not compete and f is not None:
        offered = extras
        if policy.max_experts is not None:
            offered = []
            for t in tokens:
                left = policy.max_experts - sum(1 for a in survivors if a.token == t)
                offered += [a for a in extras if a.token == t][:left]
        fill = min(f, Fraction(str(policy.fill_to)))
        taken, asking = by_unit(survivors), by_unit(offered)
        for p in range(pools):
            for u in range(units):
                room = capacity_of(fill, len(members[p]), k, hosted[u], E) - len(taken[p][u])
                survivors += sorted(asking[p][u], key=order)[: max(room, 0)]

    def loads(items: list[Item]) -> list[list[int]]:
        return [[len(group) for group in row] for row in by_unit(items)]

    def mass(items: list[Item]) -> float:
        no_scores = scores is None and topk_scores is None
        values = [a.weight if no_scores else a.score for a in items]
        return sum(v for v in values if not math.isnan(v))

    def active(items: list[Item]) -> list[int]:
        return [len({a.expert for a in items if host[a.expert] == d}) for d in range(devices)]

    kept_genuine = [a for a in survivors if a.slot < k]
    expected = Expected(
        topk_ids=[], topk_weights=[], kept=[], capacity=capacity,
        loads_before=loads(genuine), loads_after=loads(survivors),
        expert_loads_before=[sum(1 for a in genuine if a.expert == e) for e in range(E)],
        expert_loads_after=[sum(1 for a in survivors if a.expert == e) for e in range(E)],
        dropped=len(genuine) - len(kept_genuine),
        extras=len(survivors) - len(kept_genuine),
        gate_mass_kept=mass(kept_genuine) / mass(genuine) if mass(genuine) else 1.0,
        narrowed=narrowed,
        active_before=active(genuine), active_after=active(survivors),
        tokens_without_expert=len({a.token for a in genuine} - {a.token for a in survivors}),
    )  # fmt: skip

    # What is written out: shadow shows the model's own choice.
    shown, slots = (genuine, k) if policy.mode == "shadow" else (survivors, slots)
    expected.topk_ids = [[E] * slots for _ in range(T)]
    expected.topk_weights = [[0.0] * slots for _ in range(T)]
    expected.kept = [[False] * slots for _ in range(T)]
    for t in tokens:
        mine_kept = [a for a in shown if a.token == t]
        lost = len(own[t]) - sum(1 for a in mine_kept if a.slot < k)
        former, now = sum(a.weight for a in own[t]), sum(a.weight for a in mine_kept)
        scale = 1.0
        if policy.renormalize and lost and 0 < now < math.inf and math.isfinite(former):
            scale = former / now
            expected.renormalized.add(t)
        for a in mine_kept:
            expected.topk_ids[t][a.slot] = a.expert
            expected.topk_weights[t][a.slot] = a.weight * scale
            expected.kept[t][a.slot] = True
    return expected
