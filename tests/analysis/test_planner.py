"""Plans: costs recomputed token by token, allotment against brute force, and every decision."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline import CapacityPolicy, RoutingInputs, route
from paceline.analysis.cost import LayerShape, layer_cost
from paceline.analysis.expert_map import ExpertMap
from paceline.analysis.hardware import PRESETS, Hardware
from paceline.analysis.placing import PlacementSpec
from paceline.analysis.plan_goal import Goal, options
from paceline.analysis.plan_judge import plan_costs
from paceline.analysis.planner import allot, make_plan
from paceline.analysis.traffic import with_replicas
from paceline.cli.app import app
from paceline.plan import Plan
from paceline.traces import Trace, sample
from paceline.traces.chunk import Chunk
from paceline.traces.format import Header, Layer
from paceline.traces.simulate import simulate

SHAPE = LayerShape(2048, 1408, 16, 2)
# computing rules: no launch, no exchange to speak of, memory for nothing
COMPUTES = Hardware("computes", flops=1e12, memory=1e16, memory_size=1e11, link=1e15, launch=0,
                    exchange=0, tile=1)  # fmt: skip
READS = replace(COMPUTES, name="reads", memory=1e11, flops=1e18)


def made(
    draw: Callable[[np.random.Generator, int], np.ndarray], batches: int = 4, tokens: int = 512
) -> Trace:
    """A trace of 2 layers with 16 experts, 2 a token; `draw` gives each batch its popularity."""
    rng = np.random.default_rng(0)
    ids = np.zeros((2, batches * tokens, 2), np.int64)
    for layer in range(2):
        for batch in range(batches):
            popularity = np.log(draw(rng, batch))
            noisy = popularity + rng.gumbel(size=(tokens, 16))
            rows = slice(batch * tokens, (batch + 1) * tokens)
            ids[layer, rows] = np.argsort(-noisy, axis=1)[:, :2]
    weights = np.sort(rng.random((2, batches * tokens, 2)), axis=2)[:, :, ::-1].copy()
    layers = tuple(Layer(name=f"layer {n}", experts=16, k=2) for n in range(2))
    header = Header(content="choices", layers=layers, batches="forward", scores_are_weights=True)
    chunk = Chunk(
        starts=torch.arange(0, batches * tokens + 1, tokens),
        ids=torch.from_numpy(ids),
        weights=torch.from_numpy(weights),
        topk_scores=torch.from_numpy(weights),
    )
    return Trace(header, [chunk], "made up")


def even(rng: np.random.Generator, batch: int) -> np.ndarray:
    return np.ones(16)


def skewed(rng: np.random.Generator, batch: int) -> np.ndarray:
    """Experts in order of popularity: the first device gets the most, and can't be mistaken."""
    return np.repeat([3.0, 1.0], 8)


def moody(rng: np.random.Generator, batch: int) -> np.ndarray:
    """Every batch has a hot half of its own: no placement fits them all."""
    return np.where(rng.permutation(16) < 4, 6.0, 1.0)


def goal(hardware: Hardware = COMPUTES, **changes: Any) -> Goal:
    return Goal(PlacementSpec(4), SHAPE, hardware, **changes)


@pytest.mark.parametrize(
    ("draw", "hardware", "changes", "decision"),
    [
        (even, COMPUTES, {"min_gain": 0.15}, "nothing"),
        (skewed, READS, {}, "nothing"),
        (skewed, COMPUTES, {}, "place"),
        (moody, COMPUTES, {"max_mass_loss": 0.3}, "cap"),
        (moody, COMPUTES, {"max_mass_loss": 0.0}, "nothing"),
    ],
)
def test_decisions(
    draw: Callable[[np.random.Generator, int], np.ndarray],
    hardware: Hardware,
    changes: dict[str, Any],
    decision: str,
) -> None:
    plan, said = make_plan(made(draw), goal(hardware, **changes))
    assert said.decision in (decision, "place and cap" if decision == "cap" else decision)
    assert bool(plan.policies) == ("cap" in said.decision)
    if decision == "place":
        devices = [plan.placement_of(n) for n in range(2)]
        for placement in devices:
            assert not isinstance(placement, int)
            assert placement is not None
            # each device gets two of the popular half
            assert [sum(e < 8 for e in placement.experts_of(d)) for d in range(4)] == [2] * 4
    if decision == "nothing":
        assert plan.placements == (4,)
        assert any("worth it" in line for line in said.verdict)


