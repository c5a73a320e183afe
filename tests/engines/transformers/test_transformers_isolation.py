"""pool="request" in whole forwards: whatever the others say, one request's routing is the same.

Seen at the experts by an observer that knows nothing of Paceline, and to the bit: neighbours change
in forwards of one shape, under exact ties, padding, ended sequences, packed rows and decoding.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runs import model_of
from reached_experts import Reached, reached_experts
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import ContinuousBatchingConfig

from paceline import CapacityPolicy, attach
from paceline.engines.transformers import SharedCacheWarning

EOS = 2
DEVICES = 4


@functools.cache
def blind(name: str) -> Any:
    """A model whose attention says nothing: equal tokens are exactly equal, and tie."""
    model = copy.deepcopy(model_of(name))
    for key, weight in model.named_parameters():
        if key.endswith(("o_proj.weight", "o_proj.bias")):
            weight.data.zero_()
    return model


@functools.cache
def models(name: str, sees: bool) -> Any:
    model = model_of(name) if sees else blind(name)
    model.set_attn_implementation("eager")  # one kernel, with a mask and without
    model.generation_config.pad_token_id = 0
    return model


class Ends(LogitsProcessor):
    """Row i ends with its `steps[i]`-th new token, and not before."""

    def __init__(self, prompt: int, steps: list[int]) -> None:
        self.prompt, self.steps = prompt, torch.tensor(steps)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        now = self.steps == ids.shape[1] - self.prompt + 1
        scores = scores.clone()
        scores[:, EOS] = torch.where(now, 1e9, -1e9)
        return scores


policies = st.builds(
    CapacityPolicy,
    pool=st.just("request"),
    capacity_factor=st.sampled_from([0.3, 0.7, 1.0, 1.25]),
    unit=st.sampled_from(["expert", "device"]),
    keep=st.sampled_from(["score", "weight", "first", "last", "random"]),
    min_expert_load=st.sampled_from([0, 1, 2]),
    phase=st.sampled_from(["all", "prefill"]),
    renormalize=st.booleans(),
    protect_first=st.sampled_from([0, 2]),
    expand=st.sampled_from([None, None, "all", "visited_devices"]),
)


@st.composite
def companies(draw: st.DrawFn) -> dict[str, Any]:
    """A request, and twice other requests beside it in a batch of the same shape."""
    rows, length = draw(st.integers(2, 4)), draw(st.integers(3, 9))
    # few different tokens: many exact ties where attention says nothing
    tokens = st.integers(4, 4 + draw(st.sampled_from([1, 3, 90])))

    def some(count: int) -> list[list[int]]:
        sizes = {"min_size": length, "max_size": length}
        return [draw(st.lists(tokens, **sizes)) for _ in range(count)]

    def pads(count: int) -> list[int]:
        return [draw(st.integers(0, length - 1)) for _ in range(count)]

    return {
        "row": draw(st.integers(0, rows - 1)),
        "own": (some(1)[0], pads(1)[0]),
        "others": [(some(rows - 1), pads(rows - 1)) for _ in range(2)],
        "ends": [[draw(st.integers(1, 4)) for _ in range(rows - 1)] for _ in range(2)],
        "new": draw(st.integers(1, 3)),
        "chunk": draw(st.sampled_from([None, None, 1, 4])),
        "static": draw(st.booleans()),
        "name": draw(st.sampled_from(["mixtral", "deepseek_v3"])),
        "sees": draw(st.booleans()),
    }


def routed(case: dict[str, Any], policy: CapacityPolicy, which: int, packed: bool) -> Any:
    """What the request's tokens reached in every layer of every forward, and what was generated."""
    model, row = models(case["name"], case["sees"]), case["row"]
    sequences, pads = (list(part) for part in case["others"][which])
    sequences.insert(row, case["own"][0])
    pads.insert(row, 0 if packed else case["own"][1])
    ids = torch.tensor(sequences)
    rows, length = ids.shape
    with reached_experts(model) as reached, attach(model, policy, DEVICES), torch.no_grad():
        reached.clear()
        if packed:
            given = {"input_ids": ids.view(1, -1), "use_cache": False}
            given["position_ids"] = torch.arange(length).repeat(rows)[None]
            out = model(**given)[0].view(rows, length, -1)[row]
        else:
            mask = torch.arange(length) >= torch.tensor(pads)[:, None]
            steps = list(case["ends"][which])
            steps.insert(row, 99)
            out = model.generate(
                torch.where(mask, ids, 0),
                attention_mask=mask.long(),
                max_new_tokens=case["new"],
                do_sample=False,
                eos_token_id=EOS,
                logits_processor=LogitsProcessorList([Ends(length, steps)]),
                prefill_chunk_size=case["chunk"],
                cache_implementation="static" if case["static"] else None,
                output_logits=True,
                return_dict_in_generate=True,
            )
            out = torch.cat([out.sequences[row].double(), *(step[row] for step in out.logits)])
    return seen_of(reached, row, rows, pads[row]), out


