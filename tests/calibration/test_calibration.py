"""A calibration of a tiny model: what it finds, what is written, what is refused."""

from __future__ import annotations

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from model_runs import fingerprint, model_of
from typer.testing import CliRunner

from paceline import attach
from paceline.analysis.placement_search import Shape, search_map
from paceline.batches import Batch, Sampling, make_batches
from paceline.calibration.collect import calibrate
from paceline.calibration.fit import LOG_RIDGE, ROWS_PER_RANK, Moments, fit
from paceline.calibration.layer_fit import RIDGES
from paceline.cli.app import app
from paceline.facts import Facts
from paceline.routing import RoutingInputs
from paceline.stand_ins.calibration_file import FILE, Calibration, CalibrationError


class Letters:
    """A tokenizer: a character is a token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % tiny_models.VOCAB for c in text]}


TEXTS = {"a": "the quick brown fox " * 16, "b": "0123456789 over " * 16, "c": "lazy dogs " * 26}
SAMPLING = Sampling(tokens=720, batch_size=3, sequence_length=24)


@pytest.fixture(scope="module", params=["mixtral", pytest.param("gpt_oss", marks=pytest.mark.full)])
def found(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = model_of(request.param)
    before = fingerprint(model)
    result = calibrate(model, Letters(), TEXTS, rank=4, sampling=SAMPLING)
    assert fingerprint(model) == before
    return model, result


class Seen:
    """What a layer saw, by a hook of our own, and what its experts give."""

    def __init__(self, model: Any, name: str, count: int = 8) -> None:
        self.count = count
        self.experts = model.get_submodule(name).experts
        hidden, ids, weights, scores, text = [], [], [], [], []
        with attach(model) as pace:

            def keep(at: str, inputs: RoutingInputs, _: Any) -> None:
                if at == name:
                    ids.append(inputs.topk_ids)
                    weights.append(inputs.topk_weights)
                    known = inputs.scores.shape[1] - 1
                    scores.append(inputs.scores.gather(1, inputs.topk_ids.clamp(max=known)))

            pace.watch(keep, Facts(scores=True))
            hook = self.experts.register_forward_pre_hook(
                lambda _, args, kwargs: hidden.append((*args, *kwargs.values())[0]),
                with_kwargs=True,
            )
            for index, content in enumerate(TEXTS.values()):
                tokens = torch.tensor(Letters()(content)["input_ids"][:240]).view(-1, 24)
                for batch in tokens.split(SAMPLING.batch_size):
                    with torch.no_grad():
                        model(input_ids=batch)
                    text += [index] * batch.numel()
            hook.remove()
        self.sizes = [len(part) for part in ids]
        self.hidden = torch.cat([part.reshape(-1, part.shape[-1]) for part in hidden])
        self.ids, self.text = torch.cat(ids), torch.tensor(text)
        self.weights, self.scores = torch.cat(weights), torch.cat(scores)

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[rows] bool which were routed to an expert, and their [., hidden] inputs and outputs."""
        rows = (self.ids == expert).any(1)
        x = self.hidden[rows]
        with torch.no_grad():
            return rows, x, self.outputs(x, expert) if len(x) else x

    def outputs(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        ones = torch.ones(len(x), 1)
        out: torch.Tensor = self.experts(x, ones.long() * expert, ones)
        return out.reshape(x.shape)

    def counts(self, metric: torch.Tensor) -> torch.Tensor:
        """[rows, k] 0.05, and 1 more where a cap at the mean drops the assignment.

        Per device (every expert is one of 8) and per expert it is the same cap.
        """
        out, start = torch.full(metric.shape, 0.05), 0
        for size in self.sizes:
            places = -(-size * self.ids.shape[1] // self.count)
            for expert in range(self.count):
                at = (self.ids[start : start + size] == expert).nonzero().tolist()
                best = sorted(at, key=lambda p: -float(metric[start + p[0], p[1]]))
                for row, slot in best[places:]:
                    out[start + row, slot] += 1
            start += size
        return out

    def weights_of(self, ridge: float) -> torch.Tensor:
        """[rows, k] how much assignments count: what a stand-in leaves decides, beside the weight,
        which of them a cap drops."""
        first, expected = self.counts(self.scores), torch.zeros(self.ids.shape)
        for expert in range(self.count):
            _, x, y = self.of(expert)
            weight = first[self.ids == expert]
            if len(x):
                stand_in = fit(Moments.of(x, y, weight), 4, ridge)
                norms = (y - stand_in(x.double())).norm(dim=1)
                constant, slope = expected_log(x, norms, weight)
                mean = (weight.double() @ x.double() / weight.sum()).numpy()
                log = constant + (x.numpy() - mean) @ slope
                expected[self.ids == expert] = torch.from_numpy(np.exp(log)).float()
        weights = self.counts(self.weights * expected)
        assert (weights != first).any()
        return weights


class ZeroSeen(Seen):
    """Of LongCat's experts, whose loop can't run rows of one slot."""

    def outputs(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = (x @ self.experts.gate_up_proj[expert].T).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ self.experts.down_proj[expert].T


def expected_log(
    x: torch.Tensor, norms: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Ridge regression of log norms on inputs, in NumPy: constant at the mean, and slope."""
    x, weight = x.double().numpy(), weight.double().numpy()
    log = np.log(np.maximum(norms.double().numpy(), 1e-3 * float(norms.max())))
    share = weight / weight.sum()
    mean, constant = share @ x, share @ log
    far = x - mean
    xx = far.T @ (far * weight[:, None])
    penalty = LOG_RIDGE * np.trace(xx) / len(xx) * np.eye(len(xx))
    return constant, np.linalg.solve(xx + penalty, far.T @ (weight * (log - constant)))


def test_stand_ins_loads_and_norms_are_those_of_the_rows_routed(
    found: tuple[Any, Calibration],
) -> None:
    model, result = found
    assert result.tokens == (240, 240, 240)
    some = 0
    for layer in result.layers:
        seen = Seen(model, layer.name)
        weights = seen.weights_of(layer.ridge)
        for expert in range(8):
            rows, x, y = seen.of(expert)
            loads = torch.bincount(seen.text[rows], minlength=3)
            assert torch.equal(layer.loads[:, expert], loads)
            if len(x) == 0:
                assert layer.ranks[expert] == 0
                assert layer.output_norm[expert] == 0
                continue
            weight = weights[seen.ids == expert]
            norm = float(y.norm(dim=1) @ weight / weight.sum())
            assert float(layer.output_norm[expert]) == pytest.approx(norm, rel=1e-4)
            rank = int(layer.ranks[expert])
            assert rank <= min(4, len(x) // ROWS_PER_RANK)
            up, down = layer.up[expert].float(), layer.down[expert].float()
            assert (up[:, rank:] == 0).all()
            got = layer.bias[expert] + (x - layer.mean[expert]) @ down.T @ up.T
            want = torch.zeros_like(y)
            if rank:
                some += 1
                want = fit(Moments.of(x, y, weight), 4, layer.ridge)(x.double())
                near = 0.02 * float(want.norm(dim=1).mean())  # stored in bfloat16
                assert float((got - want).norm(dim=1).max()) < near
                left = float((y - got).norm(dim=1) @ weight / weight.sum())
                assert float(layer.residual_norm[expert]) == pytest.approx(left, rel=0.02)
                assert 0 < layer.explained_by_expert[expert] <= 1
            else:
                assert got.abs().max() == 0
            constant, slope = expected_log(x, (y - want).norm(dim=1), weight)
            assert float(layer.residual_log[expert]) == pytest.approx(constant, abs=1e-3)
            near = 0.01 * max(float(np.abs(slope).max()), 1e-6)  # stored in bfloat16
            assert np.abs(layer.residual_slope[expert].float().numpy() - slope).max() < near
        assert layer.ridge in RIDGES
    assert some


def test_zero_experts_are_none_to_learn() -> None:
    """LongCat's router names experts beyond the others, which give their input; its loop over
    experts can't run rows of one slot."""
    model = model_of("longcat_flash")
    result = calibrate(model, Letters(), TEXTS, rank=4, sampling=SAMPLING)
    some = 0
    for layer in result.layers:
        count = model.get_submodule(layer.name).experts.num_routed_experts
        seen = ZeroSeen(model, layer.name, count)
        weights = seen.weights_of(layer.ridge)
        assert (seen.ids >= count).any()
        assert layer.loads.shape == (3, count)
        for expert in range(count):
            _, x, y = seen.of(expert)
            weight = weights[seen.ids == expert]
            assert int(layer.loads[:, expert].sum()) == len(x)
            if len(x):
                norm = float(y.norm(dim=1) @ weight / weight.sum())
                assert float(layer.output_norm[expert]) == pytest.approx(norm, rel=1e-4)
                some += 1
    assert some


def test_it_is_read_as_it_was_written_by_its_owner_alone(
    found: tuple[Any, Calibration], tmp_path: Path
) -> None:
    _, result = found
    path = result.save(tmp_path / "new" / "folder")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == [FILE]
    read = Calibration.load(path.parent)
    assert (read.architecture, read.texts, read.tokens) == (
        result.architecture,
        result.texts,
        result.tokens,
    )
    for a, b in zip(read.layers, result.layers, strict=True):
        assert (a.name, a.k, a.router, a.experts) == (b.name, b.k, b.router, b.experts)
        for name, tensor in a.tensors().items():
            assert torch.equal(tensor, b.tensors()[name])


@pytest.mark.parametrize("cut", [0, 5, 200, -8])
def test_a_damaged_file_is_one_sentence(
    found: tuple[Any, Calibration], tmp_path: Path, cut: int
) -> None:
    path = found[1].save(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CalibrationError, match=r"is no calibration: .*[^.]$"):
        Calibration.load(tmp_path)


def test_less_memory_changes_nothing(found: tuple[Any, Calibration]) -> None:
    model, result = found
    again = calibrate(model, Letters(), TEXTS, rank=4, sampling=SAMPLING, memory=1)
    for a, b in zip(again.layers, result.layers, strict=True):
        for name, tensor in a.tensors().items():
            torch.testing.assert_close(tensor, b.tensors()[name])


def test_the_verb_refuses_bad_input_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    cases = [
        (["nowhere/at/all", "--text", "a", "--out", str(tmp_path / "o")], "--text a can't be read"),
        (["demo", "--out", str(tmp_path / "file")], "must be a folder"),
        (["demo", "--dtype", "int3", "--out", str(tmp_path / "o")], "int3"),
        (
            ["demo", "--rank", "0", "--tokens", "64", "--out", str(tmp_path / "o")],
            "rank must be a whole number >= 1, got 0",
        ),
    ]
    for arguments, said in cases:
        result = CliRunner().invoke(app, ["tune", *arguments])
        assert result.exit_code == 2, result.output
        assert said in result.output


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed by the system while it fits the second layer; then it gives what one run gives."""
    model = model_of("mixtral")
    model.save_pretrained(tmp_path / "model")
    program = f"""
import os, sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from pathlib import Path
from test_calibration import *
from transformers import AutoModelForCausalLM
def tell(done, total, what):
    print(done, total, what, flush=True)
    if "ended" not in sys.argv and done == 19:
        os.kill(os.getpid(), 9)
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}).eval()
calibrate(model, Letters(), TEXTS, rank=4, devices=4, sampling=SAMPLING,
          unfinished=Path({str(tmp_path)!r}) / "unfinished", progress=tell).save(sys.argv[1])
"""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)

    killed = run(str(tmp_path / "first"))
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "first").exists()
    (kept,) = (tmp_path / "unfinished").iterdir()
    assert [p.name for p in kept.iterdir()] == ["0"]
    again = run(str(tmp_path / "second"), "ended")
    assert again.returncode == 0, again.stderr
    assert again.stdout.split()[:2] == ["16", "48"]  # the first layer's experts are there already
    whole = calibrate(model, Letters(), TEXTS, rank=4, devices=4, sampling=SAMPLING)
    got = Calibration.load(tmp_path / "second")
    for a, b in zip(got.layers, whole.layers, strict=True):
        assert a.placement == b.placement
        for name, tensor in a.tensors().items():
            torch.testing.assert_close(tensor, b.tensors()[name])


def test_placements_are_those_of_the_texts_loads(found: tuple[Any, Calibration]) -> None:
    model, _ = found
    result = calibrate(model, Letters(), TEXTS, rank=1, devices=4, sampling=SAMPLING)
    for layer, placement in zip(result.layers, result.plan().placements, strict=True):
        ids = Seen(model, layer.name).ids
        loads = np.stack([np.bincount(part.flatten(), minlength=8) for part in ids.split(64)])
        want = search_map(loads, Shape(8, 4)).placement
        assert placement == want
        assert len(set(placement.sizes)) == 1
    with pytest.raises(ValueError, match=r"devices must be .* got 9"):
        calibrate(model, Letters(), TEXTS, devices=9, sampling=SAMPLING)


def test_texts_that_do_not_cover_each_other_are_named(found: tuple[Any, Calibration]) -> None:
    result = found[1]
    layers = [
        replace(layer, explained=0.8, explained_by_text=(0.7, 0.1, 0.9)) for layer in result.layers
    ]
    (said,) = replace(result, layers=tuple(layers)).warnings()
    assert said.startswith("b is not covered by the other texts")
    assert "10%" in said


def same(one: Calibration, other: Calibration) -> None:
    assert (one.texts, one.tokens) == (other.texts, other.tokens)
    for a, b in zip(one.layers, other.layers, strict=True):
        for name, tensor in a.tensors().items():
            torch.testing.assert_close(tensor, b.tensors()[name], rtol=1e-3, atol=1e-4)


def test_batches_of_arguments_teach_what_their_texts_do() -> None:
    """With padding too, which teaches nothing."""
    model = model_of("mixtral")
    want = calibrate(model, Letters(), TEXTS, rank=4, sampling=SAMPLING)
    batches, _ = make_batches(Letters(), TEXTS, SAMPLING)
    same(calibrate(model, None, batches, rank=4), want)
    padded = []
    for batch in batches:
        ids = torch.nn.functional.pad(batch.ids, (0, 6), value=7)
        mask = torch.nn.functional.pad(torch.ones_like(batch.ids), (0, 6))
        padded.append(Batch(ids, batch.sources, {"attention_mask": mask}))
    same(calibrate(model, None, padded, rank=4), want)
    nothing = [Batch(b.ids, b.sources, {"attention_mask": b.ids * 0}) for b in batches]
    for empty in ([], nothing):
        with pytest.raises(ValueError, match="must have at least one token"):
            calibrate(model, None, empty, rank=4)
