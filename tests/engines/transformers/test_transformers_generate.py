"""What `generate` knows: ended sequences are no tokens, guesses to verify are decoding."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from model_runs import model_of
from reference import capped_by_hand
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from paceline import attach

EOS = 2


class EndsAt(LogitsProcessor):
    """Row i chooses the end-of-sequence token as its `steps[i]`-th new token, and not before."""

    def __init__(self, prompt: int, steps: list[int]) -> None:
        self.prompt, self.steps = prompt, torch.tensor(steps)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, EOS] = -1e9
        now = self.steps == ids.shape[1] - self.prompt + 1
        scores[now] = -1e9
        scores[now, EOS] = 0
        return scores


class StopsOn(StoppingCriteria):
    """Ends rows at lengths of their own, without any end-of-sequence token."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return ids.shape[1] >= self.lengths


@pytest.fixture
def model() -> Any:
    found = model_of("mixtral")
    found.generation_config.pad_token_id = 0
    return found


STEPS = [1, 9, 2, 4, 9, 1]  # the token with which each row ends; 9: it doesn't


def live(steps: list[int], new: int) -> int:
    """Tokens that decode steps of the rows bring while they live."""
    return sum(min(step, new) - 1 for step in steps)


@pytest.mark.parametrize("sampled", [False, True])
def test_ended_sequences_are_no_tokens(model: Any, sampled: bool) -> None:
    length, new = 4, 6
    given = tiny_models.inputs(batch=len(STEPS), length=length, pad=1)
    kwargs: dict[str, Any] = {"max_new_tokens": new, "do_sample": sampled, "eos_token_id": EOS}
    kwargs["logits_processor"] = LogitsProcessorList([EndsAt(length, STEPS)])
    prompt = int(given["attention_mask"].sum())
    for policy in (None, "capacity_factor=2,min_expert_load=0,mode=shadow"):
        with attach(model, policy) as pace:
            model.generate(**given, **kwargs)
            assert [s.tokens for s in pace.stats().layers] == [prompt + live(STEPS, new)] * 3


def test_ended_sequences_take_no_places(model: Any) -> None:
    """The live rows get what they would get among themselves, cap by cap."""
    length, new = 4, 6
    given = tiny_models.inputs(batch=len(STEPS), length=length)
    kwargs: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": EOS}
    kwargs["logits_processor"] = LogitsProcessorList([EndsAt(length, STEPS)])
    rows, step = len(STEPS), [0]

    def decide(tokens: int) -> tuple[np.ndarray, np.ndarray]:
        pool = np.zeros(tokens, int)
        if tokens == rows * length:
            return np.ones(tokens, bool), pool
        step[0] += 1
        return np.array(STEPS) > -(-step[0] // 3), pool  # three layers a step

    with capped_by_hand(model, "0.6", decide) as dropped:
        want = model.generate(**given, **kwargs)
    with attach(model, "capacity_factor=0.6,min_expert_load=0,unit=expert") as pace:
        got = model.generate(**given, **kwargs)
        assert sum(s.dropped for s in pace.stats().layers) == sum(dropped) > 0
    assert torch.equal(got, want)


def test_rows_end_by_any_criterion(model: Any) -> None:
    given = tiny_models.inputs(batch=3, length=5)
    kwargs: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": EOS}
    kwargs["logits_processor"] = LogitsProcessorList([EndsAt(5, [9, 9, 9])])
    with attach(model) as pace:
        model.generate(**given, **kwargs, stopping_criteria=[StopsOn([6, 8, 99])])
        assert pace.stats().layers[0].tokens == 15 + 0 + 2 + 5


def test_generations_follow_each_other_and_fail(model: Any) -> None:
    given = tiny_models.inputs(batch=2, length=5)
    kwargs: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    with attach(model) as pace:
        for _ in range(2):
            model.generate(**given, **kwargs)
        assert pace.stats().layers[0].tokens == 2 * (10 + 4)
        pace.reset_stats()
        with pytest.raises(ZeroDivisionError):
            model.generate(**given, **kwargs, stopping_criteria=[lambda ids, scores: 1 / 0])
        pace.reset_stats()
        with torch.no_grad():
            model(**given)
        assert pace.stats().layers[0].tokens == 10
        assert pace._state.thread.generation is None


def test_beams_of_a_prompt_that_has_ended_are_no_tokens(model: Any) -> None:
    """Every beam of the first prompt ends at once; the second goes on."""
    beams, length, new = 2, 4, 5
    given = tiny_models.inputs(batch=2, length=length)
    kwargs: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": EOS}
    kwargs |= {"num_beams": beams, "early_stopping": True}

    class FirstEnds(LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            scores[beams:, EOS] = -1e9
            if ids.shape[1] > length:  # once both beams are there, both end
                scores[:beams] = -1e9
                scores[:beams, EOS] = 0
            else:
                scores[:beams, EOS] = -1e9
            return scores

    kwargs["logits_processor"] = LogitsProcessorList([FirstEnds()])
    want = model.generate(**given, **kwargs)
    with attach(model) as pace:
        assert torch.equal(model.generate(**given, **kwargs), want)
        tokens = pace.stats().layers[0].tokens
    # the prompts, one step of both prompts' beams, then only the second's
    assert tokens == 2 * beams * length + 2 * beams + (new - 2) * beams


CAP = "capacity_factor=0.8,min_expert_load=0,phase=prefill"


@pytest.mark.parametrize("pool", ["batch", "request"])
def test_prompt_lookup_is_decoding_and_stays_exact(model: Any, pool: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9] * 5])
    kwargs: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with attach(model, f"{CAP},pool={pool}") as pace:
        want = model.generate(ids, **kwargs)
        assert pace.stats().layers[0].dropped > 0
        pace.reset_stats()
        got = model.generate(ids, **kwargs, prompt_lookup_num_tokens=4)
        stats = pace.stats().layers[0]
    assert torch.equal(got, want)
    assert stats.capped_forwards == 1
    assert stats.forwards < 12


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_assisted_decoding_stays_exact(model: Any, schedule: str) -> None:
    assistant = copy.deepcopy(model)  # guesses well
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.02 * torch.randn_like(assistant.lm_head.weight))
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    ids = tiny_models.inputs(batch=1, length=20)["input_ids"]
    kwargs: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with attach(model, CAP) as pace:
        want = model.generate(ids, **kwargs)
        pace.reset_stats()
        got = model.generate(ids, **kwargs, assistant_model=assistant)
        stats = pace.stats().layers[0]
    assert torch.equal(got, want)
    assert stats.capped_forwards == 1
    assert stats.forwards < 12


