"""Which rows are tokens, and which belong together, where forwards are not what they seem."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tiny_models
import torch
from model_runs import counted, kept_slots, model_of, output
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import create_causal_mask

from paceline import CapacityPolicy, attach
from paceline.engines.transformers import SharedBudgetWarning, UnknownTokensWarning

CAP = CapacityPolicy(capacity_factor=0.7, unit="expert", min_expert_load=0)
REQUEST = CAP.replace(pool="request")


@pytest.fixture
def model() -> Any:
    return model_of("mixtral")


def ids_of(length: int, seed: int) -> Tensor:
    return tiny_models.inputs(batch=1, length=length, seed=seed)["input_ids"][0]


# -- sequences packed into one row -----------------------------------------------------------------


def packed(*sequences: Tensor) -> dict[str, Any]:
    """One row, told apart by positions alone."""
    flat = DataCollatorWithFlattening(return_tensors="pt")(
        [{"input_ids": one.tolist()} for one in sequences]
    )
    return {"input_ids": flat["input_ids"], "position_ids": flat["position_ids"]}


@pytest.mark.parametrize("min_expert_load", [0, 4, "auto"])
def test_packed_sequences_are_requests_of_their_own(model: Any, min_expert_load: Any) -> None:
    a, neighbours = ids_of(20, 1), [ids_of(n, n) for n in (3, 28, 60)]
    with attach(model, REQUEST.replace(min_expert_load=min_expert_load)):
        alone = output(model, {"input_ids": a[None], "use_cache": False})[0]
        for other in neighbours:
            for order in ((a, other), (other, a), (other, a, other)):
                out = output(model, packed(*order) | {"use_cache": False})[0]
                at = 0 if order[0] is a else len(other)
                assert torch.allclose(out[at : at + 20], alone, atol=1e-4)


def test_several_rows_may_hold_packed_sequences(model: Any) -> None:
    """Positions of one row, given for all, are read alike."""
    a, b, c, d = (ids_of(n, n) for n in (7, 17, 5, 19))
    rows = [packed(a, b), packed(c, d)]
    both = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    with attach(model, REQUEST) as pace:
        want = [
            output(model, {"input_ids": one[None], "use_cache": False})[0] for one in (a, b, c, d)
        ]
        dropped = pace.stats().layers[0].dropped
        pace.reset_stats()
        got = output(model, both | {"use_cache": False})
        assert pace.stats().layers[0].dropped == dropped > 0
    parts = [got[0, :7], got[0, 7:], got[1, :5], got[1, 5:]]
    for part, whole in zip(parts, want, strict=True):
        assert torch.allclose(part, whole, atol=1e-4)


def test_packed_sequences_share_a_budget_only_with_a_warning(model: Any) -> None:
    with attach(model, CAP), pytest.warns(SharedBudgetWarning, match="2 sequences"):
        output(model, packed(ids_of(9, 1), ids_of(12, 2)))
    with attach(model, CAP), warnings.catch_warnings():
        warnings.simplefilter("error", SharedBudgetWarning)
        output(model, packed(ids_of(21, 1)))


def test_beams_of_one_prompt_can_be_one_request(model: Any) -> None:
    given = tiny_models.inputs(batch=4, length=12)
    labels = torch.tensor([7, 7, 3, 3])
    policy = REQUEST.replace(capacity_factor=0.5)
    with attach(model, policy, token_request=labels):
        together = output(model, given)
    pairs = [{k: v[2 * i : 2 * i + 2] for k, v in given.items()} for i in range(2)]
    with attach(model, CAP.replace(capacity_factor=0.5)):
        apart = torch.cat([output(model, pair) for pair in pairs])
    assert torch.allclose(together, apart, atol=1e-4)
    with attach(model, policy):
        assert not torch.allclose(output(model, given), together, atol=1e-4)


# -- rows that are no tokens -----------------------------------------------------------------------


def padded(rows: int = 4, length: int = 32, pad: int = 20) -> dict[str, Tensor]:
    given = tiny_models.inputs(batch=rows, length=length)
    given["attention_mask"][:, :pad] = 0
    return given


def test_a_forward_of_padding_alone_counts_nothing(model: Any) -> None:
    """What a rank runs only to keep others company."""
    given = padded(pad=32)
    for policy in (None, CAP, REQUEST, CAP.replace(phase="prefill", min_expert_load="auto")):
        with attach(model, policy) as pace:
            output(model, given)
            stats = pace.stats().layers[0]
        assert (stats.tokens, stats.assignments, stats.dropped, stats.capped_forwards) in (
            (0, 0, 0, 0),
            (0, 0, 0, 1),
        )


class Staged(nn.Module):
    """Runs the decoder layers of a model one by one, as a pipeline stage does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return staged(self.inner, input_ids, attention_mask)


