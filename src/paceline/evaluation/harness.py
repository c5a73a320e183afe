"""lm-evaluation-harness's Hugging Face model with a capacity policy attached: `paceline-hf`.

The harness pads the prompts of a batch on the right and passes the model no mask. That is harmless
for attention, but a cap would count padding as tokens; so batches are formed here, by the harness's
own rules, and the length of every row is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from torch import Tensor

from paceline.engines.transformers import attach
from paceline.evaluation.results import LoadShares
from paceline.plan import Plan
from paceline.settings import PlacementsLike, PoliciesLike
from paceline.shipped import CALIBRATION_FOLDER, DEMO, MODEL_FOLDER

Run = Callable[[], list[Any]]
AroundBatch = Callable[[list[Any], Run], list[Any]]
"""Called with what a batch's answers depend on and a function that computes them."""


@dataclass(frozen=True)
class _Batch:
    """Requests that are answered by one forward, or one `generate`.

    Attributes:
        members: indices of the requests.
        lengths: tokens of each row; several requests may share a row.
    """

    members: list[int]
    lengths: list[int]


@register_model("paceline-hf")
class PacelineLM(HFLM):  # type: ignore[misc]
    """`hf` with a capacity policy: `lm_eval --model paceline-hf --model_args pretrained=...,...`.

    Args:
        pretrained: model folder, hub name, "demo", or a loaded model.
        policy: in short form; one with commas goes in quotes, as in
            policy="capacity_factor=1,unit=expert". Without one, loads are counted only.
        plan: file with policies, placements and calibration.
        placement: expert -> device, as `attach` takes it.
        devices: number of them, among which experts are placed in order; instead of a placement.
        calibration: folder of one, or "demo", for compensate=true.
        hf: every other argument of the harness's `hf`.

    Attributes:
        pace: the handle of the attached model.
        around_batch: called with every batch, to keep or watch answers.
        truncated: prompts so far that were longer than the model reads, and lost their start.
        quiet: True hides the harness's own progress bars.

    Raises:
        ValueError: if the model can't be attached to, or options contradict each other.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: PoliciesLike = None,
        plan: Any = None,
        placement: PlacementsLike = None,
        devices: int | None = None,
        calibration: Any = None,
        **hf: Any,
    ) -> None:
        if isinstance(pretrained, str) and pretrained == DEMO:
            pretrained = str(MODEL_FOLDER)
        if isinstance(calibration, str) and calibration == DEMO:
            calibration = CALIBRATION_FOLDER
        read = Plan.load(plan) if isinstance(plan, str) else plan
        if devices is not None and (placement is not None or (read and read.placements)):
            raise ValueError(f"devices={devices} and a placement both place the experts: give one.")
        super().__init__(pretrained=pretrained, **hf)
        self._lengths: list[int] | None = None
        self.around_batch: AroundBatch = lambda _, run: run()
        self.truncated, self.quiet = 0, False
        self.pace = attach(
            self.model,
            policy,
            devices if placement is None else placement,
            plan=read,
            calibration=calibration,
            token_source="sequence",
            token_valid=self._real,
        )
        if self.batch_size == "auto" and any(each.caps for each in self.pace.policies):
            self.pace.detach()
            raise ValueError(
                "batch_size must be a number with a cap, got auto: which requests share a batch "
                "decides what is dropped."
            )

    def get_model_info(self) -> dict[str, Any]:
        """Return the harness's facts about the model, with the policy and its loads."""
        stats = self.pace.stats()
        info: dict[str, Any] = super().get_model_info()
        shares = LoadShares.of(stats.layers).to_dict()
        return info | {"paceline": {"policy": stats.policy, **shares}}

    # -- which rows are tokens --------------------------------------------------------------------

    def _real(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Return the mask of tokens that are no padding on the right, [batch, length] bool."""
        if self._lengths is None:
            return torch.ones((batch, length), dtype=torch.bool, device=device)
        if (len(self._lengths), max(self._lengths)) != (batch, length):
            raise RuntimeError(
                f"a batch of {batch} x {length} tokens, where rows of {self._lengths} were expected"
            )
        ends = torch.tensor(self._lengths).to(device)
        return torch.arange(length, device=device) < ends[:, None]

    # -- a batch at a time ------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, greedy) of every (context, continuation)."""
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.quiet))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows where they are long."""
        return list(super().loglikelihood_rolling(requests, disable_tqdm or self.quiet))

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, greedy) of every (texts, context ids, continuation ids)."""
        limit = self.max_length
        self.truncated += sum(len(c) + len(t) > limit + 1 for _, c, t in requests)
        if self.batch_size == "auto":
            found: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, disable_tqdm=disable_tqdm, override_bs=override_bs
            )
            return found
        parent: Any = super()

        def answer(batch: _Batch) -> list[Any]:
            self._lengths = batch.lengths if self.backend == "causal" else None
            try:
                chosen = [requests[i] for i in batch.members]
                return list(parent._loglikelihood_tokens(chosen, disable_tqdm=True))
            finally:
                self._lengths = None

        answers: list[Any] = [None] * len(requests)
        for batch in self._scored_batches(requests):
            of = ["loglikelihood", *(list(requests[i][1:]) for i in batch.members)]
            found = self.around_batch(of, lambda batch=batch: answer(batch))  # type: ignore[misc]
            for index, each in zip(batch.members, found, strict=True):
                answers[index] = (float(each[0]), bool(each[1]))
        return answers

    def _scored_batches(self, requests: Sequence[Any]) -> Iterator[_Batch]:
        """Yield batches as `HFLM._loglikelihood_tokens` forms them: long first, rows shared."""

        def row(numbered: Any) -> tuple[int, ...]:
            _, (_, context, continuation) = numbered
            return (*context, *continuation[:-1])

        shared = self.backend == "causal" and self.logits_cache
        members: dict[tuple[int, ...], list[int]] = {}
        for numbered in enumerate(requests):
            members.setdefault(row(numbered), []).append(numbered[0])
        order = Collator(
            [(index, request[1], request[2]) for index, request in enumerate(requests)],
            sort_fn=lambda each: (-len(each[1] + each[2]), tuple(each[1] + each[2])),
            group_fn=lambda each: each[1] + each[2][:-1],
            group_by="contexts" if shared else None,
        )
        for chunk in order.get_batched(n=self.batch_size):
            rows = [row((index, (None, context, rest))) for index, context, rest in chunk]
            yield _Batch(
                [i for tokens in rows for i in members[tokens]]
                if shared
                else [c[0] for c in chunk],
                [min(len(tokens), self.max_length) for tokens in rows],
            )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt, up to a stop sequence."""
        for request in requests:
            settings = normalize_gen_kwargs(request.args[1], self.max_gen_toks)
            room = self.max_length - settings["max_gen_toks"]
            if room <= 0:
                raise ValueError(
                    f"max_gen_toks of the task {request.task_name} must be below the "
                    f"{self.max_length} tokens that the model reads, got {self.max_length - room}."
                )
            self.truncated += len(self.tok_encode(request.args[0])) > room
        if self.batch_size == "auto":
            return list(super().generate_until(requests, disable_tqdm=disable_tqdm))
        parent: Any = super()
        order = Collator(
            [(*request.args, index) for index, request in enumerate(requests)],
            sort_fn=lambda each: (-len(self.tok_encode(each[0])), each[0]),
            group_by="gen_kwargs",
            group_fn=lambda each: each[1],
        )
        answers = [""] * len(requests)
        for chunk in order.get_batched(n=self.batch_size):
            chosen = [requests[index] for *_, index in chunk]
            of = ["generate", *([text, settings] for text, settings, _ in chunk)]
            found = self.around_batch(
                of,
                lambda chosen=chosen: list(  # type: ignore[misc]
                    parent.generate_until(chosen, disable_tqdm=True)
                ),
            )
            for (*_, index), each in zip(chunk, found, strict=True):
                answers[index] = str(each)
        return answers
