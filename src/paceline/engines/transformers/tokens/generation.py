"""State of a running `generate`: which sequences have ended, and whether the prompt is over.

Forwards show neither. Transformers feeds a sequence that has ended with padding until the last
one ends, under a mask that calls it real; and it verifies speculated tokens in steps of several,
which look like a prompt. The methods that `generate` calls, such as its stopping criteria after
every step, show both when patched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.generation import StoppingCriteriaList

from paceline.engines.transformers.patching import Patch, Switch, patch_method


class Generation:
    """One running `generate`.

    Attributes:
        decoding: whether the prompt is over: the first token has been chosen.
        ended: [batch] bool, rows of the next forward that have ended; None: none has.
    """

    def __init__(self, decoding: bool = False) -> None:
        self.decoding = decoding
        self.ended: Tensor | None = None

    def add_step(self, done: Tensor) -> None:
        """Note that a token was chosen for every row; `done` [batch] bool end with it."""
        self.decoding = True
        # with beams there are more candidates than rows, and `ended` is set right after
        if self.ended is None or self.ended.shape != done.shape:
            self.ended = done
        else:
            self.ended = self.ended | done


class Owner(Protocol):
    """State that the patches of a model share."""

    switch: Switch

    @property
    def thread(self) -> Any:
        """State of the calling thread, its `generation` among it."""

    def prompt_alone(self) -> bool:
        """Return True if a prompt must be processed without guessed tokens behind it."""


class GenerationPatches:
    """Patches of the methods that a model's `generate` calls.

    Args:
        owner: keeps the running `generate` of each thread.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def patch(self, module: nn.Module) -> list[Patch]:
        """Patch a module that can generate; any other one is left alone."""
        methods: dict[str, Callable[..., Any]] = {
            "generate": self._generate,
            "_get_stopping_criteria": self._stopping_criteria,
            "_beam_search_has_unfinished_sequences": self._unfinished_beams,
            "_get_candidate_generator": self._candidate_generator,
        }
        if not all(hasattr(module, name) for name in methods):
            return []
        return [
            patch_method(module, self._owner.switch, partial(method, getattr(module, name)), name)
            for name, method in methods.items()
        ]

    def _generate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer = self._owner.thread.generation
        # a model that guesses for itself (early exit) is decoding when it does
        self._owner.thread.generation = Generation(decoding=outer is not None and outer.decoding)
        try:
            return run(*args, **kwargs)
        finally:
            self._owner.thread.generation = outer

    def _stopping_criteria(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        criteria, generation = run(*args, **kwargs), self._owner.thread.generation
        return criteria if generation is None else _ObservedCriteria(criteria, generation)

    def _unfinished_beams(
        self,
        run: Callable[..., Any],
        improvable: Tensor,
        sent_finished: Tensor,
        hits: Tensor,
        early_stopping: Any,
    ) -> Any:
        """Mark a prompt's beams as ended once nothing that they may still find would be taken.

        Args:
            run: the model's own method.
            improvable: [batch, 1] bool: a running beam may still beat the finished ones.
            sent_finished: [batch, beams] bool: a finished sequence was found.
            hits: [batch, candidates] bool: the candidate ends here.
            early_stopping: whether enough finished sequences are the end.
        """
        generation = self._owner.thread.generation
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
            guesser.get_candidates = _DiscardFirstGuess(guesser)
        return guesser


class _ObservedCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that pass their results on to a `Generation`."""

    def __init__(self, criteria: StoppingCriteriaList, generation: Generation) -> None:
        super().__init__(criteria)
        self._generation = generation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = super().__call__(*args, **kwargs)
        self._generation.add_step(done)
        return done


class _DiscardFirstGuess:
    """A guesser's method that discards its first guess, as if the model had rejected it all."""

    def __init__(self, guesser: Any) -> None:
        self._guesser, self._guess = guesser, guesser.get_candidates

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._guesser.get_candidates = self._guess
        self._guess(input_ids, *args, **kwargs)  # a model that guesses has to read the prompt too
        return input_ids, None
