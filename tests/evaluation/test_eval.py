"""`paceline eval`: its figures against computations of our own, its sentences, and a kill."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline import attach
from paceline.cli.app import app
from paceline.demo.assets import load_calibration, read_text
from paceline.shipped import CALIBRATION_FOLDER, TASK_FOLDER

SMALL = ["--tokens", "512", "--sequence-length", "64", "--batch-size", "4"]
TEXTS = ["--text", "prose", "--text", "german"]
CAP, HARD = "capacity_factor=1.0", "capacity_factor=0.5,unit=expert"


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments])


def _eval(*arguments: str) -> Any:
    ran = _run(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def _row(policies: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (row,) = [each for each in policies if each["name"] == name]
    return row


@pytest.fixture(scope="module")
def judged() -> Any:
    return _eval("demo", *TEXTS, *SMALL, "--policy", CAP, "--policy", HARD)


def _logits(model: Any, ids: Any, policy: str | None) -> tuple[Any, float, float]:
    """Logits of a batch, the dropped share and the busiest device, counted where experts run."""
    devices, experts, k = 8, 32, 4
    busiest, run_rows, chosen_rows = [], 0, 0
    with attach(model, policy, devices) as pace:

        def count(layer: str, run: Any, hidden: Any, ids: Any, weights: Any) -> Any:
            nonlocal run_rows, chosen_rows
            loads = torch.bincount(ids[ids < experts].flatten(), minlength=experts)
            rows = loads.view(devices, -1).sum(1)
            chosen = hidden.reshape(-1, hidden.shape[-1]).shape[0] * k
            busiest.append(int(rows.max()) * devices / chosen)
            run_rows, chosen_rows = run_rows + int(rows.sum()), chosen_rows + chosen
            return run(hidden, ids, weights)

        undo = pace.replace_experts(count)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
        undo()
    return logits, 1 - run_rows / chosen_rows, sum(busiest) / len(busiest)


@pytest.mark.parametrize("policy", [CAP, HARD])
def test_text_figures_are_what_experts_and_logits_say(
    demo: tuple[Any, Any], judged: Any, policy: str
) -> None:
    model, tokenizer = demo
    ratios, losses_of, shares, peaks, changed = [], {}, [], [], []
    for text in ("prose", "german"):
        ids = torch.tensor(tokenizer(read_text(text))["input_ids"][:256]).view(4, 64)
        greedy, nll = {}, {}
        for each in (None, policy):
            logits, share, peak = _logits(model, ids, each)
            chance = logits[:, :-1].double().log_softmax(-1)
            nll[each] = -chance.gather(2, ids[:, 1:, None])[..., 0].sum(1)
            greedy[each] = logits[:, :-1].argmax(-1)
        ratios.append(math.exp((nll[policy].sum() - nll[None].sum()) / (4 * 63)) - 1)
        losses_of[text] = nll
        shares.append(share)
        peaks.append(peak)
        changed.append((greedy[policy] != greedy[None]).double().mean())
    row = _row(judged["texts"]["compositions"]["one_text"]["policies"], policy)
    change = row["perplexity_change"]
    assert change["mean"] == pytest.approx(sum(ratios) / 2, rel=1e-4)
    assert change["by_domain"]["german"] == pytest.approx(ratios[1], rel=1e-4)
    german = math.exp(losses_of["german"][policy].sum() / (4 * 63))
    assert row["perplexity"]["german"] == pytest.approx(german, rel=1e-4)
    over_texts = abs(ratios[0] - ratios[1]) / 2  # of two values
    assert change["standard_error_over_texts"] == pytest.approx(over_texts, rel=1e-3)
    assert row["dropped_share"] == pytest.approx(sum(shares) / 2)
    assert row["device_peak_to_mean"] == pytest.approx(sum(peaks) / 2)
    assert row["changed_next_tokens"] == pytest.approx(float(sum(changed)) / 2, abs=1e-3)
    assert row["dropped_share"] > 0.05


def test_who_shares_a_batch_is_told_apart(demo: tuple[Any, Any], judged: Any) -> None:
    found = judged["texts"]["compositions"]
    assert set(found) == {"one_text", "mixed", "solo"}
    none = _row(found["mixed"]["policies"], "none")
    assert none["against_solo"]["changed_next_tokens"] < 0.01  # rounding of other kernels at most
    for composition in ("one_text", "mixed"):
        hard = _row(found[composition]["policies"], HARD)
        assert hard["against_solo"]["changed_next_tokens"] > 0.02
        alone = _row(found["solo"]["policies"], HARD)
        shared, solo = hard["perplexity"]["prose"], alone["perplexity"]["prose"]
        said = hard["against_solo"]["perplexity_change"]["by_domain"]["prose"]
        assert said == pytest.approx(shared / solo - 1)
    per_request = f"{CAP},pool=request"
    apart = _eval("demo", *TEXTS, *SMALL, "--policy", per_request)["texts"]["compositions"]
    row = _row(apart["mixed"]["policies"], per_request)
    assert row["dropped_share"] > 0.05
    assert row["against_solo"]["changed_next_tokens"] < 0.01  # nobody shares a budget


def test_tasks_against_the_harness_run_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from paceline.shipped import MODEL_FOLDER

    names = ["paceline_continuation", "paceline_copy", "paceline_passage"]
    found = _eval(
        "demo", "--tasks", ",".join(names), "--limit", "4", "--batch-size", "4",
        "--policy", HARD, "--compositions", "one_text", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    rows = found["tasks"]["modes"]["batched"]["policies"]
    samples: dict[str, Any] = {}
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False)
    for kind, policy in (("hf", {}), ("paceline-hf", {"policy": HARD, "devices": 8})):
        said = simple_evaluate(
            model=kind,
            model_args={"pretrained": str(MODEL_FOLDER), "dtype": "float32", **policy},
            tasks=names, batch_size=4, device="cpu", limit=4, task_manager=manager,
            bootstrap_iters=0,
        )  # fmt: skip
        row = _row(rows, HARD if policy else "none")
        for name in names:
            for metric, figure in row["harness"][name].items():
                assert figure == float(said["results"][name][metric]), (kind, name, metric)
        samples[kind] = said["samples"]
    base, capped = samples["hf"], samples["paceline-hf"]

    def likeliest(sample: Any) -> int:
        chances = [each[0][0] for each in sample["resps"]]
        return chances.index(max(chances))

    pairs = list(zip(base[names[0]], capped[names[0]], strict=True))
    row = _row(rows, HARD)
    task = row["tasks"][names[0]]
    assert task["changed_answers"] == sum(likeliest(b) != likeliest(c) for b, c in pairs)
    changes = [c["acc_norm"] - b["acc_norm"] for b, c in pairs]
    assert task["difference"]["mean"] == pytest.approx(sum(changes) / 4)
    assert task["difference"]["clusters"] == len({b["doc"]["text"] for b, _ in pairs})
    copies = zip(base[names[1]], capped[names[1]], strict=True)
    written = sum(b["resps"] != c["resps"] for b, c in copies)
    assert row["tasks"][names[1]]["changed_answers"] == written
    assert row["changed_answers"] == task["changed_answers"] + written > 0
    figures = [row["tasks"][name]["score"] for name in names[:2]]
    assert row["mean"] == pytest.approx(sum(figures) / 2)  # a perplexity is no score
    scored = row["harness"]["paceline_passage"]["byte_perplexity,none"]
    assert row["tasks"]["paceline_passage"]["score"] == pytest.approx(scored)
    assert row["truncated_prompts"] == 0
    files = [tmp_path / "out" / "eval.json", *(tmp_path / "out" / "state").iterdir()]
    assert len(files) > 5
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "out" / "state").stat().st_mode) == 0o700


def _interrupt(arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until 17 batches are kept, then raise inside the run."""
    from paceline.evaluation.subject import Store

    get = Store.get

    def stop(self: Any, key: Any, compute: Any) -> Any:
        if self.computed == 17:
            raise KeyboardInterrupt
        return get(self, key, compute)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "get", stop)
        assert _run(*arguments, "--out", str(out)).exit_code == 130


