"""Every architecture of the installed Transformers: caps hold, as docs/architectures.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support_matrix
import tiny_models
import torch
import transformers
from model_runs import (
    IMPLEMENTATIONS,
    capacity,
    choices,
    counted,
    fingerprint,
    first_tier,
    implementation,
    loads,
    output,
)

import paceline
from paceline import CapacityPolicy, attach

PAGE = support_matrix.PAGE.read_text() if support_matrix.PAGE.exists() else ""
OURS = Path(paceline.__file__).parent
ALL = tiny_models.architectures()
REFUSED = {"jetmoe", "llama4", "nllb_moe", "switch_transformers", "vitpose_backbone"}
SCORED = {
    "mixtral", "qwen3_vl_moe", "gpt_oss", "longcat_flash",  # softmax; kept pairs; zero experts
    "deepseek_v3", "nemotron_h",  # sigmoid; kept pairs
    "deepseek_v4", "gemma4", "phimoe",  # sqrt_softplus, identity, unknown
}  # fmt: skip
"""Of every scoring rule and every way to leave out a slot."""


@pytest.mark.parametrize("name", first_tier(ALL, SCORED | REFUSED))
def test_architecture(name: str) -> None:
    level, row = support_matrix.support_row(name)
    if f"Transformers {transformers.__version__} " in PAGE:
        assert row in PAGE.splitlines(), "docs/architectures.md is stale: make docs"
    assert (level == "refused") == (name in REFUSED)
    model = tiny_models.build(name)
    if level == "refused":
        before = fingerprint(model)
        with pytest.raises(ValueError, match="can't be handled"):
            attach(model)
        assert fingerprint(model) == before
        return
    given = tiny_models.inputs_for(model, pad=5)
    want, untouched = output(model, given), choices(model, given)
    generate = _generates(model)
    before = fingerprint(model)
    keep = "score" if "unknown" not in row else "weight"
    for how in IMPLEMENTATIONS:
        with implementation(model, how) as chosen:
            if chosen:
                _check_cap(model, given, untouched, keep)
    _check_larger_factors(model, given, keep)
    with attach(model):
        assert torch.equal(output(model, given), want)
        if generate is not None:
            again = _generates(model)
            assert again is not None
            assert all(map(torch.equal, again.logits, generate.logits))
    assert fingerprint(model) == before
    assert torch.equal(output(model, given), want)


def _check_cap(model: Any, given: Any, untouched: Any, keep: str) -> None:
    valid = given["attention_mask"].flatten().bool()
    tokens = int(valid.sum())
    policy = CapacityPolicy(capacity_factor=0.9, unit="expert", min_expert_load=0, keep=keep)
    with attach(model, policy) as pace:
        counter, out = counted(model, given)
        stats = {(s.name + ".experts").lstrip("."): s for s in pace.stats().layers}
    assert out.isfinite().all()
    ran = {layer: s for layer, s in stats.items() if s.forwards}
    assert set(ran) == set(untouched)
    for i, (layer, (ids, _)) in enumerate(untouched.items()):
        s, rows = stats[layer], counter.rows(layer)
        experts, k = len(rows), ids.shape[1]
        cap = capacity("0.9", tokens, k, 1, experts)
        assert rows.tolist() == s.expert_loads_after
        assert s.tokens == tokens * s.forwards
        assert (rows <= cap * s.forwards).all()
        if i == 0 and s.forwards == 1:
            own = loads(ids, valid, experts)
            assert torch.equal(rows, own.clamp(max=cap))
            assert s.dropped == int((own - rows).sum())
    assert sum(s.dropped for s in ran.values()) > 0


def _check_larger_factors(model: Any, given: Any, keep: str) -> None:
    """With the same choices before them, a larger factor never drops more."""
    dropped = []
    for factor in (0.5, 0.9, 1.5, 100):
        policy = CapacityPolicy(
            capacity_factor=factor, unit="expert", min_expert_load=0, keep=keep, mode="shadow"
        )
        with attach(model, policy) as pace:
            output(model, given)
            dropped.append([layer.dropped for layer in pace.stats().layers])
    for layer in zip(*dropped, strict=True):
        assert list(layer) == sorted(layer, reverse=True)
        assert layer[-1] == 0


@pytest.mark.parametrize(
    "name", first_tier([n for n in ALL if n not in REFUSED], {"mixtral", "deepseek_v3"})
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_no_graph_breaks_in_the_routing(name: str) -> None:
    """Other breaks are the model's own, in its loops over experts and its masks; and one of ours
    where its experts can't leave a slot out and get only the kept pairs, whose number is data."""
    model = tiny_models.build(name)
    given = tiny_models.inputs_for(model, pad=5)
    keep = "weight" if "unknown" in support_matrix.support_row(name)[1] else "score"
    policy = CapacityPolicy(capacity_factor=0.9, unit="expert", min_expert_load=0, keep=keep)
    with attach(model, policy) as pace, torch.no_grad():
        torch._dynamo.reset()
        report = torch._dynamo.explain(model)(**given)
        assert sum(layer.dropped for layer in pace.stats().layers) > 0
    torch._dynamo.reset()
    places = [reason.user_stack[-1] for reason in report.break_reasons if reason.user_stack]
    ours = {place.name for place in places if OURS in Path(place.filename).parents}
    assert ours <= {"_compacted"}, places


def _generates(model: Any) -> Any:
    """What a few decode steps give, None where the architecture doesn't generate text."""
    if not getattr(model, "can_generate", lambda: False)():
        return None
    given = tiny_models.inputs(length=8, pad=2)
    try:
        return model.generate(
            **given,
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    except (ValueError, RuntimeError, TypeError, AttributeError):
        return None


def test_the_page_lists_every_architecture_and_no_other() -> None:
    if f"Transformers {transformers.__version__} " not in PAGE:
        pytest.skip("docs/architectures.md is of another version of Transformers")
    listed = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert listed == list(tiny_models.architectures())
