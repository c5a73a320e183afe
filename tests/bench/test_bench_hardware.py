"""The fit of a device finds what made the timings; measuring runs real experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.analysis.cost import LayerShape, device_seconds
from paceline.analysis.hardware import Hardware, hardware_of
from paceline.bench.hardware import Timing, fit, is_decode, left_out, measure, within
from paceline.cli.app import app

TRUE = Hardware("true", flops=1.5e11, memory=1.2e10, memory_size=1e9, link=1e9, launch=3e-4,
                per_expert=4e-5, exchange=0, tile=1, slow_rows=16, slow_flops=3e10,
                activations=4e9)  # fmt: skip


def timings(hardware: Hardware, seed: int, noise: float = 0.0) -> list[Timing]:
    rng = np.random.default_rng(seed)
    out = []
    for hidden, size in rng.integers(256, 3000, (8, 2)).tolist():
        shape = LayerShape(hidden, size, 8, 1, "fp32")
        for mean in (1, 5, 20, 100, 400):
            rows = rng.gamma(2, mean / 2, 8).astype(int)
            rows[0] += 1
            seconds = float(device_seconds([rows], shape, hardware)[0])
            out.append(
                Timing(shape, tuple(rows.tolist()), seconds * float(np.exp(noise * rng.normal())))
            )
    return out


def test_the_device_that_made_the_timings_is_found() -> None:
    found = fit(timings(TRUE, 0), timings(TRUE, 1))
    assert np.abs(found.held_out).max() < 1e-6
    assert within(found.held_out) == len(found.held_out)
    for name in ("flops", "memory", "launch", "per_expert", "slow_flops", "activations"):
        assert getattr(found.hardware, name) == pytest.approx(getattr(TRUE, name), rel=1e-4), name
    assert found.hardware.slow_rows == 16


def test_noise_is_averaged_out() -> None:
    found = fit(timings(TRUE, 0, noise=0.1), timings(TRUE, 1))
    assert np.abs(found.held_out).max() < 0.12


def test_a_wrong_device_is_seen_on_shapes_that_took_no_part() -> None:
    slower = Hardware(**{**TRUE.__dict__, "flops": TRUE.flops / 3, "memory": TRUE.memory / 3})
    found = fit(timings(TRUE, 0), timings(slower, 1))
    assert within(found.held_out) < len(found.held_out) / 2


def test_every_size_is_judged_by_the_others() -> None:
    """Noise and one size that is slower than its sizes say: it alone is off."""
    seen = timings(TRUE, 0, noise=0.02)
    odd = seen[10].shape
    seen = [replace(t, seconds=t.seconds * (1.5 if t.shape == odd else 1)) for t in seen]
    errors = dict(zip(seen, left_out(seen), strict=True))
    of_odd = [e for t, e in errors.items() if t.shape == odd]
    others = [e for t, e in errors.items() if t.shape != odd]
    assert max(of_odd) < -0.2
    assert within(others) >= 0.7 * len(others)
    decode = [t for t in seen if is_decode(t)]
    assert decode
    assert all(sum(t.rows) / 8 <= 4 for t in decode)
    assert len(decode) < len(seen)


def test_measuring_runs_every_case() -> None:
    told: list[tuple[int, int, str]] = []
    found = measure(
        ((64, 32), (96, 48)), means=(1, 6), rounds=1, progress=lambda *s: told.append(s)
    )
    assert [(t.shape.hidden, t.shape.expert_size) for t in found] == [(64, 32)] * 2 + [(96, 48)] * 2
    assert all(t.seconds > 0 and len(t.rows) == 8 and sum(t.rows) > 0 for t in found)
    assert told[-1][:2] == (8, 8)


def test_too_few_timings() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        fit(timings(TRUE, 0)[:7])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.bench.hardware as bench

    monkeypatch.setattr(bench, "FIT_SIZES", ((64, 32), (96, 48)))
    monkeypatch.setattr(bench, "HELD_OUT_SIZES", ((80, 40),))
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr("paceline.bench.timing.keep_freed_memory", lambda: True)
    out = tmp_path / "here.json"
    arguments = ["bench", "hardware", "--out", str(out), "--rounds", "1", "--link", "2"]
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    assert len(said["held_out"]) == len(bench.MEAN_ROWS)
    assert 0 <= said["held_out_within_15_percent"] <= len(bench.MEAN_ROWS)
    assert 0 < said["decode_cases"] < len(bench.MEAN_ROWS)
    found = hardware_of(str(out))
    assert (found.link, found.precision) == (2e9, "fp32")
    for wrong in (["--rounds", "0"], ["--link", "0"], ["--out", "no/where.json"]):
        assert CliRunner().invoke(app, ["bench", "hardware", *wrong]).exit_code == 2