def _kill(arguments: list[str], out: Path, _: Any) -> None:
    """Kill a process of its own as soon as 17 batches are kept."""
    command = [sys.executable, "-m", "paceline", "eval", *arguments, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 600
        while len(list((out / "state").glob("*.json"))) < 17:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("stop", [_interrupt, pytest.param(_kill, marks=pytest.mark.full)])
def test_a_stopped_run_goes_on_where_it_was(
    stop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # stopped amid random choices: what is drawn must not depend on what was run before
    arguments = ["demo", *TEXTS[:2], *SMALL, "--policy", f"{CAP},keep=random", "--policy", CAP]
    whole = _eval(*arguments)
    out = tmp_path / "out"
    stop(arguments, out, monkeypatch)
    assert not (out / "eval.json").exists()
    kept = {file: file.stat().st_mtime_ns for file in (out / "state").glob("*.json")}
    torn = next(iter(kept))
    torn.write_text('{"losses": [1.0')  # as a full disk may leave it
    (out / "state" / f".{torn.name}.rest").write_text("left over")
    again = _eval(*arguments, "--out", str(out))
    assert again["texts"] == whole["texts"]
    assert again["batches"]["found"] == len(kept) - 1 >= 16
    assert again["batches"]["computed"] + again["batches"]["found"] == whole["batches"]["computed"]
    del kept[torn]
    assert all(file.stat().st_mtime_ns == written for file, written in kept.items())


def test_what_was_computed_is_of_these_weights_and_this_policy(
    demo: tuple[Any, Any], tmp_path: Path
) -> None:
    arguments = ["demo", "--text", "prose", *SMALL, "--compositions", "one_text"]
    out = ["--out", str(tmp_path), "--force"]
    first = _eval(*arguments, "--policy", CAP, *out)
    assert first["batches"] == {"computed": 4, "found": 0}
    assert _eval(*arguments, "--policy", CAP, *out)["batches"] == {"computed": 0, "found": 4}
    assert _eval(*arguments, "--policy", HARD, *out)["batches"] == {"computed": 2, "found": 2}
    other = _eval(*arguments, "--policy", CAP, *out, "--devices", "4")
    assert other["batches"] == {"computed": 4, "found": 0}
    model, tokenizer = demo
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(read_text("prose"), encoding="utf-8")
    same = [str(folder), "--text", str(text), *arguments[3:], "--policy", CAP, *out]
    assert _eval(*same)["batches"] == {"computed": 0, "found": 4}
    with torch.no_grad():
        weight = model.model.layers[3].mlp.gate.weight
        weight.mul_(1.001)
        model.save_pretrained(folder)
        weight.div_(1.001)
    assert _eval(*same)["batches"] == {"computed": 4, "found": 0}


def test_stand_ins_come_from_the_calibration_and_results_are_kept_for_it_alone(
    tmp_path: Path,
) -> None:
    shipped, other = load_calibration(), tmp_path / "other"
    other.mkdir()
    layers = (dataclasses.replace(shipped.layers[0], down=shipped.layers[0].down / 2),)
    dataclasses.replace(shipped, layers=(*layers, *shipped.layers[1:])).save(other)
    arguments = ["demo", "--text", "prose", *SMALL, "--compositions", "one_text"]
    for policy in ("capacity_factor=0.5", "capacity_factor=0.5,compensate=true"):
        arguments += ["--policy", policy]
    arguments += ["--out", str(tmp_path / "out")]
    first = _eval(*arguments, "--calibration", "demo")
    alone, filled = first["texts"]["compositions"]["one_text"]["policies"][1:]
    assert filled["perplexity_change"]["mean"] < alone["perplexity_change"]["mean"]
    assert filled["dropped_share"] >= 0.5 - 1e-9
    plan = tmp_path / "plan.toml"
    place = "[placement]\nnum_devices = 8\n"
    plan.write_text(f'version = 1\ncalibration = "{CALIBRATION_FOLDER}"\n{place}')
    assert _eval(*arguments, "--plan", str(plan))["batches"] == {"computed": 0, "found": 6}
    changed = _eval(*arguments, "--calibration", str(other))
    assert changed["batches"] == {"computed": 6, "found": 0}
    assert changed["texts"] != first["texts"]


def test_plan_with_policies_and_table(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    policies = ["capacity_factor = 1.0", "capacity_factor = 0.75", "capacity_factor = 1.0"]
    lines = [f"[[policies]]\n{each}" for each in [*policies, 'mode = "observe"']]
    plan.write_text("version = 1\n[placement]\nnum_devices = 8\n" + "\n".join(lines) + "\n")
    paper = "capacity_factor=2,unit=expert"
    out = ["--out", str(tmp_path / "judged")]
    ran = _run("demo", "--plan", str(plan), "--policy", paper, "--text", "prose", *SMALL, *out)
    assert ran.exit_code == 0, ran.output
    shown = [line for line in ran.stdout.splitlines() if not line.startswith("Written: ")]
    assert max(map(len, shown)) <= 80
    assert "plan: perplexity " in ran.stdout
    assert f"Written: {tmp_path / 'judged' / 'eval.md'}" in ran.stdout.replace("\n", "")
    lines = (tmp_path / "judged" / "eval.md").read_text().splitlines()
    assert any(line.startswith("| plan | +") for line in lines)
    (row,) = [line for line in lines if line.startswith("| OLMoE | Score, 2.0 |")]
    ours = row.split("|")[-2].strip()
    assert ours[0] in "+-0"
    assert "±" in ours
    assert "| OLMoE | Order, 2.0 | 64.0 | 60.8 | -3.2 | not run | not run |" in lines


BAD = {
    "nothing to judge": (["demo"], "give at least one --policy"),
    "twice": (["demo", "--policy", CAP, "--policy", "gamma=1"], "must differ"),
    "no policy": (
        ["demo", "--policy", "capacity_factor=0"],
        "capacity_factor must be a number > 0",
    ),
    "never binds": (["demo", "--policy", CAP, "--devices", "1"], "can never bind"),
    "composition": (
        ["demo", "--policy", CAP, "--compositions", "pairs"],
        "and solo, got pairs",
    ),
    "one text to mix": (
        ["demo", "--policy", CAP, "--text", "prose", "--compositions", "mixed"],
        "mixed batches need at least two texts",
    ),
    "suite": (["demo", "--policy", CAP, "--suite", "best"], "--suite must be paper, got best"),
    "no text": (["demo", "--policy", CAP, "--text", "/nowhere/a.txt"], "can't be read"),
    "too long": (
        ["demo", "--policy", CAP, "--sequence-length", "513"],
        "at most 512 tokens for this model, got 513",
    ),
    "no stand-ins": (["demo", "--policy", f"{CAP},compensate=true"], "calibration"),
    "no calibration": (["demo", "--policy", CAP, "--calibration", "/nowhere"], "no calibration"),
    "limit": (["demo", "--policy", CAP, "--limit", "0"], "--limit must be at least 1, got 0"),
    "no folder": (
        ["demo", "--policy", CAP, "--tasks", "x", "--include-path", "/nowhere"],
        "there is no folder /nowhere",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str) -> None:
    arguments, said = BAD[case]
    ran = _run(*arguments)
    assert ran.exit_code == 2, ran.output
    (line,) = ran.stderr.strip().splitlines()
    assert said in line


def test_texts_that_are_none(tmp_path: Path) -> None:
    for name, content, said in (
        ("empty", b" \n", "is empty"),
        ("binary", b"\xff\xfe\x00", "is not UTF-8"),
        ("short", b"a", "must give at least two tokens"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        ran = _run("demo", "--policy", CAP, "--text", str(path))
        assert ran.exit_code == 2, name
        assert said in ran.stderr, name


def test_tasks_that_can_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("lm_eval.tasks")
    from paceline.evaluation.tasks import load_tasks

    whole = tasks.TaskManager

    def few(include_path: Any = None, include_defaults: bool = True) -> Any:
        """The harness's own index takes ten seconds: here of two folders."""
        root = Path(tasks.__file__).parent
        own = [root / "piqa", root / "openbookqa"] if include_defaults else []
        return whole(include_path=[*(include_path or []), *own], include_defaults=False)

    monkeypatch.setattr(tasks, "TaskManager", few)
    with pytest.raises(ValueError, match=r"no task paqi in lm-evaluation-harness\.") as error:
        load_tasks({"paqi": None})
    with pytest.raises(ValueError, match="near it are openbookqa"):
        load_tasks({"open": None})
    with pytest.raises(ValueError, match="the data of the task piqa can't be loaded") as error:
        load_tasks({"piqa": 0})
    assert "\n" not in str(error.value)
    own = tmp_path / "broken.yaml"
    own.write_text("task: broken\ncustom_dataset: !function utils.nothing\n")
    with pytest.raises(ValueError, match="the task broken can't be loaded"):
        load_tasks({"broken": None}, [tmp_path])
    (tmp_path / "both.yaml").write_text("group: both\ntask: [paceline_copy, paceline_passage]\n")
    with pytest.raises(ValueError, match="tasks must differ, got paceline_copy twice"):
        load_tasks({"both": 1, "paceline_copy": None}, [TASK_FOLDER, tmp_path])
    chosen = load_tasks({"both": 1, "paceline_continuation": None}, [TASK_FOLDER, tmp_path], 2)
    assert chosen.shots == {"both": 1, "paceline_continuation": 2}
    assert chosen.leaves["both"] == ["paceline_copy", "paceline_passage"]


def test_the_tasks_are_made_from_the_packaged_texts(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "demo_tasks.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ,
    )
    made = sorted(tmp_path.iterdir())
    assert [file.name for file in made] == ["continuation.jsonl", "copy.jsonl", "passage.jsonl"]
    for file in made:
        assert file.read_bytes() == (TASK_FOLDER / file.name).read_bytes()
    card = (TASK_FOLDER / "README.md").read_text()
    for name, rows in ((f.stem, len(f.read_text().splitlines())) for f in made):
        assert f"| `paceline_{name}` | {rows} |" in card
