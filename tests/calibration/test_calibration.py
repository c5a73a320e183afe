"""A calibration of a tiny model: what it finds, what is written, what is refused."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import tiny_models
from helpers import fingerprint, model_of

from paceline.analysis.observe import Sampling
from paceline.calibration.collect import RIDGES, calibrate
from paceline.calibration.file import FILE, Calibration, CalibrationError
from paceline.calibration.fit import ROWS_PER_RANK, Regression
from paceline.cli.app import app


class Letters:
    """A tokenizer: a character is a token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % tiny_models.VOCAB for c in text]}


TEXTS = {"a": "the quick brown fox " * 16, "b": "0123456789 over " * 16, "c": "lazy dogs " * 26}
SAMPLING = Sampling(tokens=720, batch_size=3, sequence_length=24)


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def found(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = model_of(request.param)
    before = fingerprint(model)
    result = calibrate(model, Letters(), TEXTS, rank=4, sampling=SAMPLING)
    assert fingerprint(model) == before
    return model, result


def rows_of_layer(model: Any, name: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """By a hook of our own: [rows, hidden] inputs, [rows, k] ids and the text of each row."""
    hidden, ids, text = [], [], []

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        hidden.append(given[0].reshape(-1, given[0].shape[-1]))
        ids.append(given[1])

    hook = model.get_submodule(name).experts.register_forward_pre_hook(keep, with_kwargs=True)
    for index, content in enumerate(TEXTS.values()):
        tokens = torch.tensor(Letters()(content)["input_ids"][:240]).view(-1, 24)
        with torch.no_grad():
            model(input_ids=tokens)
        text += [index] * tokens.numel()
    hook.remove()
    return torch.cat(hidden), torch.cat(ids), text


def test_stand_ins_loads_and_norms_are_those_of_the_rows_routed(
    found: tuple[Any, Calibration],
) -> None:
    model, result = found
    assert result.tokens == (240, 240, 240)
    some = 0
    for layer in result.layers:
        hidden, ids, text = rows_of_layer(model, layer.name)
        experts = model.get_submodule(layer.name).experts
        for expert in range(8):
            rows = (ids == expert).any(1)
            x = hidden[rows]
            loads = torch.bincount(torch.tensor(text)[rows], minlength=3)
            assert torch.equal(layer.loads[:, expert], loads)
            if len(x) == 0:
                assert layer.ranks[expert] == 0
                assert layer.output_norm[expert] == 0
                continue
            one = torch.full((len(x), 1), expert)
            with torch.no_grad():
                y = experts(x, one, torch.ones(len(x), 1)).reshape(x.shape)
            norm = float(y.norm(dim=1).mean())
            assert float(layer.output_norm[expert]) == pytest.approx(norm, rel=1e-4)
            rank = int(layer.ranks[expert])
            assert rank <= min(4, len(x) // ROWS_PER_RANK)
            up, down = layer.up[expert], layer.down[expert]
            assert (up[:, rank:] == 0).all()
            got = layer.bias[expert] + (x - layer.mean[expert]) @ down.T @ up.T
            if rank:
                some += 1
                want = Regression(x, y).fit(4, layer.ridge)(x.double())
                torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)
                assert 0 < layer.explained_by_expert[expert] <= 1
            else:
                assert got.abs().max() == 0
        assert layer.ridge in RIDGES
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
    with pytest.raises(CalibrationError, match=r"is no calibration: .*\.$"):
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
        (["demo", "--out", str(tmp_path / "file")], "is a file"),
        (["demo", "--dtype", "int3", "--out", str(tmp_path / "o")], "int3"),
        (["demo", "--rank", "0", "--tokens", "64", "--out", str(tmp_path / "o")], "rank=0"),
    ]
    for arguments, said in cases:
        result = CliRunner().invoke(app, ["calibrate", *arguments])
        assert result.exit_code == 2, result.output
        assert said in result.output
