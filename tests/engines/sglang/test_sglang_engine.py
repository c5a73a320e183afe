"""The plugin inside SGLang: counted below it, where experts are computed."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_calibration import made_up
from served_models import dtype_of, make
from sglang_runs import DEVICES, EXPERTS, HERE, K, Run, by_device, prompts, run
from transformers import AutoModelForCausalLM

from paceline import CapacityPolicy, ExpertPlacement, Plan, attach

PROMPTS = prompts(40, 17, 60)
ALONE = [[prompt] for prompt in PROMPTS]
UNBOUND = "capacity_factor=1000"


def capacity(factor: str, tokens: int, hosted: int) -> int:
    return ceil(Fraction(factor) * tokens * K * hosted / EXPERTS)


@pytest.fixture(scope="session")
def stock(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All prompts in a batch, then each alone, without the plugin."""
    found = run(qwen, [PROMPTS, *ALONE], tmp_path_factory.mktemp("stock"))
    assert found.status == 0, found.log
    return found


def test_a_cap_that_drops_nothing_changes_no_token(qwen: Path, stock: Run, tmp_path: Path) -> None:
    found = run(qwen, [PROMPTS, *ALONE], tmp_path, {"policy": UNBOUND, "devices": str(DEVICES)})
    assert found.status == 0, found.log
    assert (found.tokens, found.values) == (stock.tokens, stock.values)
    assert found.forwards == stock.forwards
    assert "paceline: 2 MoE layers on 4 devices: capacity_factor=1000.0" in found.log
    assert "paceline: moe_forward_native: one row per kept slot" in found.log


@pytest.mark.parametrize("factor", ["1", "0.5"])
def test_no_device_gets_more_than_its_capacity(
    qwen: Path, stock: Run, tmp_path: Path, factor: str
) -> None:
    """In the first layer, whose inputs are those of the stock engine, exactly the rest is gone."""
    policy = {"policy": f"capacity_factor={factor},pool=batch", "devices": str(DEVICES)}
    found = run(qwen, [PROMPTS], tmp_path, policy)
    assert found.status == 0, found.log
    (prefill,), (before, *_) = found.prefills(), stock.prefills()
    tokens = sum(map(len, PROMPTS))
    assert prefill["tokens"] == before["tokens"] == tokens
    most = capacity(factor, tokens, EXPERTS // DEVICES)
    for rows in prefill["rows"]:
        assert by_device(rows).max() == most
    expected = np.minimum(by_device(before["rows"][0]), most)
    assert by_device(prefill["rows"][0]).tolist() == expected.tolist()
    steps = [each for each in found.forwards[0] if each["mode"] == "DECODE"]
    assert len(steps) == 3  # below min_expert_load: nothing is capped
    assert all(sum(rows) == 3 * K for step in steps for rows in step["rows"])


def test_with_the_radix_cache_every_request_has_a_budget_of_its_own(
    qwen: Path, stock: Run, tmp_path: Path
) -> None:
    policy = {"policy": "capacity_factor=1,unit=expert,min_expert_load=1"}
    found = run(qwen, [PROMPTS], tmp_path, policy, disable_radix_cache=False)
    assert found.status == 0, found.log
    assert "every request has a budget of its own" in found.log
    (prefill,) = found.prefills()
    alone = stock.prefills()[1:]
    expected = np.zeros(EXPERTS, dtype=int)
    for prompt, forward in zip(PROMPTS, alone, strict=True):
        assert forward["requests"] == [len(prompt)]
        expected += np.minimum(forward["rows"][0], capacity("1", len(prompt), 1))
    assert prefill["rows"][0] == expected.tolist()


def test_max_active_holds_in_decode_steps(qwen: Path, tmp_path: Path) -> None:
    found = run(qwen, [PROMPTS], tmp_path, {"policy": "max_active=1", "devices": "2"}, 8)
    assert found.status == 0, found.log
    steps = [each for each in found.forwards[0] if each["mode"] == "DECODE"]
    assert len(steps) == 7
    for step in steps:
        for rows in step["rows"]:
            assert ((np.array(rows).reshape(2, 4) > 0).sum(1) <= 1).all()


@pytest.mark.parametrize(
    ("environment", "settings", "said"),
    [
        ({"policy": "capacity_factor=0"}, {}, "paceline: capacity_factor must be a number > 0"),
        ({"plan": "/nowhere.toml"}, {}, "paceline: /nowhere.toml"),
    ],
)
def test_a_bad_setting_stops_the_start_with_one_sentence(
    qwen: Path, tmp_path: Path, environment: dict[str, str], settings: dict[str, str], said: str
) -> None:
    found = run(qwen, [PROMPTS], tmp_path, environment, **settings)
    assert found.status != 0
    assert said in found.log
    assert "Load weight" not in found.log
    assert not found.forwards


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "settings", "said"),
    [
        (
            {"policy": "capacity_factor=1,pool=batch"},
            {"disable_radix_cache": False},
            "pool=batch with the radix cache lets one user's batch change",
        ),
        (
            {"policy": "capacity_factor=1,compensate=true"},
            {},
            "compensate=true needs a calibration",
        ),
        ({"policy": "capacity_factor=1"}, {"enable_mixed_chunk": True}, None),
        (
            {"policy": "capacity_factor=1,phase=prefill"},
            {"enable_mixed_chunk": True},
            "phase=prefill needs to know which rows decode",
        ),
    ],
)
def test_what_the_engine_excludes_is_refused_by_name(
    qwen: Path, tmp_path: Path, environment: dict[str, str], settings: dict[str, bool],
    said: str | None,
) -> None:  # fmt: skip
    found = run(qwen, [PROMPTS], tmp_path, environment, **settings)
    if said is None:
        assert found.status == 0, found.log
        return
    assert found.status != 0
    assert f"ValueError: paceline: {said}" in found.log
    assert not found.tokens


