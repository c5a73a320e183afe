"""Expert maps, their figures, and the forms of other engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline import ExpertPlacement
from paceline.analysis.expert_map import (
    FORMS,
    ExpertMap,
    layer_numbers,
    replica_bytes,
    write_form,
)

SAMPLES = Path(__file__).resolve().parents[1] / "traces" / "samples"
ALONE = ExpertMap((2, 0, 3, 1), num_experts=4, num_devices=2)
COPIED = ExpertMap((3, 0, 1, 1, 2, 1), num_experts=4, num_devices=3)


@given(st.integers(1, 12), st.data())
def test_a_placement_survives_as_slots(experts: int, data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, experts))
    order = data.draw(st.permutations(range(experts)))
    found = ExpertMap(tuple(order), experts, devices)
    again = ExpertMap.of_placement(found.placement)
    assert again.placement == found.placement
    loads = np.array(data.draw(st.lists(st.integers(0, 9), min_size=experts, max_size=experts)))
    want = [
        sum(int(loads[e]) for e in found.placement.experts_of(d)) for d in range(found.num_devices)
    ]
    assert found.device_loads([loads])[0].tolist() == want


def test_replicas_share_the_load() -> None:
    assert COPIED.device_loads([[10, 30, 5, 1]]).tolist() == [[11, 20, 15]]
    assert COPIED.replicas == 2
    with pytest.raises(ValueError, match="one device per expert"):
        _ = COPIED.placement


def test_replica_bytes_are_those_of_the_device_that_pays_most() -> None:
    # 6 slots on 3 devices; 4 experts alone would be 2, 1, 1
    assert replica_bytes([COPIED] * 5, 100, 10, 2) == 5 * 3 * 100 * 10 * 2
    assert replica_bytes([ALONE], 100, 10, 2) == 0
    assert replica_bytes([], 100, 10, 2) == 0


def test_uneven_placements_can_not_be_ordered() -> None:
    with pytest.raises(ValueError, match="experts per device must be"):
        ExpertMap.of_placement(ExpertPlacement.explicit([0, 0, 0, 1]))


@pytest.mark.parametrize("slots", [(0, 1), (0, 1, 3), (0, 1, 2, -1)])
def test_every_expert_has_a_slot(slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="slots must name each"):
        ExpertMap(slots, num_experts=3, num_devices=2)


def test_forms() -> None:
    maps = {3: COPIED, 1: ExpertMap((0, 1, 2, 3, 0, 1), 4, 3)}
    texts = {form: write_form(form, maps, hidden_layers=5) for form in FORMS}
    want = [[0, 1, 2, 3, 0, 1], [3, 0, 1, 1, 2, 1]]
    assert json.loads(texts["vllm"][1]) == want
    located = json.loads(texts["sglang"][1])["physical_to_logical_map"]
    trivial = [0, 1, 2, 3, 0, 1]
    assert located == [trivial, want[0], trivial, want[1], trivial]
    balancer = yaml.safe_load(texts["tensorrt-llm"][1])
    assert balancer == {
        "initial_global_assignments": {1: want[0], 3: want[1]},
        "layer_updates_per_iter": 0,
        "num_slots": 6,
    }


def test_forms_are_those_of_the_engines_files() -> None:
    """Files in the formats that SGLang, TensorRT-LLM and vLLM Ascend read, written again."""
    located = json.loads((SAMPLES / "sglang" / "init_expert_location.json").read_text())
    rows = located["physical_to_logical_map"]
    maps = {layer: ExpertMap(tuple(row), 64, 8) for layer, row in enumerate(rows)}
    assert json.loads(write_form("sglang", maps, len(rows))[1]) == located
    text = (SAMPLES / "trtllm" / "moe_load_balancer.yaml").read_text()
    assigned = yaml.safe_load(text)["initial_global_assignments"]
    maps = {layer: ExpertMap(tuple(row), 64, 8) for layer, row in assigned.items()}
    assert write_form("tensorrt-llm", maps, 5)[1] == text
    ascend = json.loads((SAMPLES / "vllm_ascend" / "expert_map.json").read_text())
    maps = {
        layer["layer_id"]: ExpertMap(
            tuple(e for device in layer["device_list"] for e in device["device_expert"]), 64, 8
        )
        for layer in ascend["layer_list"]
    }
    assert json.loads(write_form("vllm-ascend", maps, 2)[1]) == ascend


def test_forms_refuse_what_they_can_not_say() -> None:
    with pytest.raises(ValueError, match=r"form must be one of .*, got 'x'"):
        write_form("x", {0: ALONE}, 1)
    with pytest.raises(ValueError, match="same number of slots"):
        write_form("sglang", {0: ALONE, 1: COPIED}, 2)
    with pytest.raises(ValueError, match="hidden_layers must be above 1"):
        write_form("sglang", {1: ALONE}, 1)


def test_layer_numbers() -> None:
    assert layer_numbers(["layer 13", "model.layers.2.mlp.experts4"]) == [13, 2]
    assert layer_numbers(["llama4.layers.7.feed_forward"]) == [7]
    with pytest.raises(ValueError, match="must have its number"):
        layer_numbers(["mlp"])
    with pytest.raises(ValueError, match="must differ"):
        layer_numbers(["layers.1.text_moe", "layers.1.vision_moe"])