@torch.no_grad()
def staged(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    inner = model.model
    hidden = inner.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    causal = create_causal_mask(
        config=inner.config,
        inputs_embeds=hidden,
        attention_mask=mask,
        past_key_values=None,
        position_ids=positions,
    )
    turned = inner.rotary_emb(hidden, position_ids=positions)
    for layer in inner.layers:
        hidden = layer(
            hidden, attention_mask=causal, position_ids=positions, position_embeddings=turned
        )
    return model.lm_head(inner.norm(hidden))


def test_layers_run_by_other_code_need_to_be_told_their_tokens(model: Any) -> None:
    given = padded()
    mask, real = given["attention_mask"], given["attention_mask"].bool()
    positions = torch.arange(32)[None].expand(4, -1)
    with attach(model, CAP) as pace:
        want = output(model, {**given, "position_ids": positions, "use_cache": False})
        expected = pace.stats().layers[0]
        with pytest.raises(RuntimeError, match=r"padding is unknown.*token_valid"):
            staged(model, given["input_ids"], mask)
    said = [
        mask.bool().reshape(1, -1),
        lambda batch, length, device: mask.bool().reshape(batch, -1),
    ]
    for valid in said:
        with attach(model, CAP, token_valid=valid) as pace:
            got = staged(model, given["input_ids"], mask)
            stats = pace.stats().layers[0]
        assert (stats.tokens, stats.dropped) == (expected.tokens, expected.dropped)
        assert torch.allclose(got[real], want[real], atol=1e-4)


@pytest.mark.parametrize("policy", [None, CAP.replace(mode="shadow")])
def test_layers_run_by_other_code_are_counted_with_a_warning(model: Any, policy: Any) -> None:
    given = padded()
    with attach(model, policy) as pace:
        with pytest.warns(UnknownTokensWarning, match="token_valid") as seen:
            staged(model, given["input_ids"], given["attention_mask"])
        assert len([w for w in seen if w.category is UnknownTokensWarning]) == 1
        with warnings.catch_warnings():  # said once
            warnings.simplefilter("error", UnknownTokensWarning)
            staged(model, given["input_ids"], given["attention_mask"])
        assert pace.stats().layers[0].tokens == 2 * 128


@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        (REQUEST, "request"),
        (CAP.replace(protect_first=2), "position"),
        (CAP.replace(phase="prefill"), "decode"),
    ],
)
def test_what_a_policy_needs_beside_padding_is_asked_for(
    model: Any, policy: CapacityPolicy, missing: str
) -> None:
    given = padded()
    valid = given["attention_mask"].bool().reshape(1, -1)
    with (
        attach(model, policy, token_valid=valid),
        pytest.raises(RuntimeError, match=f"their {missing} is unknown"),
    ):
        staged(model, given["input_ids"], given["attention_mask"])


def test_requests_of_layers_run_by_other_code_can_be_told(model: Any) -> None:
    given = padded(rows=2, pad=4)
    labels = torch.arange(2).repeat_interleave(32)[None]
    valid = given["attention_mask"].bool().reshape(1, -1)
    positions = torch.arange(32)[None].expand(2, -1)
    with attach(model, REQUEST):
        want = output(model, {**given, "position_ids": positions, "use_cache": False})
    with attach(model, REQUEST, token_valid=valid, token_request=labels):
        got = staged(model, given["input_ids"], given["attention_mask"])
    real = given["attention_mask"].bool()
    assert torch.allclose(got[real], want[real], atol=1e-4)


def test_a_stage_that_is_attached_itself_tells_its_tokens() -> None:
    model = tiny_models.build("mixtral")
    given = padded()
    with attach(Staged(model).eval(), CAP) as pace:
        staged_model = pace._model
        staged_model(given["input_ids"], given["attention_mask"])
        assert [s.tokens for s in pace.stats().layers] == [4 * 12] * 3


