"""The cost model against sums written out by hand, and what it must say in the limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.cost import (
    LayerShape,
    device_seconds,
    exchange_seconds,
    layer_cost,
    layer_shape,
    padded_rows,
)
from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.hardware import PRESETS, Hardware, hardware_of, save_hardware
from paceline.model_config import read_model_config

PLAIN = Hardware("plain", flops=1e12, memory=1e11, memory_size=1e9, link=1e9, network=5e8,
                 devices_per_node=2, launch=1e-5, per_expert=1e-6, exchange=2e-5,
                 tile=64)  # fmt: skip
SHAPE = LayerShape(hidden=100, expert_size=50, experts=4, k=2)


def by_hand(rows: list[float], shape: LayerShape, hardware: Hardware) -> float:
    """Seconds of one device's experts, one expert after the other."""
    seconds = hardware.launch if any(rows) else 0.0
    for count in rows:
        if not count:
            continue
        tile = 16
        while tile < min(count, hardware.tile):
            tile *= 2
        tile = min(tile, hardware.tile)
        computed = -(-count // tile) * tile
        seconds += hardware.per_expert + 3 * shape.hidden * shape.expert_size * 2 / hardware.memory
        seconds += computed * 6 * shape.hidden * shape.expert_size / hardware.flops
        seconds += count * (2 * shape.hidden + 4 * shape.expert_size) * 2 / hardware.memory
    return seconds


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_a_device_is_the_sum_of_its_experts(rows: list[int]) -> None:
    found = device_seconds([[float(r) for r in rows]], SHAPE, PLAIN)
    assert float(found[0]) == pytest.approx(by_hand([float(r) for r in rows], SHAPE, PLAIN))


@given(st.lists(st.integers(0, 500), min_size=4, max_size=4), st.data())
def test_a_layer_waits_for_its_slowest_device(rows: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(4)))
    where = ExpertMap(tuple(order), 4, 2)
    received = [data.draw(st.integers(0, 500)) for _ in range(2)]
    cost = layer_cost([rows], [100], where, SHAPE, PLAIN, [received])
    devices = [
        by_hand([float(rows[e]) for e in part], SHAPE, PLAIN) for part in (order[:2], order[2:])
    ]
    assert float(cost.seconds["experts"][0]) == pytest.approx(max(devices))
    wide = max(received) / 2 * 100 * 2  # half of the tokens live elsewhere, 2 bytes a value
    assert float(cost.seconds["dispatch"][0]) == pytest.approx(2e-5 + wide / 1e9)
    assert float(cost.busiest_bytes[0]) == pytest.approx(wide)
    assert float(cost.bytes[0]) == pytest.approx(sum(received) / 2 * 100 * 4)
    assert cost.active[0].tolist() == [sum(rows[e] > 0 for e in p) for p in (order[:2], order[2:])]
    assert float(cost.balanced[0]) <= float(cost.total[0]) + 1e-12
    assert float(cost.total[0]) == pytest.approx(sum(float(s[0]) for s in cost.seconds.values()))


def test_far_devices_are_reached_over_the_network() -> None:
    received = np.array([1e6])
    assert float(exchange_seconds(received, 2, PLAIN)[0]) == pytest.approx(2e-5 + 1e6 / 1e9)
    # 4 devices on 2 machines: 2 of 3 others are far
    far = float(exchange_seconds(received, 4, PLAIN)[0])
    assert far == pytest.approx(2e-5 + 1e6 * 2 / 3 / 5e8)
    assert float(exchange_seconds(received, 1, PLAIN)[0]) == 0


@given(st.lists(st.integers(0, 500), min_size=4, max_size=4), st.integers(1, 400))
def test_shared_experts_take_their_time_whatever_the_loads(rows: list[int], tokens: int) -> None:
    """One more expert of their size on every device, for the tokens that live there."""
    where, shape = ExpertMap.contiguous(4, 2), replace(SHAPE, shared=70)
    plain = layer_cost([rows], [tokens], where, SHAPE, PLAIN)
    cost = layer_cost([rows], [tokens], where, shape, PLAIN)
    added = by_hand([tokens / 2], replace(SHAPE, expert_size=70), PLAIN)
    assert float(cost.seconds["shared"][0]) == pytest.approx(added)
    assert float(cost.total[0] - plain.total[0]) == pytest.approx(added)
    assert float(cost.balanced[0] - plain.balanced[0]) == pytest.approx(added)
    for stage in ("gate", "dispatch", "experts", "combine"):
        assert cost.seconds[stage] == plain.seconds[stage]


