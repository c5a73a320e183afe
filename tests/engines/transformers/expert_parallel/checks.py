"""Checks that ranks run: one function each, with the same names on all ranks.

A model that every rank also has whole is the reference; it runs the tokens of all ranks at once.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from made_up_calibration import made_up
from row_counter import RowCounter
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from paceline import CapacityPolicy, ExpertPlacement
from paceline.engines.transformers import attach, expert_parallel
from paceline.engines.transformers.expert_parallel import ExpertParallelError, place_experts

FOLDER = Path(sys.argv[1])
EXPERTS = tiny_models.NUM_EXPERTS
POLICIES = (
    "capacity_factor=1.0",
    "capacity_factor=1.1,unit=expert",
    "capacity_factor=0.7,keep=weight,renormalize=true",
    "capacity_factor=1.0,keep=random,seed=3",
    "capacity_factor=0.8,keep=last,protect_first=4",
    "capacity_factor=0.5,pool=request",
)
OWN_POLICIES = (
    *POLICIES,
    "capacity_factor=1.25,expand=own_device",
    "capacity_factor=1.0,pool=batch,keep=last",
)
TOGETHER = (
    "capacity_factor=1.0,pool=batch",
    "capacity_factor=0.8,pool=batch,keep=random",
    "capacity_factor=1.2,pool=batch,keep=first,protect_first=3",
    "capacity_factor=1.25,pool=batch,expand=all",
    "capacity_factor=1.25,pool=batch,expand=own_device,max_experts=2",
)
ACTIVE = ("max_active=2", "max_active=0.3,renormalize=true")
LAYOUTS = {
    "shared": {"tp_size": 2, "ep_size": 2},
    "own": {"fsdp_size": 2, "ep_size": 2, "tp_size": 1},
}
PLACEMENTS = {
    "uneven": ExpertPlacement.explicit([0] * 5 + [1] * 3),
    "scattered": ExpertPlacement.explicit([1, 0, 0, 1, 0, 1, 0, 1]),
    "empty": ExpertPlacement.explicit([1] * EXPERTS, num_devices=2),
}


def rank() -> int:
    return dist.get_rank()


def whole(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / name).eval()


def spread(name: str, layout: str) -> Any:
    config = DistributedConfig(**LAYOUTS[layout], ep_implementation="paceline")
    return AutoModelForCausalLM.from_pretrained(FOLDER / name, distributed_config=config).eval()


def policy_of(text: str) -> CapacityPolicy:
    return CapacityPolicy.parse(text + f",min_expert_load={10**6 if 'max_active' in text else 0}")


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out = model(**batch).logits
    return out.full_tensor() if hasattr(out, "full_tensor") else out


def near(got: Tensor, want: Tensor, mask: Tensor, what: str) -> None:
    """Real tokens agree to 1e-5 (relative to logits of order 1)."""
    real = mask.bool()
    worst = (got[real] - want[real]).abs().max().item() if bool(real.any()) else 0.0
    scale = max(1.0, want[real].abs().max().item()) if bool(real.any()) else 1.0
    assert worst <= 1e-5 * scale, f"{what}: differs by {worst:.2e} (largest logit {scale:.1f})"


def batches() -> list[dict[str, Tensor]]:
    """Rank 0 has 3 sequences, rank 1 has 1, with padding on both."""
    first = tiny_models.inputs(batch=3, length=24, seed=5, pad=7)
    second = tiny_models.inputs(batch=1, length=24, seed=6, pad=9)
    return [first, second]


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def same_everywhere(tensor: Tensor, what: str) -> None:
    """All ranks hold the same bits."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    assert all(torch.equal(tensor, other) for other in others), f"{what} differs between ranks"


# -- one batch for all ranks -----------------------------------------------------------------------


def compare_shared(
    name: str, model: Any, placement: ExpertPlacement, what: str, texts: tuple[str, ...]
) -> None:
    reference, batch = whole(name), tiny_models.inputs(batch=3, length=24, pad=7)
    mask = batch["attention_mask"]
    near(logits(model, batch), logits(reference, batch), mask, f"{what}, not attached")
    for text in ("", *texts):
        policy = policy_of(text) if text else None
        with attach(reference, policy, placement) as one, attach(model, policy) as many:
            got, want = logits(model, batch), logits(reference, batch)
            near(got, want, mask, f"{what}, {text}")
            same_everywhere(got, f"{what}, {text}: logits")
            for a, b in zip(many.stats().layers, one.stats().layers, strict=True):
                assert a.expert_loads_after == b.expert_loads_after, f"{what}, {text}: loads"
                assert a.dropped == b.dropped, f"{what}, {text}: dropped"