def test_place_and_cap_where_both_pay() -> None:
    def both(rng: np.random.Generator, batch: int) -> np.ndarray:
        return skewed(rng, batch) * np.where(rng.permutation(16) < 4, 4.0, 1.0)

    plan, said = make_plan(made(both, batches=8), goal(max_mass_loss=0.2))
    ways = said.second_half.ways
    assert said.decision == "place and cap"
    assert ways["place and cap"].gain > max(ways["place"].gain, ways["cap"].gain)
    assert plan.policies
    assert len(plan.placements) == 2
    others = {v.change: v for v in said.variants}
    assert set(others) == {"keep=weight", "keep=first"} | (
        {"min_expert_load=0"} if goal().min_expert_load else set()
    )
    # as many are dropped whoever stays, but not of the same weight
    assert others["keep=first"].dropped_share == ways["place and cap"].dropped_share
    assert others["keep=first"].gate_mass_lost > ways["place and cap"].gate_mass_lost


def test_other_traffic_is_said_not_to_carry_over() -> None:
    def turned(rng: np.random.Generator, batch: int) -> np.ndarray:
        return np.tile([3.0, 1.0], 8)  # the popular ones are others

    _, said = make_plan(made(skewed), goal(), judge=made(turned))
    assert said.second_half.ways["place"].gain > 0.2
    assert said.other_trace.ways["place"].gain < 0.1
    assert any("doesn't carry over" in line for line in said.verdict)


def test_a_placement_is_taken_by_what_it_gains_where_it_is_judged() -> None:
    """What pays on its own traffic alone is no decision for another one."""

    def milder(rng: np.random.Generator, batch: int) -> np.ndarray:
        return np.asarray(skewed(rng, batch) ** 0.3)

    for least in (0.05, 0.15):
        wanted = goal(min_gain=least, max_mass_loss=0.0)
        plan, said = make_plan(made(skewed), wanted, judge=made(milder))
        gain = said.other_trace.ways["place"].gain
        assert 0.02 < gain < 0.14 < said.second_half.ways["place"].gain
        assert said.decision == ("place" if gain >= least else "nothing")
        assert (len(plan.placements) == 2) == (gain >= least)
        own = any("If your traffic stays like the fitted one" in line for line in said.verdict)
        assert own == (gain < least <= said.second_half.ways["place"].gain)


def lacking(trace: Trace, *names: str) -> Trace:
    """The trace without some of what its tokens tell."""
    chunks = [replace(chunk, **dict.fromkeys(names)) for chunk in trace.chunks]
    header = trace.header.model_copy(update={"scores_are_weights": "topk_scores" not in names})
    return Trace(header, chunks, trace.where)


@pytest.mark.parametrize(
    ("lost", "keep"),
    [((), "score"), (("weights", "topk_scores"), "first"),
     pytest.param(("topk_scores",), "weight", marks=pytest.mark.full),
     pytest.param(("weights",), "score", marks=pytest.mark.full)],
)  # fmt: skip
def test_caps_keep_by_what_the_trace_holds(lost: tuple[str, ...], keep: str) -> None:
    """Engines return ids alone: then a cap keeps the first, and may drop so many assignments."""
    trace, whole, most = lacking(made(moody), *lost), made(moody), 0.2
    for chosen_on, judge in ((trace, None), (whole, trace), (trace, whole)):
        plan, said = make_plan(chosen_on, goal(max_mass_loss=most, min_gain=0.01), judge)
        assert "cap" in said.decision
        assert {policy.keep for policy in plan.policies if policy.caps} == {keep}
        way = said.deciding.ways[said.decision]
        unknown = keep == "first" and judge is not whole
        assert (way.gate_mass_lost is None) == unknown
        assert 0 < (way.dropped_share if unknown else way.gate_mass_lost) <= most
        assert any("holds no weights" in line for line in said.verdict) == unknown


