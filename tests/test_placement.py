"""Where experts live: contiguous, explicit, one device an expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import ExpertPlacement


@given(st.integers(1, 300), st.data())
def test_contiguous_sizes_differ_by_at_most_one_larger_first(
    num_experts: int, data: st.DataObject
) -> None:
    devices = data.draw(st.integers(1, num_experts))
    p = ExpertPlacement.contiguous(num_experts, devices)
    assert p.num_experts == num_experts
    assert p.num_devices == devices
    assert list(p.expert_to_device) == sorted(p.expert_to_device)
    sizes = [p.expert_to_device.count(d) for d in range(devices)]
    assert list(p.sizes) == sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == num_experts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 4))
def test_explicit_maps_are_kept_as_given(host: list[int], empty: int) -> None:
    devices = max(host) + 1 + empty
    p = ExpertPlacement.explicit(host, num_devices=devices)
    assert p.expert_to_device == tuple(host)
    assert isinstance(p.expert_to_device, tuple)
    assert p.num_devices == devices
    assert p.num_experts == len(host)
    assert list(p.sizes) == [host.count(d) for d in range(devices)]
    for d in range(devices):
        assert list(p.experts_of(d)) == [e for e in range(len(host)) if host[e] == d]
    smallest = ExpertPlacement.explicit(host)
    assert smallest.num_devices == max(host) + 1


def test_an_expert_per_device() -> None:
    p = ExpertPlacement.per_expert(5)
    assert p.expert_to_device == (0, 1, 2, 3, 4)
    assert p.num_devices == 5
    assert p == ExpertPlacement.contiguous(5, 5) == ExpertPlacement.explicit(range(5))


def test_it_is_frozen_hashable_and_compared_by_value() -> None:
    a, b = ExpertPlacement.contiguous(4, 2), ExpertPlacement.explicit([0, 0, 1, 1])
    assert a == b
    assert hash(a) == hash(b)
    assert a != ExpertPlacement.explicit([0, 0, 1, 1], num_devices=3)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        a.num_devices = 3  # type: ignore[misc]
    assert "2" in repr(a)


def test_whole_numbers_of_any_library_are_taken() -> None:
    want = ExpertPlacement.contiguous(4, 2)
    hosts = [0, 0, 1, 1]
    for same in (
        ExpertPlacement.contiguous(np.int64(4), np.uint8(2)),
        ExpertPlacement.contiguous(torch.tensor(4), torch.tensor(2)),
        ExpertPlacement.explicit(np.array(hosts)),
        ExpertPlacement.explicit(torch.tensor(hosts)),
        ExpertPlacement.explicit([np.int32(host) for host in hosts], num_devices=np.int16(2)),
        ExpertPlacement.explicit({np.int64(e): host for e, host in enumerate(hosts)}),
        ExpertPlacement(hosts, 2),
    ):
        assert same == want
        assert hash(same) == hash(want)
        assert all(type(host) is int for host in same.expert_to_device)
        assert type(same.num_devices) is int


BAD: list[tuple[Any, str]] = [
    (lambda: ExpertPlacement.contiguous(4, 5), "num_devices"),
    (lambda: ExpertPlacement.contiguous(4, 0), "num_devices"),
    (lambda: ExpertPlacement.contiguous(4, -1), "num_devices"),
    (lambda: ExpertPlacement.contiguous(0, 1), "num_experts"),
    (lambda: ExpertPlacement.contiguous(-2, 1), "num_experts"),
    (lambda: ExpertPlacement.per_expert(0), "num_experts"),
    (lambda: ExpertPlacement.explicit([]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([0, -1]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([0, 2], num_devices=2), "num_devices"),
    (lambda: ExpertPlacement.explicit([0, 1.5]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([0, "a"]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit(None), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([0, 1], num_devices=0), "num_devices"),
    (lambda: ExpertPlacement.explicit([0, True]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([0, np.True_]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([0, None]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit("0011"), "expert_to_device"),
    (lambda: ExpertPlacement.explicit(4), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([[0, 1], [1, 0]]), "expert_to_device"),
    (lambda: ExpertPlacement.explicit(np.array([0.5, 1])), "expert_to_device"),
    (lambda: ExpertPlacement.explicit({0: 0, 2: 1}), "expert_to_device"),
    (lambda: ExpertPlacement.explicit({"a": 0}), "expert_to_device"),
    (lambda: ExpertPlacement.explicit({0: "b"}), "expert_to_device"),
    (lambda: ExpertPlacement.explicit([0, 1], num_devices="2"), "num_devices"),
    (lambda: ExpertPlacement.explicit([0, 0], num_devices=True), "num_devices"),
    (lambda: ExpertPlacement.contiguous("8", 2), "num_experts"),
    (lambda: ExpertPlacement.contiguous(8, "2"), "num_devices"),
    (lambda: ExpertPlacement.contiguous(8, 2.0), "num_devices"),
    (lambda: ExpertPlacement.contiguous(8, True), "num_devices"),
    (lambda: ExpertPlacement.contiguous(None, 2), "num_experts"),
    (lambda: ExpertPlacement.per_expert(2.5), "num_experts"),
    (lambda: ExpertPlacement((), 2), "expert_to_device"),
    (lambda: ExpertPlacement(None, 2), "expert_to_device"),
    (lambda: ExpertPlacement.contiguous(4, 2).experts_of("0"), "device"),
    (lambda: ExpertPlacement.contiguous(4, 2).experts_of(2), "device"),
    (lambda: ExpertPlacement.contiguous(4, 2).experts_of(-1), "device"),
]


@pytest.mark.parametrize(("make", "named"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_maps_are_one_sentence(make: Any, named: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (what it says is looked at below)
        make()
    message = str(caught.value)
    assert named in message, message
    assert "\n" not in message
    assert len(message) < 300