@pytest.mark.long
def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    dense = Path(make("qwen3", tmp_path / "dense"))
    found = run(dense, [PROMPTS], tmp_path / "run", {"policy": "capacity_factor=1"})
    assert found.status != 0
    assert "paceline: Qwen3ForCausalLM has no MoE layer that could be capped" in found.log


@pytest.mark.long
# not DeepSeek: SGLang's torch-native attention has no latent attention
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen2_moe"])
def test_other_families_are_as_stock_and_capped_exactly(family: str, tmp_path: Path) -> None:
    model, dtype = Path(make(family, tmp_path / "model")), dtype_of(family)
    stock = run(model, [PROMPTS], tmp_path / "stock", dtype=dtype)
    assert stock.status == 0, stock.log
    unbound = run(model, [PROMPTS], tmp_path / "unbound", {"policy": UNBOUND}, dtype=dtype)
    assert unbound.tokens == stock.tokens
    assert unbound.forwards == stock.forwards
    policy = {"policy": "capacity_factor=1,pool=batch", "devices": str(DEVICES)}
    found = run(model, [PROMPTS], tmp_path / "capped", policy, dtype=dtype)
    tokens = sum(map(len, PROMPTS))
    most = capacity("1", tokens, EXPERTS // DEVICES)
    (prefill,), (before,) = found.prefills(), stock.prefills()
    expected = np.minimum(by_device(before["rows"][0]), most)
    assert by_device(prefill["rows"][0]).tolist() == expected.tolist()
    assert all(by_device(rows).max() <= most for rows in prefill["rows"])


@pytest.mark.long
def test_two_ranks_with_experts_of_their_own_are_one_process(
    qwen: Path, stock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    ranks = {"tp_size": 2, "ep_size": 2}
    unbound = run(qwen, [PROMPTS], tmp_path / "unbound", {"policy": UNBOUND}, **ranks)
    assert unbound.status == 0, unbound.log
    assert unbound.tokens == stock.tokens[:1]
    found = run(qwen, [PROMPTS], tmp_path / "capped", {"policy": "capacity_factor=1"}, **ranks)
    assert found.status == 0, found.log
    tokens = sum(map(len, PROMPTS))
    most = capacity("1", tokens, EXPERTS // 2)
    both = [found.prefills(rank)[0]["rows"][0] for rank in range(2)]
    before = np.array(stock.prefills()[0]["rows"][0]).reshape(2, -1).sum(1)
    assert [sum(rows) for rows in both] == np.minimum(before, most).tolist()


def test_the_engine_is_thin() -> None:
    folder = HERE.parents[2] / "src/paceline/engines/sglang"
    assert sum(len(file.read_text().splitlines()) for file in folder.glob("*.py")) < 900


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        "capacity_factor=1,pool=batch,min_expert_load=0",
        "capacity_factor=0.5,pool=batch,unit=expert,min_expert_load=0",
        "capacity_factor=0.75,pool=request,min_expert_load=0",
        "capacity_factor=0.75,pool=batch,min_expert_load=0,expand=all,expand_limit=2",
    ],
)
def test_three_engines_drop_the_same(qwen: Path, tmp_path: Path, policy: str) -> None:
    """Rows of every expert and layer, in float32: one answer from three engines."""
    same = [[*prompt, *prompt][:48] for prompt in prompts(40, 60, 33)]
    found = run(qwen, [same], tmp_path, {"policy": policy, "devices": str(DEVICES)}, 1)
    assert found.status == 0, found.log
    rows = {"sglang": found.prefills()[0]["rows"]}
    for engine in ("transformers", "vllm"):
        out = tmp_path / f"{engine}.json"
        arguments = [engine, str(qwen), policy, str(DEVICES), str(out)]
        ran = subprocess.run(
            [sys.executable, str(HERE / "three_engines.py"), *arguments],
            input=json.dumps(same), text=True, capture_output=True, check=False, timeout=300,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        rows[engine] = json.loads(out.read_text())
    assert rows["transformers"] == rows["sglang"]
    assert rows["vllm"] == rows["sglang"]
    assert sum(map(sum, rows["sglang"])) < 2 * 3 * 48 * K


LOW = "capacity_factor=0.5,min_expert_load=0,pool=batch"
COMPENSATED = f"{LOW},compensate=true"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", [LOW, COMPENSATED, f"{COMPENSATED},keep=contribution"])
def test_answers_with_stand_ins_are_those_of_transformers(
    qwen: Path, tmp_path: Path, policy: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    calibration = made_up(model)
    calibration.save(tmp_path / "calibration")
    environment = {"policy": policy, "calibration": str(tmp_path / "calibration")}
    settings: dict[str, Any] = {}
    if ranks > 1:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        settings = {"tp_size": 2, "ep_size": 2}
    else:
        environment["devices"] = "2"
    found = run(qwen, ALONE, tmp_path / "run", environment, 1, **settings)
    assert found.status == 0, found.log
    with attach(model, policy, placement=2, calibration=calibration), torch.no_grad():
        for (prompt,), (tokens,), (values,) in zip(ALONE, found.tokens, found.values, strict=True):
            best = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).max(-1)
            assert tokens == [int(best.indices)]
            assert values[0] == pytest.approx(float(best.values), abs=1e-4)


@pytest.mark.long
def test_a_calibration_of_other_weights_is_refused(qwen: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3] *= 1.5
    made_up(model).save(tmp_path / "calibration")
    environment = {"policy": COMPENSATED, "calibration": str(tmp_path / "calibration")}
    found = run(qwen, [PROMPTS], tmp_path / "run", environment)
    assert found.status != 0
    assert "those of the experts of layer model.layers.1.mlp differ" in found.log


@pytest.mark.long
def test_in_bfloat16_nothing_changes_and_capacities_are_exact(qwen: Path, tmp_path: Path) -> None:
    stock = run(qwen, [PROMPTS], tmp_path / "stock", dtype="bfloat16")
    unbound = run(qwen, [PROMPTS], tmp_path / "unbound", {"policy": UNBOUND}, dtype="bfloat16")
    assert (unbound.tokens, unbound.values) == (stock.tokens, stock.values)
    policy = {"policy": "capacity_factor=1,pool=batch", "devices": str(DEVICES)}
    found = run(qwen, [PROMPTS], tmp_path / "capped", policy, dtype="bfloat16")
    most = capacity("1", sum(map(len, PROMPTS)), EXPERTS // DEVICES)
    expected = np.minimum(by_device(stock.prefills()[0]["rows"][0]), most)
    assert by_device(found.prefills()[0]["rows"][0]).tolist() == expected.tolist()


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_size": 2}])
def test_ranks_without_experts_of_their_own(
    qwen: Path, stock: Run, tmp_path: Path, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that split every expert decide alike; replicas each for its own requests."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    policy = {"policy": "capacity_factor=1,pool=batch,min_expert_load=0", "devices": str(DEVICES)}
    found = run(qwen, ALONE, tmp_path, policy, **layout)
    assert found.status == 0, found.log
    seen = [each for rank in found.forwards for each in rank if each["mode"] == "EXTEND"]
    assert len(seen) == len(ALONE) * layout.get("tp_size", 1)
    alone = {each["tokens"]: each for each in stock.prefills()[1:]}
    for each in seen:
        most = capacity("1", each["tokens"], EXPERTS // DEVICES)
        expected = np.minimum(by_device(alone[each["tokens"]]["rows"][0]), most)
        assert by_device(each["rows"][0]).tolist() == expected.tolist()


@pytest.mark.long
def test_a_plan_has_a_policy_and_a_placement_for_each_layer(
    qwen: Path, stock: Run, tmp_path: Path
) -> None:
    """Experts of the first layer lie in another order; the second one caps experts."""
    order = [0, 1, 2, 3, 3, 2, 1, 0]
    Plan(
        policies=(
            CapacityPolicy(capacity_factor=1, pool="batch"),
            CapacityPolicy(capacity_factor=0.5, unit="expert", pool="batch"),
        ),
        placements=(ExpertPlacement.explicit(order), ExpertPlacement.contiguous(8, 4)),
    ).save(tmp_path / "plan.toml")
    found = run(qwen, [PROMPTS], tmp_path / "run", {"plan": str(tmp_path / "plan.toml")})
    assert found.status == 0, found.log
    tokens = sum(map(len, PROMPTS))
    first, second = found.prefills()[0]["rows"]
    before = np.bincount(order, stock.prefills()[0]["rows"][0], minlength=DEVICES)
    expected = np.minimum(before, capacity("1", tokens, 2))
    assert np.bincount(order, first, minlength=DEVICES).tolist() == expected.tolist()
    assert max(second) == capacity("0.5", tokens, 1)


@pytest.mark.long
def test_a_prompt_in_chunks_has_a_budget_in_each(qwen: Path, tmp_path: Path) -> None:
    chunks = {"chunked_prefill_size": 32, "max_prefill_tokens": 64}
    policy = {"policy": "capacity_factor=1,unit=expert,pool=request,min_expert_load=0"}
    (prompt,) = prompts(90)
    stock = run(qwen, [[prompt]], tmp_path / "stock", **chunks)
    found = run(qwen, [[prompt]], tmp_path / "capped", policy, **chunks)
    assert found.status == 0, found.log
    sizes = [each["tokens"] for each in found.prefills()]
    assert sizes == [each["tokens"] for each in stock.prefills()] == [32, 32, 26]
    for size, before, after in zip(sizes, stock.prefills(), found.prefills(), strict=True):
        assert max(map(max, after["rows"])) == capacity("1", size, 1)
        expected = np.minimum(before["rows"][0], capacity("1", size, 1))
        assert after["rows"][0] == expected.tolist()