def seen_of(reached: Reached, row: int, rows: int, pad: int) -> list[Any]:
    """Of every call of experts: what each token of a row reached, behind its padding."""
    seen, before = [], 0
    layers = len(reached.calls) // len(reached.tokens)
    for forward, tokens in enumerate(reached.tokens):
        length = len(tokens) // rows
        own = slice(row * length + min(length, max(0, pad - before)), (row + 1) * length)
        calls = range(forward * layers, (forward + 1) * layers)
        seen += [reached.of_rows(call, own, tiny_models.NUM_EXPERTS) for call in calls]
        before += length
    return seen


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@settings(max_examples=settings().max_examples // 2)
@given(companies(), policies)
def test_no_neighbour_changes_a_bit(
    packed: bool, case: dict[str, Any], policy: CapacityPolicy
) -> None:
    (one, first), (other, second) = (routed(case, policy, i, packed) for i in range(2))
    assert one == other
    assert torch.equal(first, second)
    assert one


# -- continuous batching ---------------------------------------------------------------------------

CAP = CapacityPolicy(capacity_factor=0.6, pool="request", min_expert_load=0)
ONE_TOKEN = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
OURS, THEIRS = range(4, 60), range(61, 110)


def drawn(tokens: range, count: int, seed: int) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(tokens.start, tokens.stop, (count,), generator=rng).tolist()


def served(reached: Reached, prompts: list[list[int]]) -> list[Any]:
    """Forward by forward, what our prompt's tokens reached; at most 16 tokens a forward."""
    reached.clear()
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    model_of("olmoe").generate_batch(
        inputs=prompts, generation_config=ONE_TOKEN, continuous_batching_config=batching
    )
    seen, layers = [], len(reached.calls) // len(reached.tokens)
    for forward, tokens in enumerate(reached.tokens):
        own = tokens < OURS.stop
        calls = range(forward * layers, (forward + 1) * layers)
        seen.append([reached.of_rows(call, own, tiny_models.NUM_EXPERTS) for call in calls])
    return seen


@pytest.mark.parametrize("pool", ["request", pytest.param("batch", marks=pytest.mark.full)])
def test_chunks_of_a_prompt_feel_only_how_long_the_others_are(pool: str) -> None:
    """For a given chunking no neighbour counts; longer ones make other chunks, so other budgets."""
    model, ours = model_of("olmoe"), drawn(OURS, 24, 1)
    with reached_experts(model) as reached, attach(model, CAP.replace(pool=pool), DEVICES):
        one, other = (served(reached, [ours, drawn(THEIRS, 10, seed)]) for seed in (2, 3))
        longer = served(reached, [ours, drawn(THEIRS, 12, 2)])
    assert [len(forward[0]) for forward in one] == [6, 16, 2]
    assert (one == other) == (pool == "request")
    assert [len(forward[0]) for forward in longer] == [4, 16, 4]

    def experts(seen: list[Any]) -> list[Any]:
        """Of the first layer, which sees the same in both."""
        return [[expert for expert, _ in row] for forward in seen for row in forward[0]]

    assert experts(one) != experts(longer)


def asked_after(reached: Reached, before: list[int], prompt: list[int], share: bool) -> Tensor:
    """Weights that a prompt's last tokens have in the last layer, asked after another prompt."""
    batching = ContinuousBatchingConfig(
        num_blocks=8, max_batch_tokens=64, page_size=8, allow_block_sharing=share
    )
    serving = model_of("olmoe").continuous_batching_context_manager(
        generation_config=ONE_TOKEN, continuous_batching_config=batching
    )
    with serving as manager:
        for tokens in (before, prompt):
            reached.clear()
            manager.add_request(tokens, max_new_tokens=3)
            while manager.get_result(timeout=1) is None:
                pass
    assert len(reached.tokens[0]) == (5 if share else 21)
    last_layer = len(reached.calls) // len(reached.tokens) - 1
    return reached.calls[last_layer][1][-5:]


@pytest.mark.full
def test_a_shared_prefix_cache_carries_what_followed_the_prefix() -> None:
    """What no pool can help: a cap isn't causal, so cached keys tell of the tokens behind them.

    The second user asks with the same first 16 tokens. Its own question gets other weights after
    another first user, though both have budgets of their own; not without a shared cache.
    """
    model, prefix, question = model_of("olmoe"), drawn(OURS, 16, 1), drawn(THEIRS, 5, 2)
    for policy, share, alike in ((CAP, True, False), (CAP, False, True), (None, True, True)):
        with (
            reached_experts(model) as reached,
            attach(model, policy, DEVICES),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always", SharedCacheWarning)
            one, other = (
                asked_after(reached, prefix + drawn(OURS, 8, seed), prefix + question, share)
                for seed in (3, 4)
            )
        assert torch.allclose(one, other, atol=1e-5) == alike
        assert sum(w.category is SharedCacheWarning for w in said) == (not alike)
