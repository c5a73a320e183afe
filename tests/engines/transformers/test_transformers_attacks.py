"""Two published attacks on users who share a batch, against the embedded model.

They succeed where a batch shares one budget, and fail against pool="request".
"""

from __future__ import annotations

import functools
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import attach
from paceline.demo.assets import load_model, read_text

Prompt = list[int]


@functools.cache
def demo() -> tuple[Any, Any]:
    return load_model()


def encoded(text: str) -> Prompt:
    return list(demo()[1](text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def logits(prompts: Sequence[Prompt]) -> Tensor:
    """[requests, longest, vocabulary] of one forward over all prompts."""
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    return demo()[0](input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """That users share a budget is what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*share one budget")
        yield


# -- Hayes et al., Buffer Overflow in Mixture of Experts (arXiv 2402.05526) ------------------------


def judged(victim: Prompt, others: Sequence[Prompt]) -> tuple[float, Tensor]:
    """The victim's mean loss behind the others in a batch, and its next tokens."""
    own = logits([*others, victim])[-1, : len(victim) - 1]
    loss = torch.nn.functional.cross_entropy(own, torch.tensor(victim[1:]))
    return float(loss), own.argmax(-1)


@pytest.mark.parametrize("keep", ["first", "score"])
def test_an_adversary_who_fills_the_experts_changes_a_victims_output(keep: str) -> None:
    """It repeats the token, of a few, that harms most; harmless neighbours are texts."""
    length, others = 32, 12
    victim = encoded(read_text("prose"))[200 : 200 + length]
    text = encoded(read_text("python")[:4000])
    harmless = [text[length * i :][:length] for i in range(others)]
    tokens = random.Random(0).sample(range(100, 6000), 10)
    policy = f"capacity_factor=1,keep={keep},min_expert_load=0"
    harm, changed = {}, {}
    for pool in ("batch", "request"):
        with attach(demo()[0], f"{policy},pool={pool}", 8):
            loss, answer = judged(victim, harmless)
            attacks = [judged(victim, [[token] * length] * others) for token in tokens]
        worst, instead = max(attacks, key=lambda attack: attack[0])
        harm[pool], changed[pool] = worst - loss, (instead != answer).float().mean()
    assert harm["batch"] > 0.05
    assert changed["batch"] > 0
    assert abs(harm["request"]) < 1e-4
    assert changed["request"] == 0


# -- Yona et al., Stealing User Prompts from Mixture of Experts (arXiv 2410.22884) -----------------

FACTOR = 2
POLICY = f"capacity_factor={FACTOR}"  # min_expert_load is the default of 8


class Spy:
    """Guesses a neighbour's prompt token by token, from the logits of its own requests alone.

    It has the model, knows how long the prompt is, and says in which order requests stand in the
    batch. Its probe is the known prefix and a guess. If the guess is right, the probe ties with the
    victim's own tokens; enough one-token requests fill one expert of the guess so that just one of
    the two fits, and the tie goes to whoever stands first. So with a right guess the probe's logits
    depend on the order, and with a wrong one they don't. Which requests do that it finds on its
    own copy of the model.
    """

    def __init__(self, length: int, candidates: Sequence[int]) -> None:
        self.length, self.candidates = length, candidates
        self.rng = random.Random(0)
        self.config = demo()[0].config
        self.fillers = self.rng.sample(range(100, 6000), 1200)
        # [fillers, experts] scores in the first layer, where no cap has changed anything yet
        self.scores = self.first_scores([[token] for token in self.fillers])[:, 0]
        self.chosen = self.scores.topk(self.config.num_experts_per_tok).indices.tolist()

    def first_scores(self, prompts: Sequence[Prompt]) -> Tensor:
        """[prompts, longest, experts] gate scores of the first layer, of its own model."""
        said: list[Tensor] = []
        gate = demo()[0].model.layers[0].mlp.gate
        hook = gate.register_forward_hook(lambda _, __, out: said.append(out[0]))
        logits(prompts)
        hook.remove()
        return said[0].float().softmax(-1).unflatten(0, (len(prompts), -1))

    def fillings(self, probe: Prompt) -> Iterator[list[Prompt]]:
        """Requests that leave one expert of the probe's last token a single place for two."""
        k, experts = self.config.num_experts_per_tok, self.config.num_experts
        scores = self.first_scores([probe])[0]
        top = scores.topk(k).indices.tolist()
        shared = {expert for row in top[:-1] for expert in row}
        own = self.length + len(probe)
        for expert in top[-1]:
            above = self.scores[:, expert] > 1.02 * scores[-1, expert]
            chosen = [expert in row for row in self.chosen]
            over = [[t] for t, a, c in zip(self.fillers, above, chosen, strict=True) if a and c]
            rest = [[t] for t, c in zip(self.fillers, chosen, strict=True) if not c]
            places = math.ceil(FACTOR * 80 * k / experts)  # of 80 tokens in all
            if expert in shared or len(over) < places - 1:
                continue
            for _ in range(4):
                filling = self.rng.sample(over, places - 1)
                yield filling + self.rng.sample(rest, 80 - own - len(filling))

    def differs(self, victim: Prompt, probe: Prompt, filling: list[Prompt]) -> float:
        """How much the probe's last logits depend on who of the two stands first."""
        behind = logits([victim, probe, *filling])[1, len(probe) - 1]
        ahead = logits([probe, victim, *filling])[0, len(probe) - 1]
        return float((behind - ahead).abs().max())

    def prepare(self, known: Prompt, guess: int) -> list[Prompt] | None:
        """A filling that tells this guess from another one, tried on its own model."""
        wrong = next(token for token in self.candidates if token != guess)
        rest = [wrong] * (self.length - len(known) - 1)
        probe = [*known, guess]
        for filling in self.fillings(probe):
            if self.differs([*probe, *rest], probe, filling) < 0.05:
                continue
            if self.differs([*known, wrong, *rest], probe, filling) < 1e-3:
                return filling
        return None


@pytest.mark.full
def test_ties_tell_a_neighbours_prompt_token_by_token() -> None:
    model = demo()[0]
    prefix, digits = encoded("My pin is"), encoded(" 1 2 4 5 7 8")
    secret = encoded(" 4 7")
    spy = Spy(len(prefix) + len(secret), digits)
    stolen, seen = list(prefix), []
    while len(stolen) < spy.length:
        with attach(model, f"{POLICY},pool=batch"):
            found = {guess: spy.prepare(stolen, guess) for guess in digits}
            tries = {guess: filling for guess, filling in found.items() if filling}
            told = {g: spy.differs(prefix + secret, [*stolen, g], f) for g, f in tries.items()}
        with attach(model, f"{POLICY},pool=request"):
            seen += [spy.differs(prefix + secret, [*stolen, g], f) for g, f in tries.items()]
        assert len(tries) > 1
        assert max(told.values()) > 0.05
        stolen.append(max(told, key=lambda guess: told[guess]))
    assert stolen == prefix + secret
    assert max(seen) < 1e-4
