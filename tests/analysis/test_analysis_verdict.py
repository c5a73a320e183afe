"""The verdict follows the figures."""

from __future__ import annotations

from typing import Any

from paceline.analysis.verdict import verdict


def _result(peak: float, after: float, **more: Any) -> dict[str, Any]:
    return {
        "devices": 8,
        "policy": None,
        "mode": "observe",
        "layers": [{"experts_per_device": [4, 4]}],
        "overall": {
            "device_peak_to_mean_before": peak,
            "device_peak_to_mean_after": after,
            "straggler_loss_before": 1 - 1 / peak,
            "dropped_share": 0.031,
            "capped_forwards": 5,
        },
    } | more


def test_wait_and_ceiling() -> None:
    (line,) = verdict(_result(1.6, 1.6))
    assert "waits 38% " in line
    assert "at most 1.60× as fast" in line


def test_nearly_balanced_says_so() -> None:
    assert any("little to gain" in line for line in verdict(_result(1.03, 1.03)))


def test_policy_enforced_in_shadow_and_idle() -> None:
    policy = {"policy": "capacity_factor=1.25", "mode": "enforce"}
    line = verdict(_result(1.5, 1.25, **policy))[1]
    assert "drops 3.1% of the assignments and allows the expert part to run 1.20×" in line
    line = verdict(_result(1.5, 1.25, **policy | {"mode": "shadow"}))[1]
    assert "would drop 3.1% of the assignments and would" not in line
    assert "would drop 3.1%" in line
    assert "gains nothing in time" in verdict(_result(1.2, 1.2, **policy))[1]
    idle = _result(1.5, 1.5, **policy)
    idle["overall"]["capped_forwards"] = 0
    assert "capped nothing" in verdict(idle)[1]


def test_unequal_devices_are_named() -> None:
    result = _result(1.5, 1.5, layers=[{"experts_per_device": [3, 2]}])
    assert "different numbers of experts" in verdict(result)[-1]