def shared() -> None:
    texts = (*POLICIES, "capacity_factor=1.25,expand=all", "capacity_factor=1.0,mode=shadow")
    for name, chosen in (("mixtral", texts[:2]), ("olmoe", texts)):
        model, placement = spread(name, "shared"), ExpertPlacement.contiguous(EXPERTS, 2)
        compare_shared(name, model, placement, f"{name} shared", chosen)


def shared_placed() -> None:
    for kind, placement in PLACEMENTS.items():
        model = whole("olmoe")
        place_experts(model, placement, batch="shared")
        compare_shared("olmoe", model, placement, f"olmoe shared {kind}", POLICIES[:2])


# -- a batch a rank --------------------------------------------------------------------------------


def compare_own(
    name: str,
    model: Any,
    placement: ExpertPlacement,
    what: str,
    texts: tuple[str, ...],
    calibration: Any = None,
) -> None:
    reference, parts = whole(name), batches()
    together, mine = joined(parts), parts[rank()]
    sizes = [len(part["input_ids"]) for part in parts]
    source = torch.arange(2).repeat_interleave(torch.tensor(sizes))
    start = sum(sizes[: rank()])
    rows = slice(start, start + sizes[rank()])
    mask = mine["attention_mask"]
    for text in ("", *texts):
        policy = policy_of(text) if text else None
        one_policy = policy
        if policy is not None and "pool" not in text:
            one_policy = policy.replace(pool="source")
        with (
            attach(
                reference, one_policy, placement, token_source=source, calibration=calibration
            ) as one,
            attach(model, policy, calibration=calibration) as many,
        ):
            assert one_policy is None or many.policy.pool == one_policy.pool
            near(logits(model, mine), logits(reference, together)[rows], mask, f"{what}, {text}")
            for a, b in zip(many.stats().layers, one.stats().layers, strict=True):
                summed = torch.tensor([*a.expert_loads_after, a.dropped, a.extras, a.tokens])
                dist.all_reduce(summed)
                wanted = [*b.expert_loads_after, b.dropped, b.extras, b.tokens]
                assert summed.tolist() == wanted, f"{what}, {text}: {summed.tolist()} for {wanted}"


def own() -> None:
    texts = (*OWN_POLICIES, *TOGETHER)
    for name, chosen in (("mixtral", texts[:2]), ("olmoe", texts)):
        model, placement = spread(name, "own"), ExpertPlacement.contiguous(EXPERTS, 2)
        compare_own(name, model, placement, f"{name} own", chosen)


def own_placed() -> None:
    for kind, placement in PLACEMENTS.items():
        model = whole("olmoe")
        place_experts(model, placement)
        compare_own(
            "olmoe",
            model,
            placement,
            f"olmoe own {kind}",
            (POLICIES[0], OWN_POLICIES[-2], TOGETHER[0]),
        )


def architectures() -> None:
    """Biases, selection biases and shared experts travel with their layers."""
    for name in ("gpt_oss", "deepseek_v3"):
        model = whole(name)
        place_experts(model, PLACEMENTS["scattered"])
        compare_own(name, model, PLACEMENTS["scattered"], f"{name} own", POLICIES[:1])
        model = whole(name)
        place_experts(model, PLACEMENTS["uneven"], batch="shared")
        compare_shared(name, model, PLACEMENTS["uneven"], f"{name} shared", POLICIES[:1])


def untouched() -> None:
    """Without a policy it is Transformers' own result to the bit, attached or not."""
    for layout in LAYOUTS:
        model = spread("mixtral", layout)
        stock = AutoModelForCausalLM.from_pretrained(
            FOLDER / "mixtral", distributed_config=DistributedConfig(**LAYOUTS[layout])
        ).eval()
        batch = batches()[rank() if layout == "own" else 0]
        want = logits(stock, batch)
        assert torch.equal(logits(model, batch), want), layout
        with attach(model):
            assert torch.equal(logits(model, batch), want), f"{layout}, attached"
        model.train()
        refused(RuntimeError, "is for inference", lambda model=model, batch=batch: model(**batch))


