"""Which tokens a policy keeps first: modality, protected positions, and users' own classes."""

from __future__ import annotations

import pytest
import torch

from paceline import CapacityPolicy, RoutingInputs, route
from paceline.routing.ranking import DROPPED_FIRST, NORMAL, PROTECTED, token_priorities

IMAGE = torch.tensor([False, True, True, False, False, False])
AUDIO = torch.tensor([False, False, False, True, False, False])
POSITION = torch.tensor([0, 1, 2, 3, 0, 1])
LOW, MID, HIGH = DROPPED_FIRST, NORMAL, PROTECTED


def policy(**fields: object) -> CapacityPolicy:
    return CapacityPolicy(capacity_factor=1.0, **fields)


@pytest.mark.parametrize(
    ("fields", "modality", "position", "want"),
    [
        ({}, None, None, None),
        ({"drop_first": "image"}, None, None, None),
        ({"drop_first": "image"}, {"image": IMAGE}, None, [MID, LOW, LOW, MID, MID, MID]),
        ({"drop_first": "text"}, {"image": IMAGE}, None, [LOW, MID, MID, LOW, LOW, LOW]),
        ({"drop_first": "text"}, {"image": IMAGE, "audio": AUDIO}, None,
         [LOW, MID, MID, MID, LOW, LOW]),
        ({"drop_first": ("image", "audio")}, {"image": IMAGE, "audio": AUDIO}, None,
         [MID, LOW, LOW, LOW, MID, MID]),
        ({"drop_first": "video"}, {"image": IMAGE}, None, None),
        ({"drop_first": "text"}, {"text": AUDIO, "image": IMAGE}, None,
         [MID, MID, MID, LOW, MID, MID]),
        ({}, {"image": IMAGE}, POSITION, None),
        ({"protect_first": 2}, None, POSITION, [HIGH, HIGH, MID, MID, HIGH, HIGH]),
        ({"protect_first": 2}, None, None, None),
        ({"protect_first": 2, "drop_first": "image"}, {"image": IMAGE}, POSITION,
         [HIGH, HIGH, LOW, MID, HIGH, HIGH]),
        ({"drop_first": "image"}, {"image": IMAGE}, POSITION, [MID, LOW, LOW, MID, MID, MID]),
    ],
)  # fmt: skip
def test_priorities_of_a_policy(
    fields: dict[str, object],
    modality: dict[str, torch.Tensor] | None,
    position: torch.Tensor | None,
    want: list[int] | None,
) -> None:
    got = token_priorities(policy(**fields), modality, position)
    assert (None if got is None else got.tolist()) == want


def kept_tokens(fields: dict[str, object], **inputs: object) -> list[int]:
    """All six tokens choose expert 0 of 3, which may serve two: which tokens are kept?"""
    scores = torch.tensor([[0.9], [0.8], [0.7], [0.6], [0.5], [0.4]]).expand(6, 3)
    a = route(
        RoutingInputs(
            topk_ids=torch.zeros(6, 1, dtype=torch.int64),
            topk_weights=scores[:, :1],
            scores=scores,
            **inputs,
        ),
        policy(min_expert_load=0, **fields),
    )
    return a.kept[:, 0].nonzero()[:, 0].tolist()


def test_a_higher_class_is_kept_before_a_better_score() -> None:
    assert kept_tokens({}) == [0, 1]
    assert kept_tokens({}, token_priority=torch.tensor([0, 0, 0, 0, 1, 0])) == [0, 4]
    assert kept_tokens({}, token_priority=torch.tensor([-1, 0, 0, 0, 0, 0])) == [1, 2]


def test_classes_are_clamped() -> None:
    """1000 and 127 are one class, and so are -1000 and -128; 126 and -127 are others."""
    high = torch.tensor([126, 127, 1000, 1000, 0, 0])
    assert kept_tokens({}, token_priority=high) == [1, 2]
    low = torch.tensor([-1000, -128, -128, -127, -1000, -1000])
    assert kept_tokens({}, token_priority=low) == [0, 3]
    assert kept_tokens({}, token_priority=high.to(torch.int16)) == [1, 2]


def test_decode_tokens_come_first_only_under_prefill() -> None:
    decode = torch.tensor([False, False, False, False, False, True])
    highest = torch.full((6,), 127)
    assert kept_tokens({"phase": "all"}, token_decode=decode) == [0, 1]
    assert kept_tokens({"phase": "prefill"}, token_decode=decode) == [0, 5]
    assert kept_tokens({"phase": "prefill"}, token_decode=decode, token_priority=highest) == [0, 5]
    assert kept_tokens({"phase": "prefill"}) == [0, 1]


def test_a_forward_of_only_decode_tokens_is_not_capped_under_prefill() -> None:
    everyone = torch.ones(6, dtype=torch.bool)
    assert kept_tokens({"phase": "prefill"}, token_decode=everyone) == list(range(6))
    assert kept_tokens({"phase": "all"}, token_decode=everyone) == [0, 1]
    but_padding = torch.tensor([True, True, True, True, True, False])
    kept = kept_tokens({"phase": "prefill"}, token_decode=but_padding, valid=but_padding)
    assert kept == [0, 1, 2, 3, 4]