class Stage(nn.Module):
    """One stage: hidden states in, hidden states out, with the padding mask beside them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers, self.rotary, self.config = model.model.layers, model.model.rotary_emb, None
        self.text_config = model.config

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        positions = torch.arange(hidden_states.shape[1])[None].expand(len(hidden_states), -1)
        causal = create_causal_mask(
            config=self.text_config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=positions,
        )
        turned = self.rotary(hidden_states, position_ids=positions)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=causal,
                position_ids=positions,
                position_embeddings=turned,
            )
        return hidden_states


def test_hidden_states_beside_a_padding_mask_are_tokens() -> None:
    model = tiny_models.build("mixtral")
    given = padded()
    stage = Stage(model).eval()
    with torch.no_grad(), attach(stage, CAP) as pace:
        stage(model.model.embed_tokens(given["input_ids"]), given["attention_mask"])
        assert [s.tokens for s in pace.stats().layers] == [48] * 3


# -- a module that runs its language model twice ---------------------------------------------------


class Twice(nn.Module):
    """Two batches of one shape through one language model, each with its own padding."""

    def __init__(self, model: Any, way: str) -> None:
        super().__init__()
        self.language_model, self.way = model, way

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, other_ids: Tensor, other_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        embed = self.language_model.get_input_embeddings()
        ways = {
            "ids": lambda ids, mask: {"input_ids": ids, "attention_mask": mask},
            "embeddings": lambda ids, mask: {"inputs_embeds": embed(ids), "attention_mask": mask},
            "4d": lambda ids, mask: {"inputs_embeds": embed(ids), "attention_mask": four(mask)},
        }
        given = ways[self.way]
        run = lambda ids, mask: self.language_model(**given(ids, mask), use_cache=False)[0]  # noqa: E731
        return run(input_ids, attention_mask), run(other_ids, other_mask)


def four(mask: Tensor) -> Tensor:
    """[batch, 1, length, length] bool causal mask without padding."""
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (causal & mask[:, None, :].bool() & mask[:, :, None].bool())[:, None]


@pytest.mark.parametrize("way", ["ids", "embeddings", "4d"])
def test_each_run_of_a_language_model_has_its_own_padding(way: str) -> None:
    model = tiny_models.build("mixtral")
    twice = Twice(model, way).eval()
    first, second = padded(rows=2, length=16, pad=9), padded(rows=2, length=16, pad=2)
    second["input_ids"] = second["input_ids"].flip(1)
    given = (
        first["input_ids"],
        first["attention_mask"],
        second["input_ids"],
        second["attention_mask"],
    )
    counts: list[int] = []
    with torch.no_grad(), attach(twice, CAP) as pace:
        pace.watch(
            lambda layer, inputs, _: (
                counts.append(int(inputs.valid.sum())) if layer == pace.layers[0] else None
            )
        )
        twice(*given)
    assert counts == [2 * 7, 2 * 14]


def test_two_masks_over_the_same_ids_are_both_heard() -> None:
    model = tiny_models.build("mixtral")
    twice = Twice(model, "ids").eval()
    ids, masks = padded(rows=2, length=16)["input_ids"], [torch.ones(2, 16), torch.ones(2, 16)]
    masks[1][:, :5] = 0
    with torch.no_grad(), attach(twice, CAP) as pace:
        twice(ids, masks[0], ids, masks[1])
        assert pace.stats().layers[0].tokens == 32 + 22


def test_caps_hold_where_the_user_says_what_is_a_token(model: Any) -> None:
    """Counted below torch: rows that the user calls no tokens take no places."""
    given = tiny_models.inputs(batch=4, length=16)
    valid = torch.rand(4, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    with attach(model, CAP, token_valid=valid) as pace:
        kept = kept_slots(pace)
        counter, _ = counted(model, given)
        stats = pace.stats().layers
    assert not kept[0][~valid.flatten()].any()
    for layer in stats:
        assert layer.tokens == int(valid.sum())
        assert counter.rows(f"{layer.name}.experts").tolist() == layer.expert_loads_after


@pytest.mark.parametrize("name", ["source", "valid", "request", "decode"])
def test_bad_labels_end_in_one_sentence(model: Any, name: str) -> None:
    given = tiny_models.inputs()
    policy = "capacity_factor=1,min_expert_load=0,phase=prefill,pool=" + (
        "source" if name == "source" else "request"
    )
    with pytest.raises(ValueError, match=f"token_{name} must be None.*got 3"):
        attach(model, policy, **{f"token_{name}": 3})
    for wrong in (
        torch.ones(3, dtype=torch.bool if name in ("valid", "decode") else torch.int64),
        torch.ones(2),
        lambda batch, length, device: [True] * batch,
    ):
        with (
            attach(model, policy, 4, **{f"token_{name}": wrong}),
            pytest.raises(ValueError, match=f"token_{name}"),
        ):
            output(model, given)


def test_labels_of_the_wrong_way_round_are_refused(model: Any) -> None:
    given = tiny_models.inputs(batch=4, length=16)
    valid = torch.ones((16, 4), dtype=torch.bool)
    with (
        attach(model, token_valid=valid),
        pytest.raises(ValueError, match=r"token_valid must have shape \[4\] .*got \[16, 4\]"),
    ):
        output(model, given)