def active() -> None:
    """Few experts a rank: all ranks decide alike, and read no more where they decide together."""
    contiguous, uneven = ExpertPlacement.contiguous(EXPERTS, 2), PLACEMENTS["uneven"]
    compare_shared("olmoe", spread("olmoe", "shared"), contiguous, "olmoe shared", ACTIVE)
    texts = (*ACTIVE, "max_active=2,pool=batch", "max_active=1,pool=batch,capacity_factor=1.0")
    compare_own("olmoe", spread("olmoe", "own"), contiguous, "olmoe own", texts)
    for batch, text in (("shared", "max_active=2"), ("own", "max_active=2,pool=batch")):
        model, free = whole("olmoe"), 0
        place_experts(model, uneven, batch=batch)
        mine = batches()[rank() if batch == "own" else 0]
        for policy in (None, policy_of(text)):
            counter = RowCounter(model)
            with attach(model, policy), counter:
                logits(model, mine)
            read = max(int((counter.rows(name) > 0).sum()) for name in counter._counts)
            assert policy is None or read <= 2 < free, f"{batch}: {read} experts, {free} before"
            free = read


# -- generating ------------------------------------------------------------------------------------


def generate() -> None:
    """Prompts of both ranks, prefill and cached decode, as one process; rank 0 stops early."""
    for layout in LAYOUTS:
        reference, model = whole("mixtral"), spread("mixtral", layout)
        parts = (
            batches() if layout == "own" else [tiny_models.inputs(batch=3, length=24, pad=7)] * 2
        )
        together = joined(parts) if layout == "own" else parts[0]
        source = (
            torch.arange(2).repeat_interleave(torch.tensor([3, 1])) if layout == "own" else None
        )
        rows = slice(0, 3) if layout == "shared" or rank() == 0 else slice(3, 4)
        placement = ExpertPlacement.contiguous(EXPERTS, 2)
        policy = policy_of("capacity_factor=1.0,keep=score")
        one_policy = policy.replace(pool="source") if layout == "own" else policy
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with (
            attach(reference, one_policy, placement, token_source=source),
            attach(model, policy) as pace,
        ):
            want = reference.generate(**together, **options)[rows]
            got = model.generate(**parts[rank()], **options)
            assert torch.equal(got, want), f"{layout}: {got.tolist()} for {want.tolist()}"
            assert pace.stats().layers[0].capped_forwards == 6
            pace.policy = policy_of("capacity_factor=1.0,phase=prefill")
            pace.reset_stats()
            model.generate(**parts[rank()], **options)
            assert pace.stats().layers[0].capped_forwards == 1
            if layout == "own":  # ranks may end at different times
                options["max_new_tokens"] = 2 if rank() == 0 else 9
                assert (
                    model.generate(**parts[rank()], **options).shape[1]
                    == 24 + options["max_new_tokens"]
                )


def all_real(batch: int, length: int, device: torch.device) -> Tensor:
    """No row is padding: for a layer that is run on its own."""
    return torch.ones((batch, length), dtype=torch.bool, device=device)


def idle_rank() -> None:
    """A rank with padding only still serves the others, and so does a layer given no row at all."""
    batch = tiny_models.inputs(batch=2, length=24)
    placement = ExpertPlacement.contiguous(EXPERTS, 2)
    reference = whole("olmoe")
    placed = whole("olmoe")
    place_experts(placed, placement)
    for model in (spread("olmoe", "own"), placed):
        for text in ("capacity_factor=1.0", "capacity_factor=1.0,pool=batch"):
            policy, mine = policy_of(text), dict(batch)
            if rank() == 1:
                mine["attention_mask"] = torch.zeros_like(batch["attention_mask"])
            source = torch.zeros(2, dtype=torch.int64)
            one_policy = policy if "pool" in text else policy.replace(pool="source")
            with attach(model, policy) as pace:
                got = logits(model, mine)
                assert pace.stats().layers[0].tokens == (48 if rank() == 0 else 0)
            if rank() == 0:
                with attach(reference, one_policy, placement, token_source=source):
                    near(got, logits(reference, batch), batch["attention_mask"], text)
    rows = 6 if rank() == 0 else 0
    block, experts = reference.model.layers[0].mlp, placed.model.layers[0].mlp
    hidden = torch.randn((1, 6, 32), generator=torch.Generator().manual_seed(0))[:, :rows]
    for policy in (None, policy_of("capacity_factor=10,pool=batch")):
        with attach(placed, policy, token_valid=all_real), torch.no_grad():
            got = experts(hidden)
            assert got.shape == hidden.shape
            assert torch.allclose(got, block(hidden), atol=1e-5) or not rows


