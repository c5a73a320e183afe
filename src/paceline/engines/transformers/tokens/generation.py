"""What `generate` knows and its forwards don't say: who has ended, and whether the prompt is over.

Transformers feeds a sequence that has ended with padding until the last one ends, under a mask that
calls it real; and it verifies guessed tokens in steps of several, which look like a prompt. Both
are told by what `generate` asks on its way: its stopping criteria, after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.generation import StoppingCriteriaList

from paceline.engines.transformers.patching import StandIn, Switch, stand_in


class Generation:
    """One running `generate`.

    Attributes:
        decoding: whether the prompt is over: the first token has been chosen.
        ended: [batch] bool, rows of the next forward that have ended; None: none has.
    """

    def __init__(self, decoding: bool = False) -> None:
        self.decoding = decoding
        self.ended: Tensor | None = None

    def chose(self, done: Tensor) -> None:
        """A token was chosen for every row; `done` [batch] bool are those that end with it."""
        self.decoding = True
        # with beams there are more candidates than rows, and who has ended is said right after
        if self.ended is None or self.ended.shape != done.shape:
            self.ended = done
        else:
            self.ended = self.ended | done


class Owner(Protocol):
    """What a model's stand-ins share."""

    switch: Switch

    @property
    def here(self) -> Any:
        """What is running in the calling thread, its `generation` among it."""

    def prompt_alone(self) -> bool:
        """Whether a prompt must be processed alone, without guessed tokens behind it."""


class GenerationWatch:
    """Stands in for the methods of a model that its `generate` goes through.

    Args:
        owner: is told of the running `generate`, thread by thread.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def follow(self, module: nn.Module) -> list[StandIn]:
        """Know of a model's `generate` calls; one that can't generate is left alone."""
        doubles: dict[str, Callable[..., Any]] = {
            "generate": self._generate,
            "_get_stopping_criteria": self._stopping_criteria,
            "_beam_search_has_unfinished_sequences": self._beams_left,
            "_get_candidate_generator": self._candidate_generator,
        }
        if not all(hasattr(module, name) for name in doubles):
            return []
        return [
            stand_in(module, self._owner.switch, partial(double, getattr(module, name)), name)
            for name, double in doubles.items()
        ]

    def _generate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer = self._owner.here.generation
        # a model that guesses for itself (early exit) is decoding when it does
        self._owner.here.generation = Generation(decoding=outer is not None and outer.decoding)
        try:
            return run(*args, **kwargs)
        finally:
            self._owner.here.generation = outer

    def _stopping_criteria(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        criteria, generation = run(*args, **kwargs), self._owner.here.generation
        return criteria if generation is None else _Followed(criteria, generation)

    def _beams_left(
        self,
        run: Callable[..., Any],
        improvable: Tensor,
        sent_finished: Tensor,
        hits: Tensor,
        early_stopping: Any,
    ) -> Any:
        """A prompt's beams have ended where nothing that they may still find would be taken.

        Args:
            run: the model's own.
            improvable: [batch, 1] bool: a running beam may still beat the finished ones.
            sent_finished: [batch, beams] bool: a finished sequence was found.
            hits: [batch, candidates] bool: the candidate ends here.
            early_stopping: whether enough finished sequences are the end.
        """
        generation = self._owner.here.generation
        if generation is not None:
            enough = sent_finished.all(1) if early_stopping is True else hits.all(1)
            ended = ~improvable[:, 0] | enough | hits.all(1)
            generation.ended = ended.repeat_interleave(sent_finished.shape[1])
        return run(improvable, sent_finished, hits, early_stopping)

    def _candidate_generator(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        guesser = run(*args, **kwargs)
        # Guesses behind the prompt would share its budget and so change what is kept of it; the
        # next step brings as many. One that needs the model's own output can't guess before it.
        needs_output = getattr(guesser, "requires_model_outputs", False)
        if self._owner.switch.on and self._owner.prompt_alone() and not needs_output:
            guesser.get_candidates = _FirstNothing(guesser)
        return guesser


class _Followed(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that tell a generation what they answer."""

    def __init__(self, criteria: StoppingCriteriaList, generation: Generation) -> None:
        super().__init__(criteria)
        self._generation = generation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = super().__call__(*args, **kwargs)
        self._generation.chose(done)
        return done


class _FirstNothing:
    """Throws away what is guessed the first time, as if the model had rejected it all."""

    def __init__(self, guesser: Any) -> None:
        self._guesser, self._guess = guesser, guesser.get_candidates

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._guesser.get_candidates = self._guess
        self._guess(input_ids, *args, **kwargs)  # a model that guesses has to read the prompt too
        return input_ids, None