def test_a_prompt_in_parts_is_prompt_in_every_part(model: Any) -> None:
    given = tiny_models.inputs(batch=2, length=24)
    kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with attach(model, CAP) as pace:
        model.generate(**given, **kwargs, prefill_chunk_size=8)
        stats = pace.stats().layers[0]
    assert (stats.forwards, stats.capped_forwards) == (3 + 3, 3)


def test_the_next_turn_of_a_chat_is_prompt(model: Any) -> None:
    ids = tiny_models.inputs(batch=1, length=16)["input_ids"]
    kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    kwargs["return_dict_in_generate"] = True
    with attach(model, CAP) as pace:
        first = model.generate(ids, **kwargs)
        cache = first.get("cache", None) or first.past_key_values
        name = "cache" if "cache" in first else "past_key_values"
        pace.reset_stats()
        more = torch.cat([first.sequences, ids[:, :7]], 1)
        model.generate(more, **kwargs, **{name: cache})
        stats = pace.stats().layers[0]
    assert (stats.forwards, stats.capped_forwards) == (4, 1)
    assert stats.tokens == 8 + 3  # the last token of the first turn was never run


def test_loops_of_ones_own_decode_behind_a_cache_unless_told_otherwise(model: Any) -> None:
    ids = tiny_models.inputs(batch=1, length=24)["input_ids"]

    @torch.no_grad()
    def run() -> None:
        out = model(input_ids=ids[:, :16], use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        model(input_ids=ids[:, 16:], use_cache=True, **{name: out[name]})

    with attach(model, CAP) as pace:
        run()
        assert pace.stats().layers[0].capped_forwards == 1
    prompt = lambda batch, length, device: torch.zeros(batch, dtype=torch.bool)  # noqa: E731
    with attach(model, CAP, token_decode=prompt) as pace:
        run()
        assert pace.stats().layers[0].capped_forwards == 2


def test_generate_is_the_models_own_again_after_detach(model: Any) -> None:
    before = {k: v for k, v in model.__dict__.items() if not k.startswith("_modules")}
    pace = attach(model, CAP)
    assert "generate" in model.__dict__
    pace.detach()
    after = {k: v for k, v in model.__dict__.items() if not k.startswith("_modules")}
    assert after.keys() == before.keys()
