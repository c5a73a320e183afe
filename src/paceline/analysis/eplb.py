"""EPLB, the expert-parallelism load balancer of DeepSeek, as published: replicate, then pack.

The algorithm (github.com/deepseek-ai/EPLB): give replicas one by one to the expert with the
largest load per replica; pack heaviest first into the lightest device with a free slot, equally
many slots per device. Where the groups of a group-limited router divide by the nodes, first pack
whole groups onto nodes and do the rest inside each node. Written from that description. Loads are
float32, and sorted and summed by torch, as in the original, whose order among equal loads is
torch's: so its maps are equal slot by slot.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from paceline.analysis.expert_map import ExpertMap, load_table

Weights = NDArray[np.float32]
Ids = NDArray[np.int64]


def eplb_map(
    loads: ArrayLike, num_devices: int, replicas: int = 0, groups: int = 1, nodes: int = 1
) -> ExpertMap:
    """Make EPLB's map of one layer.

    Args:
        loads: [experts] load of each expert.
        replicas: slots beyond one per expert.
        groups: expert groups of a group-limited router.
        nodes: machines that share the devices equally.

    Raises:
        ValueError: unless slots divide by devices, devices by nodes and experts by groups.

    >>> eplb_map([5, 1, 1, 5], num_devices=2).slots
    (0, 1, 3, 2)
    """
    weights = load_table(np.asarray(loads)[None])[0].astype(np.float32)
    slots = len(weights) + replicas
    if replicas < 0 or num_devices < 1 or slots % num_devices:
        raise ValueError(
            f"slots per device must be equal for EPLB, got {len(weights)} experts and {replicas} "
            f"replicas on {num_devices} devices"
        )
    if groups < 1 or len(weights) % groups:
        raise ValueError(f"groups must divide the {len(weights)} experts, got {groups}")
    if nodes < 1 or num_devices % nodes or (groups % nodes == 0 and slots % nodes):
        raise ValueError(
            f"nodes must divide the {num_devices} devices and the {slots} slots, got {nodes}"
        )
    if groups % nodes:  # groups don't fit nodes: all devices are one pool
        groups = nodes = 1
    order = _whole_groups(weights, groups, nodes)
    here = len(weights) // nodes
    placed: list[int] = []
    for node in range(nodes):
        experts = order[node * here : (node + 1) * here]
        placed += _one_node(weights, experts, slots // nodes, num_devices // nodes)
    return ExpertMap(tuple(placed), len(weights), num_devices)


def _whole_groups(weights: Weights, groups: int, nodes: int) -> Ids:
    """Order experts by node, groups whole, [experts]."""
    size = len(weights) // groups
    sums = torch.from_numpy(weights).reshape(groups, size).sum(-1)
    members = pack(np.asarray(sums.numpy(), np.float32), nodes)
    return np.array([g * size + i for node in members for g in node for i in range(size)])


def _one_node(weights: Weights, experts: Ids, slots: int, devices: int) -> list[int]:
    """Place the experts of one node on its slots."""
    chosen, copies = replicate(weights[experts], slots)
    share = np.asarray(weights[experts] / copies.astype(np.float32), np.float32)
    return [int(experts[chosen[s]]) for device in pack(share[chosen], devices) for s in device]


def replicate(weights: Weights, slots: int, most: int | None = None) -> tuple[Ids, Ids]:
    """Give every expert a slot, and each further slot to the largest load per replica.

    Args:
        most: slots of one expert while another has fewer; None: any, as published.

    Returns:
        ([slots] expert of each slot, [experts] slots of each expert).

    >>> replicate(np.array([1, 6, 2], np.float32), slots=5)[0].tolist()
    [0, 1, 2, 1, 1]
    """
    copies = np.ones(len(weights), np.int64)
    chosen = list(range(len(weights)))
    for _ in range(slots - len(weights)):
        share = weights / copies.astype(np.float32)
        if most is not None and copies.min() < most:
            share[copies >= most] = -1
        heaviest = int(np.argmax(share))
        copies[heaviest] += 1
        chosen.append(heaviest)
    return np.array(chosen), copies


def pack(weights: Weights, packs: int) -> list[list[int]]:
    """Pack equally many items, heaviest first, each into the lightest pack with a place.

    Returns:
        the items of each pack, in the order in which they came.

    >>> pack(np.array([3, 9, 5, 4], np.float32), packs=2)
    [[1, 0], [2, 3]]
    """
    places = len(weights) // packs
    if places == 1:
        return [[item] for item in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    sums = np.zeros(packs, np.float32)
    for item in torch.from_numpy(weights).sort(descending=True).indices.tolist():
        lightest = min((p for p in range(packs) if len(packed[p]) < places), key=sums.__getitem__)
        packed[lightest].append(item)
        sums[lightest] += weights[item]
    return packed
