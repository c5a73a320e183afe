"""The policy: what it accepts, what it refuses and how, and its text forms."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import CapacityPolicy, PolicyError, register_keep
from paceline.policy import KEEPS

DEFAULTS = {
    "unit": "device", "pool": "batch", "keep": "score", "min_expert_load": "auto", "phase": "all",
    "mode": "enforce", "renormalize": False, "compensate": False, "expand": None,
    "expand_limit": None, "expand_rule": "fill", "max_experts": None, "fill_to": 1.0,
    "drop_first": (), "protect_first": 0, "seed": 0, "max_active": None,
}  # fmt: skip


@st.composite
def any_policy(draw: Any) -> CapacityPolicy:
    """A policy with every field drawn."""
    positive = st.one_of(
        st.integers(1, 10**20), st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False)
    )
    rule = draw(st.sampled_from(["fill", "compete"]))
    expand = draw(st.sampled_from([None, "own_device", "visited_devices", "all"]))
    modalities = st.sampled_from(["image", "audio", "video", "text"])
    most = st.one_of(st.integers(1, 10**6), st.floats(0, 1, exclude_min=True, exclude_max=True))
    max_active = draw(st.one_of(st.none(), most))
    rules = {} if max_active is None else {"max_active": max_active}
    least = 0 if max_active is None else 1
    return CapacityPolicy(
        **rules,
        capacity_factor=draw(st.one_of(st.none(), st.just(math.inf), positive)),
        unit=draw(st.sampled_from(["device", "expert"])),
        pool=draw(st.sampled_from(["batch", "source", "request"][: 3 - least])),
        keep=draw(st.sampled_from([*KEEPS, "order"])),
        min_expert_load=draw(
            st.one_of(st.just("auto"), st.integers(least, 10**6), st.floats(least, 1e9))
        ),
        phase=draw(st.sampled_from(["all", "prefill"][: 2 - least])),
        mode=draw(st.sampled_from(["enforce", "shadow", "observe"])),
        **draw(st.sampled_from([{}, {"renormalize": True}, {"compensate": True}])),
        expand=expand,
        expand_limit=draw(st.one_of(st.none(), st.integers(1, 10**6))) if expand else None,
        expand_rule=rule,
        max_experts=draw(st.one_of(st.none(), st.integers(1, 100))) if expand else None,
        fill_to=draw(positive) if rule == "fill" else 1.0,
        drop_first=draw(st.lists(modalities, unique=True).map(tuple)),
        protect_first=draw(st.integers(0, 10**6)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def test_the_defaults() -> None:
    policy = CapacityPolicy(capacity_factor=1.25)
    for name, value in DEFAULTS.items():
        assert getattr(policy, name) == value, name
    assert policy.factor == Fraction(5, 4)
    assert policy.caps
    assert set(CapacityPolicy.model_fields) == {"capacity_factor", *DEFAULTS}


def test_it_is_frozen_hashable_and_compared_by_value() -> None:
    a, b = CapacityPolicy(capacity_factor=1.5), CapacityPolicy(gamma=1.5)
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b}) == 1
    assert a != CapacityPolicy(capacity_factor=1.25)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        a.capacity_factor = 2.0  # type: ignore[misc]
    c = a.model_copy(update={"capacity_factor": 2.0})
    assert c.factor == 2
    assert a.factor == Fraction(3, 2)


def test_nothing_is_filled_up_to_zero() -> None:
    assert CapacityPolicy(capacity_factor=1, expand="all", fill_to=0).fill_factor == 0


@pytest.mark.parametrize(
    ("mode", "factor", "caps"),
    [("enforce", 1.0, True), ("shadow", 1.0, True), ("observe", 1.0, False),
     ("enforce", None, False), ("shadow", math.inf, False)],
)  # fmt: skip
def test_what_caps(mode: str, factor: float | None, caps: bool) -> None:
    assert CapacityPolicy(capacity_factor=factor, mode=mode).caps is caps


@pytest.mark.parametrize(
    ("alias", "name"),
    [("order", "first"), ("reverse", "last"), ("reverse_order", "last"), ("first", "first"),
     ("last", "last")],
)  # fmt: skip
def test_the_papers_names(alias: str, name: str) -> None:
    assert CapacityPolicy(keep=alias, capacity_factor=1).keep == name
    assert CapacityPolicy.parse(f"capacity_factor=1,keep={alias}").keep == name


def test_gamma_is_the_capacity_factor() -> None:
    want = CapacityPolicy(capacity_factor=1.25, unit="expert")
    assert CapacityPolicy(gamma=1.25, unit="expert") == want
    assert CapacityPolicy.parse("gamma=1.25,unit=expert") == want
    assert CapacityPolicy.from_json('{"gamma": 1.25, "unit": "expert"}') == want
    assert CapacityPolicy.from_toml('gamma = 1.25\nunit = "expert"\n') == want


def test_gamma_and_capacity_factor_together_are_refused() -> None:
    with pytest.raises(PolicyError, match="gamma"):
        CapacityPolicy(gamma=1.25, capacity_factor=1.5)


@pytest.mark.parametrize(
    ("given_", "stored"), [("image", ("image",)), (["image", "text"], ("image", "text")), ((), ())]
)
def test_drop_first_takes_one_name_or_many(given_: Any, stored: tuple[str, ...]) -> None:
    assert CapacityPolicy(capacity_factor=1, drop_first=given_).drop_first == stored


@pytest.mark.parametrize(
    ("value", "device", "resolved"),
    [("auto", "cuda", 64.0), ("auto", "cpu", 8.0), (0, "cuda", 0.0), (2.5, "cpu", 2.5)],
)
def test_the_minimum_load_resolves_by_device(value: Any, device: str, resolved: float) -> None:
    policy = CapacityPolicy(capacity_factor=1, min_expert_load=value)
    assert policy.resolved_min_expert_load(device) == resolved


BAD: list[tuple[str, Any]] = [
    ("capacity_factor", 0), ("capacity_factor", -1), ("capacity_factor", -0.0),
    ("capacity_factor", math.nan), ("capacity_factor", -math.inf), ("capacity_factor", "much"),
    ("capacity_factor", [1.0]), ("capacity_factor", True),
    ("unit", "node"), ("unit", ""), ("unit", None), ("unit", 3),
    ("pool", "world"), ("pool", None), ("keep", "best"), ("keep", 3), ("keep", None),
    ("min_expert_load", -1), ("min_expert_load", -0.5), ("min_expert_load", "often"),
    ("min_expert_load", math.nan), ("min_expert_load", math.inf), ("min_expert_load", None),
    ("phase", "decode"), ("phase", None), ("mode", "off"), ("mode", None),
    ("renormalize", "maybe"), ("renormalize", None), ("renormalize", 2),
    ("expand", "everything"), ("expand", True), ("expand_limit", 0), ("expand_limit", -1),
    ("expand_limit", 1.5), ("expand_limit", "few"), ("expand_rule", "evict"),
    ("expand_rule", None), ("max_experts", 0), ("max_experts", -2), ("max_experts", 2.5),
    ("fill_to", -0.5), ("fill_to", -1), ("fill_to", math.inf), ("fill_to", math.nan),
    ("fill_to", "full"),
    ("fill_to", None), ("drop_first", "smell"), ("drop_first", ("image", "smell")),
    ("drop_first", 3), ("protect_first", -1), ("protect_first", 0.5), ("protect_first", None),
    ("capacity_factor", np.ones(3)), ("capacity_factor", torch.ones(2, 3)),
    ("capacity_factor", 1j), ("capacity_factor", {}), ("capacity_factor", np.True_),
    ("min_expert_load", np.arange(40)), ("keep", np.array(["score", "first"])),
    ("keep", torch.ones(3)), ("unit", ["device"]), ("mode", np.ones(2)), ("fill_to", (1, 2)),
    ("drop_first", {"smell": 1}), ("renormalize", np.ones(2)), ("expand_limit", np.ones(2)),
    ("seed", "lucky"), ("seed", 0.5), ("seed", None), ("seed", True), ("protect_first", True),
    ("protect_first", np.True_), ("max_experts", True), ("expand_limit", False),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{f}={v!r}" for f, v in BAD])
def test_bad_values_are_one_sentence(field: str, value: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        CapacityPolicy(**{"capacity_factor": 1.0, field: value})
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert field in message, message
    shown = value[-1] if isinstance(value, tuple) else value
    texts = [" ".join(text.split())[:40] for text in (repr(shown), str(shown))]
    assert any(text in message for text in [*texts, "smell"]), message
    assert "\n" not in message
    assert len(message) < 300
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("field", "allowed"),
    [("unit", ["device", "expert"]), ("pool", ["batch", "source", "request"]),
     ("keep", ["score", "weight", "first", "last", "random"]), ("phase", ["all", "prefill"]),
     ("mode", ["enforce", "shadow", "observe"]), ("expand_rule", ["fill", "compete"]),
     ("expand", ["own_device", "visited_devices", "all"]), ("min_expert_load", ["auto", "0"]),
     ("drop_first", ["image", "audio", "video", "text"])],
)  # fmt: skip
def test_errors_say_what_is_allowed(field: str, allowed: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        CapacityPolicy(**{"capacity_factor": 1.0, field: "nonsense"})
    for word in allowed:
        assert word in str(caught.value)


def test_unknown_fields_are_refused() -> None:
    for make in (
        lambda: CapacityPolicy(capacity_factr=1.0),
        lambda: CapacityPolicy.parse("capacity_factr=1.0"),
        lambda: CapacityPolicy.from_json('{"capacity_factr": 1.0}'),
        lambda: CapacityPolicy.from_toml("capacity_factr = 1.0"),
    ):
        with pytest.raises(PolicyError, match="capacity_factr") as caught:
            make()
        assert "\n" not in str(caught.value)
        assert "capacity_factor" in str(caught.value), "the known fields"


@pytest.mark.parametrize(
    "text",
    ["capacity_factor", "capacity_factor=", "drop_first=", "=1", "capacity_factor=1;unit=device",
     "capacity_factor=x",
     "capacity_factor=1,unit", "unit=node", "capacity_factor=1,capacity_factor=2",
     "capacity_factor=nan", "capacity_factor=0"],
)  # fmt: skip
def test_bad_strings_are_one_sentence(text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        CapacityPolicy.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"capacity_factor"', "{'a': 1}"])
def test_bad_json_is_one_sentence(text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        CapacityPolicy.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, 3, b"capacity_factor=1", ["capacity_factor=1"], {}])
def test_what_is_no_text_is_one_sentence(text: Any) -> None:
    for read in (CapacityPolicy.parse, CapacityPolicy.from_json, CapacityPolicy.from_toml):
        with pytest.raises(PolicyError, match="policy must be a text"):
            read(text)


def test_a_factor_beyond_floats_is_no_cap_or_refused() -> None:
    for factor in (10**400, "1e400"):
        assert CapacityPolicy(capacity_factor=factor).factor is None
    with pytest.raises(PolicyError, match="capacity_factor"):
        CapacityPolicy(capacity_factor=Fraction(10**400))


@pytest.mark.parametrize("text", ["capacity_factor = ", "= 1", "capacity_factor: 1", "[["])
def test_bad_toml_is_one_sentence(text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        CapacityPolicy.from_toml(text)
    assert "\n" not in str(caught.value)


@given(any_policy())
def test_every_text_form_comes_back_the_same(policy: CapacityPolicy) -> None:
    for copy in (
        CapacityPolicy.parse(str(policy)),
        CapacityPolicy.from_json(policy.to_json()),
        CapacityPolicy.from_toml(policy.to_toml()),
        CapacityPolicy(**policy.model_dump()),
    ):
        assert copy == policy
        assert hash(copy) == hash(policy)
        assert copy.factor == policy.factor
    assert "\n" not in str(policy)
    assert " " not in str(policy)


@given(st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_the_factor_is_the_decimal_in_every_form(factor: float) -> None:
    policy = CapacityPolicy(capacity_factor=factor)
    assert policy.factor == Fraction(str(factor))
    assert CapacityPolicy.parse(str(policy)).factor == policy.factor
    assert CapacityPolicy.from_toml(policy.to_toml()).factor == policy.factor
    assert CapacityPolicy.from_json(policy.to_json()).factor == policy.factor


@pytest.mark.parametrize("none", ["none", "None", "inf"])
def test_no_cap_as_text(none: str) -> None:
    assert CapacityPolicy.parse(f"capacity_factor={none}").factor is None


def test_the_short_string_is_short() -> None:
    """Only what differs from the defaults is said."""
    assert str(CapacityPolicy(capacity_factor=1.25)) == "capacity_factor=1.25"
    text = str(CapacityPolicy(capacity_factor=1.5, unit="expert", renormalize=True))
    assert CapacityPolicy.parse(text).renormalize is True
    assert text.startswith("capacity_factor=1.5,unit=expert")


def test_spaces_in_the_short_string_do_not_matter() -> None:
    want = CapacityPolicy(capacity_factor=1.25, unit="device")
    assert CapacityPolicy.parse(" capacity_factor = 1.25 , unit = device ") == want


def test_a_registered_metric_is_a_name_that_can_be_kept() -> None:
    with pytest.raises(PolicyError, match="test_policy_metric"):
        CapacityPolicy(capacity_factor=1, keep="test_policy_metric")
    register_keep("test_policy_metric", lambda inputs: inputs.topk_weights.float())
    policy = CapacityPolicy(capacity_factor=1, keep="test_policy_metric")
    assert CapacityPolicy.parse(str(policy)) == policy


def test_replace_checks_like_a_new_policy() -> None:
    policy = CapacityPolicy(capacity_factor=1.0, unit="expert")
    assert policy.replace(gamma=2) == CapacityPolicy(capacity_factor=2, unit="expert")
    assert policy.replace(keep="order").keep == "first"
    for change in ({"capacity_factor": -1}, {"unit": "node"}, {"capacity_factr": 1}):
        with pytest.raises(PolicyError):
            policy.replace(**change)


@pytest.mark.parametrize("change", [{"capacity_factor": 2.0}, {"fill_to": 0.5}])
def test_a_copy_forgets_what_was_derived_from_the_old_fields(change: dict[str, float]) -> None:
    policy = CapacityPolicy(capacity_factor=1.0)
    assert policy.factor == policy.fill_factor == 1
    fresh = CapacityPolicy(**{"capacity_factor": 1.0, **change})
    for copy in (policy.model_copy(update=change), policy.replace(**change)):
        assert copy == fresh
        assert hash(copy) == hash(fresh)
        assert (copy.factor, copy.fill_factor) == (fresh.factor, fresh.fill_factor)


@pytest.mark.parametrize("fields", [{"expand_limit": 2}, {"max_experts": 8}])
def test_limits_of_expansion_need_expansion(fields: dict[str, int]) -> None:
    with pytest.raises(PolicyError, match=next(iter(fields))):
        CapacityPolicy(capacity_factor=1, **fields)
    assert CapacityPolicy(capacity_factor=1, expand="all", **fields).expand == "all"


def test_replace_leaves_fields_unset_that_nobody_named() -> None:
    policy = CapacityPolicy(gamma=1.5, unit="expert").replace(gamma=2)
    assert policy == CapacityPolicy(capacity_factor=2, unit="expert")
    assert policy.model_fields_set == {"capacity_factor", "unit"}


def test_stand_ins_and_renormalised_survivors_are_refused_together() -> None:
    with pytest.raises(PolicyError, match="dropped weight would count twice") as caught:
        CapacityPolicy(capacity_factor=1, compensate=True, renormalize=True)
    assert ". " not in str(caught.value)
    policy = CapacityPolicy(capacity_factor=1, compensate=True)
    with pytest.raises(PolicyError, match="dropped weight would count twice"):
        policy.replace(renormalize=True)