def per_layer() -> None:
    """Every layer has a placement and a policy of its own, in both layouts."""
    placements = [*list(PLACEMENTS.values())[:2], ExpertPlacement.contiguous(EXPERTS, 2)]
    texts = ("capacity_factor=0.75", None, "capacity_factor=1.0,unit=expert")
    policies = [None if text is None else policy_of(text) for text in texts]
    shared_batch = tiny_models.inputs(batch=3, length=24, pad=7)
    for batch in ("shared", "own"):
        model, reference = whole("olmoe"), whole("olmoe")
        place_experts(model, placements, batch=batch)
        given, labels, alike = [shared_batch] * 2, None, policies
        if batch == "own":
            given = batches()
            sizes = torch.tensor([len(part["input_ids"]) for part in given])
            labels = torch.arange(2).repeat_interleave(sizes)
            alike = [None if p is None else p.replace(pool="source") for p in policies]
        mine = given[rank()]
        with (
            attach(model, policies) as many,
            attach(reference, alike, placements, token_source=labels) as one,
        ):
            assert list(many.placements) == placements
            whole_batch = shared_batch if batch == "shared" else joined(given)
            want = logits(reference, whole_batch)
            if batch == "own":
                want = want[:3] if rank() == 0 else want[3:]
            near(logits(model, mine), want, mine["attention_mask"], f"per layer, {batch}")
            for a, b in zip(many.stats().layers, one.stats().layers, strict=True):
                counts = torch.tensor([*a.expert_loads_after, a.dropped])
                if batch == "own":
                    dist.all_reduce(counts)
                assert counts.tolist() == [*b.expert_loads_after, b.dropped]


def requests() -> None:
    """A request is judged by its own tokens, however many ranks there are."""
    model, reference, mine = whole("olmoe"), whole("olmoe"), batches()[rank()]
    placement = PLACEMENTS["scattered"]
    place_experts(model, placement)
    # 17 and 24 real tokens a sequence on rank 0, 15 on rank 1; 2 of 8 experts a token
    for enough in (4, 5, "auto"):
        policy = CapacityPolicy(capacity_factor=0.75, pool="request", min_expert_load=enough)
        with attach(model, policy) as many, attach(reference, policy, placement) as one:
            near(logits(model, mine), logits(reference, mine), mine["attention_mask"], str(enough))
            for a, b in zip(many.stats().layers, one.stats().layers, strict=True):
                assert (a.dropped, a.capped_forwards) == (b.dropped, b.capped_forwards)