@pytest.mark.parametrize(
    "policy",
    [CapacityPolicy(capacity_factor=1.1, min_expert_load=0),
     CapacityPolicy(max_active=2, min_expert_load=13)],
    ids=str,
)  # fmt: skip
def test_costs_token_by_token(policy: CapacityPolicy) -> None:
    """Every batch routed here, rows and arrivals counted in loops."""
    trace = made(moody, batches=3, tokens=96)
    order = tuple(np.random.default_rng(1).permutation(16).tolist())
    own = ExpertMap(order, 16, 4)
    plan = Plan((policy,), (own.placement,))
    found = plan_costs(trace, {"x": plan}, SHAPE, PRESETS["h100"])["x"]
    chunk = next(iter(trace.chunks))
    assert chunk.ids is not None
    assert chunk.weights is not None
    kept_mass = 0.0
    most: list[int] = []
    for layer in range(2):
        seconds, buffers = [], []
        for batch in range(3):
            rows = slice(batch * 96, (batch + 1) * 96)
            ids, weights = chunk.ids[layer, rows], chunk.weights[layer, rows]
            inputs = RoutingInputs(topk_ids=ids, topk_weights=weights, topk_scores=weights)
            a = route(inputs, policy, own.placement)
            loads, received = np.zeros(16), np.zeros(4)
            for token in range(96):
                hosts = set()
                for slot in range(2):
                    expert = int(a.topk_ids[token, slot])
                    if expert < 16:
                        loads[expert] += 1
                        hosts.add(order.index(expert) // 4)
                        kept_mass += float(weights[token, slot])
                for device in hosts:
                    received[device] += 1
            used = [order.index(int(expert)) // 4 for expert in np.flatnonzero(loads)]
            most.append(max(used.count(d) for d in range(4)))
            cost = layer_cost([loads], [96], own, SHAPE, PRESETS["h100"], [received])
            seconds.append(float(cost.total[0]))
            buffers.append(float(cost.busiest_bytes[0]))
        assert found.seconds[layer] == pytest.approx(np.mean(seconds))
        assert found.receive_bytes[layer] == pytest.approx(max(buffers))
    assert found.most_active == pytest.approx(np.mean(most))
    assert (policy.max_active is None) == (max(most) > 2)
    assert found.gate_mass_lost == pytest.approx(1 - kept_mass / float(chunk.weights.sum()))


def test_replicas_take_tokens_in_turn() -> None:
    trace = made(skewed, batches=1, tokens=64)
    own = ExpertMap((*range(16), 3, 3, 5, 0), 16, 4)
    chunk, seen = next(iter(trace.chunks)), next(iter(with_replicas(trace, [own, own]).chunks))
    assert chunk.ids is not None
    assert seen.ids is not None
    slots = torch.tensor(own.slots)
    assert torch.equal(slots[seen.ids], chunk.ids)
    for expert, copies in enumerate(own.copies):
        for layer in range(2):
            tokens, _ = torch.nonzero(chunk.ids[layer] == expert, as_tuple=True)
            used = seen.ids[layer][chunk.ids[layer] == expert]
            places = [s for s, e in enumerate(own.slots) if e == expert]
            assert used.tolist() == [places[int(t) % copies] for t in tokens]


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_allotment_is_the_best_for_what_it_loses(
    layers: int, options: int, data: st.DataObject
) -> None:
    """No other way to allot loses as little and takes less time."""
    number = st.floats(0.01, 1, allow_nan=False)
    row = st.lists(number, min_size=layers, max_size=layers)
    times = [data.draw(row) for _ in range(options + 1)]
    losses = [[0.0] * layers, *(data.draw(row) for _ in range(options))]
    budget = data.draw(st.floats(0, 1))
    taken = allot(times, losses, budget)

    def figures(choice: tuple[int, ...] | list[int]) -> tuple[float, float]:
        pairs = list(enumerate(choice))
        return (
            sum(losses[o][n] for n, o in pairs) / layers,
            sum(times[o][n] for n, o in pairs),
        )

    lost, took = figures(taken)
    assert lost <= budget + 1e-12
    for other in itertools.product(range(options + 1), repeat=layers):
        less, quicker = figures(other)
        assert less > lost - 1e-9 or quicker >= took - 1e-9


def test_a_cap_is_off_where_weights_rule() -> None:
    # rows of an expert as long as its weights take: 3 H I x 2 bytes / memory = r x 6 H I / flops
    even_at = 2 * PRESETS["h100"].flops / PRESETS["h100"].memory / 2
    assert goal(PRESETS["h100"]).min_expert_load == pytest.approx(even_at / 4, abs=1)
    assert goal(replace(READS, flops=1e18)).min_expert_load > 10**6


def test_plans_are_the_same_every_time() -> None:
    trace = made(moody)
    first, second = (make_plan(trace, goal(max_mass_loss=0.1)) for _ in range(2))
    assert first == second


def test_the_command(tmp_path: Path) -> None:
    config = {"hidden_size": 2048, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
              "n_routed_experts": 64, "num_experts_per_tok": 6}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "plan.toml"
    arguments = ["plan", "sample:esft_v2lite_law", "--model-config", str(tmp_path)]
    arguments += ["--hardware", "h20", "--batch-tokens", "2048"]
    ran = CliRunner().invoke(app, [*arguments, "--replicas", "8", "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    assert set(said["second_half"]["ways"]) == {
        "nothing", "cap", "place", "place and cap", "replicas",
    }  # fmt: skip
    assert said["second_half"]["ways"]["replicas"]["replica_gb_a_device"] > 0
    names = "schema trace model notes devices hardware hardware_source precision max_mass_loss "
    names += "min_gain min_expert_load batches batch_tokens layers second_half other_trace budgets "
    assert list(said) == [*names.split(), "variants", "decision", "verdict", "plan", "sample"]
    step = "microseconds stages bytes_sent receive_buffer_bytes most_active_experts dropped_share "
    step += "gate_mass_lost layers gain"
    assert list(said["second_half"]["frontier"][0]) == ["placement", "budget", *step.split()]
    plan = Plan.load(out)
    assert plan.layers == len(sample("esft_v2lite_law").header.layers)
    plan.check_model([64] * 6, [6] * 6)
    text = CliRunner().invoke(app, arguments)
    assert "Decision:" in text.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sample:gpt_oss_20b_decode"], "has experts=32"),
        (["sample:esft_v2lite_law", "--hardware", "h999"], "got 'h999'"),
        (["sample:esft_v2lite_law", "--max-mass-loss", "x"], "--max-mass-loss"),
        (["sample:esft_v2lite_law", "--min-gain", "100%"], "--min-gain"),
        (["sample:esft_v2lite_law", "--pool", "all"], "pool must be"),
        (["sample:esft_v2lite_law", "--devices", "0"], "--devices must be"),
        (["sample:esft_v2lite_law", "--batch-tokens", "4096"], "at least 2 batches, to choose"),
        (["sample:esft_v2lite_law", "--link", "0"], "--link"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    config = {"hidden_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 3,
              "n_routed_experts": 64, "num_experts_per_tok": 6}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = CliRunner().invoke(app, ["plan", *arguments, "--model-config", str(tmp_path)])
    assert ran.exit_code == 2
    assert said in ran.stderr


def test_counts_are_not_enough(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps({"0": {"0": 5, "1": 7}}))
    config = {"hidden_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1,
              "num_experts": 2, "num_experts_per_tok": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = CliRunner().invoke(
        app, ["plan", str(tmp_path / "counts.json"), "--model-config", str(tmp_path)]
    )
    assert ran.exit_code == 2
    assert "not what each token chose" in ran.stderr


@pytest.mark.parametrize(
    "loss", ["gate_mass_lost", pytest.param("dropped_share", marks=pytest.mark.full)]
)
def test_no_cap_loses_more_than_asked_for_where_it_is_judged(loss: str) -> None:
    """Chosen where loads were even, caps cost more where they are not: tighter ones are taken."""

    def calm(rng: np.random.Generator, batch: int) -> np.ndarray:
        return np.repeat([1.3, 1.0], 8)

    most = 0.02
    gone = () if loss == "gate_mass_lost" else ("weights", "topk_scores")
    traces = (lacking(made(draw), *gone) for draw in (calm, moody))
    _, said = make_plan(next(traces), goal(max_mass_loss=most), judge=next(traces))
    part = said.other_trace
    chosen = [
        point for point in part.frontier if point.placement == "in_order" and point.budget == most
    ]
    assert getattr(chosen[0], loss) > most  # what was chosen loses too much here
    assert said.budgets["in_order"] is None or said.budgets["in_order"] < most
    for way in ("cap", "place and cap"):
        assert getattr(part.ways[way], loss) <= most
    assert any("gate mass" in line or "assignments" in line for line in said.verdict)


def test_decode_is_capped_by_the_experts_it_reads() -> None:
    """Where weights rule a capacity factor does nothing, and a share of the experts is a gain."""
    decode, wanted = made(moody, batches=8, tokens=96), goal(READS, max_mass_loss=0.2)
    assert [(p.factor, p.max_active) for p in options(wanted, decode)[1:]] == [(None, 2), (None, 3)]
    plan, said = make_plan(decode, wanted)
    part = said.second_half
    assert part.perfect_balance_gain < 0.05 < part.ways["cap"].gain
    assert "cap" in said.decision
    assert {p.max_active for p in plan.policies if p.caps} <= {2, 3}
    assert any(p.max_active for p in plan.policies)
    ruled = {(p.placement, p.max_active): p for p in part.active}
    nothing = part.ways["nothing"]
    for base in ("in_order", "placed"):
        two, three = ruled[base, 2], ruled[base, 3]
        assert two.gain > three.gain > 0
        assert two.gate_mass_lost > three.gate_mass_lost > 0
        # reading is all: as many times as quick as fewer experts are read
        fewer = nothing.most_active_experts / two.most_active_experts
        if base == "in_order":
            assert 1 + two.gain == pytest.approx(fewer, rel=0.02)
        assert two.most_active_experts == 2
    second = next(iter(decode.chunks)).part(4, 8)
    policy = CapacityPolicy(max_active=2, min_expert_load=wanted.min_expert_load)
    overall = simulate(Trace(decode.header, [second]), {"x": Plan((policy,), (4,))}).plans["x"]
    assert ruled["in_order", 2].dropped_share == overall.overall.dropped_share
    line = next(line for line in said.verdict if line.startswith("Decode:"))
    assert "max_active=3" in line
    assert "max_active=2" in line
    none = make_plan(decode, goal(READS, max_mass_loss=0.0))[1]
    assert none.decision == "nothing"
    assert any("stand-ins" in line for line in none.verdict)


def test_each_regime_has_the_caps_that_it_can_bear() -> None:
    few = replace(COMPUTES, memory=1e16 / 1e5)  # weights rule below some rows
    wanted = goal(few)
    rows = wanted.min_expert_load  # an expert; 16 of them, 2 a token
    assert 2 < rows < 100
    small, large = made(even, 2, rows * 8 - 1), made(even, 2, rows * 8)
    assert {p.factor is None for p in options(wanted, small)[1:]} == {True}
    assert {p.max_active for p in options(wanted, large)} == {None}
    both = Trace(small.header, [*small.chunks, *large.chunks])
    kinds = {(p.factor is None, p.max_active is None) for p in options(wanted, both)[1:]}
    assert kinds == {(True, False), (False, True), (False, False)}
    assert len(options(wanted, lacking(small, "weights"))) == 1
    assert len(options(replace(wanted, spec=PlacementSpec(16)), small)) == 1  # one expert a device
    _, said = make_plan(both, wanted)
    assert said.second_half.active