@pytest.mark.parametrize(
    ("fields", "shared"),
    [({}, 0), ({"n_shared_experts": 2}, 2 * 1408), ({"n_shared_experts": None}, 0),
     ({"shared_expert_intermediate_size": 5632}, 5632), ({"num_shared_experts": 1}, 1408),
     ({"shared_intermediate_size": 0}, 0)],
)  # fmt: skip
def test_shared_experts_are_read_from_the_config(
    fields: dict[str, int], shared: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 1408, "num_experts": 64,
             "num_experts_per_tok": 6}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes | fields))
    assert layer_shape(tmp_path).shared == shared


def test_replicas_read_their_weights_too() -> None:
    copied = ExpertMap((0, 1, 0), 2, 3)
    shape = replace(SHAPE, experts=2)
    cost = layer_cost([[64, 16]], [40], copied, shape, PLAIN)
    assert cost.active[0].tolist() == [1, 1, 1]
    assert float(cost.seconds["experts"][0]) == pytest.approx(by_hand([32.0], shape, PLAIN))


@given(st.floats(0.5, 5000), st.sampled_from([1, 16, 64, 128]))
def test_padding_never_loses_rows_and_wastes_less_than_a_tile(rows: float, tile: int) -> None:
    padded = float(padded_rows(np.array([rows]), tile)[0])
    assert rows <= padded < max(2 * rows, rows + tile, 17)
    if rows >= tile:
        assert padded % tile == 0


@pytest.mark.parametrize("name", ["h20", "h100", "h200", "b200", "a100", "mi300x"])
def test_a_cap_buys_nothing_where_weights_rule_and_much_where_rows_do(name: str) -> None:
    """Decode of 64 tokens and prefill of half a million, one device twice as busy as the mean."""
    shape, where = LayerShape(2048, 1408, 64, 6), ExpertMap.contiguous(64, 8)
    gains = []
    for tokens in (64, 1 << 19):
        even = np.full(64, tokens * 6 / 64)
        skewed = even.copy()
        skewed[:8] *= 2
        skewed[8:] *= 48 / 56
        seconds = [
            float(layer_cost([loads], [tokens], where, shape, PRESETS[name]).total[0])
            for loads in (skewed, even)
        ]
        gains.append(seconds[0] / seconds[1])
    assert gains[0] < 1.15
    assert gains[1] > 1.6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flops": 0}, "flops must be above 0, got 0"),
        ({"memory": -1}, "memory must be above 0, got -1"),
        ({"launch": -1}, "launch must be at least 0, got -1"),
        ({"tile": 0}, "tile and .* got 0, "),
        ({"link": float("nan")}, "link must be above 0, got nan"),
    ],
)
def test_hardware_that_cannot_be(change: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **change)


def test_hardware_files(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    save_hardware(PLAIN, file, {"more": 1})
    assert hardware_of(str(file)) == PLAIN
    for text in ("{", "[]", "{}", '{"hardware": {"x": 1}}', '{"hardware": {"name": "x"}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="holds no hardware"):
            hardware_of(str(file))
    with pytest.raises(ValueError, match="one of h20"):
        hardware_of("h999")
    with pytest.raises(ValueError, match="doesn't compute in fp8"):
        PRESETS["a100"].reachable("fp8")
    measured = replace(PLAIN, precision="fp32")
    assert measured.reachable("fp32") == PLAIN.flops
    with pytest.raises(ValueError, match="was measured in fp32"):
        measured.reachable("bf16")


@pytest.mark.parametrize(
    "loads", [([[1, 2]], [1]), ([[1, 2, 3, 4]], [1, 2])], ids=["experts", "batches"]
)
def test_shapes_that_do_not_fit(loads: tuple[list[list[int]], list[int]]) -> None:
    with pytest.raises(ValueError, match=r"must be (of the same|one) number"):
        layer_cost(*loads, ExpertMap.contiguous(4, 2), SHAPE, PLAIN)
    with pytest.raises(ValueError, match="received"):
        layer_cost([[1] * 4], [1], ExpertMap.contiguous(4, 2), SHAPE, PLAIN, [[1, 2, 3]])


def test_sizes_from_configs(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    text = {"hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "n_group": 8}  # fmt: skip
    config.write_text(json.dumps(text | {"quantization_config": {"quant_method": "fp8"}}))
    assert layer_shape(tmp_path) == LayerShape(7168, 2048, 256, 8, "fp8")
    assert layer_shape(config, "bf16").precision == "bf16"
    found = read_model_config(config)
    assert (found.hidden_layers, found.expert_groups) == (61, 8)
    config.write_text(json.dumps({"text_config": text, "hidden_size": 1}))
    assert layer_shape(config) == LayerShape(7168, 2048, 256, 8)
    for broken in ({**text, "hidden_size": "x"}, {k: v for k, v in text.items() if "tok" not in k}):
        config.write_text(json.dumps(broken))
        with pytest.raises(
            ValueError, match=r"must be a whole number|must state num_experts_per_tok"
        ):
            layer_shape(config)