def ended() -> None:
    """Sequences that have ended are no tokens on any rank, in no pool."""
    model = whole("olmoe")
    place_experts(model, PLACEMENTS["uneven"])
    mine = batches()[rank()]
    kwargs: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    kwargs |= {"eos_token_id": None, "synced_gpus": True}
    stops = torch.tensor([26, 99, 25]) if rank() == 0 else torch.tensor([25])  # lengths

    def stop(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return ids.shape[1] >= stops

    prompt, live = int(mine["attention_mask"].sum()), 1 + 4 + 0 if rank() == 0 else 0
    for text in ("", "capacity_factor=1.5", "capacity_factor=1.5,pool=batch"):
        with attach(model, policy_of(text) if text else None) as pace:
            model.generate(**mine, **kwargs, stopping_criteria=[stop])
            assert pace.stats().layers[0].tokens == prompt + live, text


# -- what is sent ----------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[tuple[str, int, list[int]]]]:
    """Every collective of torch.distributed inside: name, bytes a row, rows for each rank."""
    calls: list[tuple[str, int, list[int]]] = []
    exchange, reduce, gather = dist.all_to_all_single, dist.all_reduce, dist.all_gather

    def all_to_all(out: Tensor, rows: Tensor, received: Any, sent: Any, **kwargs: Any) -> Any:
        kind = "counts" if rows.dim() == 1 else "rows"
        calls.append((kind, rows[:1].numel() * rows.element_size(), list(sent)))
        return exchange(out, rows, received, sent, **kwargs)

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(("reduce", tensor.numel() * tensor.element_size(), []))
        return reduce(tensor, *args, **kwargs)

    def all_gather(out: list[Tensor], rows: Tensor, **kwargs: Any) -> Any:
        calls.append(("gather", rows[:1].numel() * rows.element_size(), [rows.shape[0]]))
        return gather(out, rows, **kwargs)

    dist.all_to_all_single, dist.all_reduce, dist.all_gather = all_to_all, all_reduce, all_gather
    try:
        yield calls
    finally:
        dist.all_to_all_single, dist.all_reduce, dist.all_gather = exchange, reduce, gather


def sent() -> None:
    """Dropped assignments are not sent; the default under data parallelism adds no collective."""
    model = whole("olmoe")
    placement = PLACEMENTS["scattered"]
    place_experts(model, placement)
    reference, parts = whole("olmoe"), batches()
    mine, hidden = parts[rank()], reference.config.hidden_size
    layers = reference.config.num_hidden_layers
    for text in ("", "capacity_factor=0.75", "capacity_factor=0.75,pool=batch"):
        with attach(model, policy_of(text) if text else None) as pace:
            for layer in pace._layers:
                layer.parallel.rows_sent = layer.parallel.bytes_sent = 0
            with counted() as calls:
                logits(model, mine)
            stats = pace.stats().layers
        rows = [call for call in calls if call[0] == "rows"]
        assert len(rows) == 2 * layers
        assert len([call for call in calls if call[0] == "counts"]) == layers
        gathers = [call for call in calls if call[0] == "gather"]
        assert len(gathers) == (2 * layers if "batch" in text else 0)
        assert len(calls) == 3 * layers + len(gathers)
        # without a policy padding is sent as ever: the stats count real tokens alone
        padding = 0 if text else (mine["attention_mask"] == 0).sum().item() * tiny_models.TOP_K
        for layer, (_, width, dispatched) in zip(stats, rows[::2], strict=True):
            assert width == hidden * 4
            assert sum(dispatched) == sum(layer.expert_loads_after) + padding
            if text:
                assert dispatched == layer.device_loads_after
        tokens = [int(part["attention_mask"].sum()) for part in parts]
        pools = [sum(tokens)] if "batch" in text else tokens
        hosted = tiny_models.TOP_K * placement.sizes[rank()]
        allowed = sum(math.ceil(Fraction("0.75") * pool * hosted / EXPERTS) for pool in pools)
        for layer, (_, width, returned) in zip(pace._layers, rows[1::2], strict=True):
            away, dispatched = 1 - rank(), rows[2 * layer.index][2]
            # what is sent back is what has arrived
            assert not text or sum(returned) <= allowed, f"{text}: {returned} of {allowed}"
            assert layer.parallel.rows_sent == dispatched[away]
            own = width * (dispatched[away] + returned[away])
            assert layer.parallel.bytes_sent >= own
            assert layer.parallel.bytes_sent == own or "batch" in text


def shared_sends_nothing() -> None:
    """Ranks that share a batch send no token: one all-reduce a layer."""
    model = whole("olmoe")
    place_experts(model, PLACEMENTS["uneven"], batch="shared")
    batch = tiny_models.inputs(batch=2, length=24)
    with attach(model, policy_of("capacity_factor=0.75")), counted() as calls:
        logits(model, batch)
    assert [call[0] for call in calls] == ["reduce"] * model.config.num_hidden_layers


def compensated() -> None:
    """Each stand-in counts once, in both layouts, and nothing more is sent."""
    found, text = made_up(whole("olmoe")), "capacity_factor=0.75"
    placement = PLACEMENTS["uneven"]
    for batch in ("shared", "own"):
        model, reference = whole("olmoe"), whole("olmoe")
        place_experts(model, placement, batch=batch)
        parts = batches()
        given = parts[0] if batch == "shared" else parts[rank()]
        outs, calls = [], []
        for compensate in (False, True):
            policy = policy_of(text).replace(compensate=compensate, pool="request")
            with (
                attach(reference, policy, placement, calibration=found),
                attach(model, policy, calibration=found),
                counted() as seen,
            ):
                outs.append(logits(model, given))
                near(outs[-1], logits(reference, given), given["attention_mask"], batch)
                assert len(seen) >= model.config.num_hidden_layers
                calls.append(list(seen))
        assert not torch.equal(*outs)
        # later layers see other tokens; the first sends what it sent
        assert calls[0][0] == calls[1][0]
        assert [call[0] for call in calls[0]] == [call[0] for call in calls[1]]
        if batch == "shared":
            assert calls[0] == calls[1]


def ranked_by_what_is_left() -> None:
    """All ranks decide by what is expected to be left of every token, theirs or not."""
    found, model = made_up(whole("olmoe")), whole("olmoe")
    place_experts(model, PLACEMENTS["uneven"])
    by, texts = "keep=contribution,compensate=true", ("", ",pool=batch", ",pool=batch,expand=all")
    policies = tuple(f"capacity_factor=0.75,{by}{more}" for more in texts)
    compare_own("olmoe", model, PLACEMENTS["uneven"], "by what is left", policies, found)


# -- failing ---------------------------------------------------------------------------------------


def refused(kind: type[Exception], message: str, act: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        act()


def disagreements() -> None:
    """Whatever the ranks disagree on ends all of them with the same sentence."""
    own = [0, 0, 0, 0, 1, 1, 1, 1] if rank() == 0 else [1, 1, 1, 1, 0, 0, 0, 0]
    model = whole("olmoe")
    refused(
        ValueError,
        "placement is not the same on all ranks: rank 0 has",
        lambda: place_experts(model, ExpertPlacement.explicit(own)),
    )
    refused(
        ValueError,
        "one device per rank, 2, got",
        lambda: place_experts(model, ExpertPlacement.per_expert(EXPERTS)),
    )
    refused(
        ValueError,
        "must be of the 8 experts",
        lambda: place_experts(model, ExpertPlacement.contiguous(6, 2)),
    )
    place_experts(model, PLACEMENTS["scattered"])
    refused(ValueError, "spread over ranks", lambda: place_experts(model, PLACEMENTS["scattered"]))
    factor = 1.0 + rank()
    refused(
        ValueError,
        "policy is not the same",
        lambda: attach(model, CapacityPolicy(capacity_factor=factor)),
    )
    placement = ExpertPlacement.explicit(own)
    refused(ValueError, "placement is not the same", lambda: attach(model, None, placement))
    refused(
        ValueError,
        "must be None or where its experts are",
        lambda: attach(model, None, ExpertPlacement.contiguous(EXPERTS, 2)),
    )
    refused(ValueError, "a token is on its rank", lambda: attach(model, token_source="sequence"))
    with attach(model) as pace:
        refused(
            ValueError,
            "policy is not the same",
            lambda: setattr(pace, "policy", f"capacity_factor={factor}"),
        )
        assert pace.policy == CapacityPolicy(mode="observe")
    stock = AutoModelForCausalLM.from_pretrained(
        FOLDER / "olmoe", distributed_config=DistributedConfig(**LAYOUTS["shared"])
    ).eval()
    refused(ValueError, 'ep_implementation="paceline"', lambda: attach(stock))


def lost_in_layer() -> None:
    """Rank 1 dies in place of its second MoE layer; rank 0 names the layer."""
    model = whole("olmoe")
    place_experts(model, PLACEMENTS["scattered"])
    if rank() == 1:
        model.model.layers[1].mlp.experts.register_forward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
    logits(model, batches()[rank()])


def silent_rank() -> None:
    """Rank 1 never joins a forward; rank 0 gives up after its time-out, in that group alone."""
    os.environ["PACELINE_EP_TIMEOUT"] = "3"
    model, group = whole("olmoe"), dist.new_group()
    dist.barrier()
    place_experts(model, PLACEMENTS["scattered"], group=group)
    if rank() == 0:
        start = time.perf_counter()
        refused(
            ExpertParallelError, "has not joined within 3 s", lambda: logits(model, batches()[0])
        )
        assert time.perf_counter() - start < 13
    dist.barrier()


def silent_rank_under_fsdp() -> None:
    """The same where Transformers' own collectives come first: bounded by `join`."""
    model = spread("mixtral", "own")
    start = time.perf_counter()
    if rank() == 1:
        time.sleep(100)
    else:
        refused(RuntimeError, "imed out", lambda: logits(model, batches()[0]))
        assert time.perf_counter() - start < 25
    print("silent_rank_under_fsdp: done", flush=True)
    os._exit(0)


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    expert_parallel.join(timeout=float(os.environ.get("PACELINE_EP_TIMEOUT", 60)))
    for name in sys.argv[2:]:
        start = time.perf_counter()
        globals()[name]()
        print(f"rank {rank()} passed {name} in {time.perf_counter() - start:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
