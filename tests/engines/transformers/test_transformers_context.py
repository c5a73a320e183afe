"""What the engine knows of tokens: padding, decode steps, position, request, device, modality."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from model_runs import choices, counted, fingerprint, kept_slots, model_of, output
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from paceline import CapacityPolicy, ExpertPlacement, attach
from paceline.engines.transformers import load_policy, save_policy
from paceline.engines.transformers.tokens.context import ForwardContext
from paceline.engines.transformers.tokens.labels import UserLabels

CAP = CapacityPolicy(capacity_factor=1, unit="expert", min_expert_load=0)


def context(config: Any = None, source: Any = None, **arguments: Any) -> ForwardContext:
    return ForwardContext(arguments, config, UserLabels(source))


class Cached:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


def test_valid_tokens_are_read_from_masks_of_every_form() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert context(input_ids=ids).valid is None
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    want = [True, True, True, True, True, False]  # the last three columns
    assert context(input_ids=ids, attention_mask=mask).valid.tolist() == want
    seen = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
    causal = torch.ones(3, 5, dtype=torch.bool).tril(2)
    bools = (causal & seen[:, None])[:, None]
    floats = torch.where(bools, 0.0, -torch.inf)
    for full in (bools, floats, {"full_attention": bools, "sliding_attention": None}):
        got = context(input_ids=ids, attention_mask=full, cache=Cached(2)).valid
        assert got.tolist() == want
    with pytest.raises(ValueError, match=r"attention_mask must be .*got \[2, 2\]"):
        context(input_ids=ids, attention_mask=torch.ones(2, 2)).valid  # noqa: B018


def test_positions_requests_and_decode_steps() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert context(input_ids=ids, attention_mask=mask).position.tolist() == [0, 1, 2, 2, 3, 4]
    assert context(input_ids=ids, cache=Cached(4)).position.tolist() == [4, 5, 6, 4, 5, 6]
    assert context(input_ids=ids).request.tolist() == [0, 0, 0, 1, 1, 1]
    assert context(input_ids=ids, cache=Cached(4)).is_decode  # guesses to be verified
    assert context(input_ids=ids[:, :1], cache=Cached(4)).is_decode
    assert not context(input_ids=ids[:, :1], cache=Cached(0)).is_decode
    assert not context(input_ids=ids[:, :1]).is_decode


def test_sequences_packed_in_a_model_that_reads_images() -> None:
    ids = torch.zeros((1, 6), dtype=torch.int64)
    text = torch.tensor([[0, 1, 2, 0, 1, 0]])
    axes = text.expand(3, 1, 6)
    packed = ForwardContext({"input_ids": ids, "position_ids": torch.stack([text, *axes])}, None)
    assert packed.num_requests == 3
    assert torch.unique(packed.request, return_counts=True)[1].tolist() == [3, 2, 1]
    assert packed.position.tolist() == text[0].tolist()
    # without positions in the text Transformers' own masks don't tell sequences apart either
    alone = ForwardContext({"input_ids": ids, "position_ids": axes}, None)
    assert alone.num_requests == 1


def test_positions_in_sequences_that_are_told_apart_by_their_lengths_alone() -> None:
    ids = torch.zeros((1, 8), dtype=torch.int64)
    ends = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    packed = ForwardContext({"input_ids": ids, "cu_seq_lens_q": ends}, None)
    assert packed.valid.tolist() == [True] * 6 + [False] * 2
    assert packed.position[packed.valid].tolist() == [0, 1, 2, 0, 1, 0]


def test_token_sources() -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64)
    assert context(input_ids=ids).source(2) is None
    assert context(source="sequence", input_ids=ids).source(2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert context(source="sequence", input_ids=ids[:3]).source(2).tolist() == [0, 0, 0, 0, 1, 1]
    rows = torch.tensor([1, 0, 1, 0])
    assert context(source=rows, input_ids=ids).source(2).tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    every = lambda b, n, d: torch.arange(b * n, device=d).view(b, n) % 2  # noqa: E731
    assert context(source=every, input_ids=ids).source(2).tolist() == [0, 1] * 4
    with pytest.raises(ValueError, match=r"token_source must have shape .*got \[4\]"):
        context(source=rows, input_ids=ids[:3]).source(2)


def test_modalities_from_token_types_or_placeholder_ids() -> None:
    class Config:
        image_token_id, video_token_id = 9, 8

    ids = torch.tensor([[1, 9, 9, 8]])
    found = context(Config(), input_ids=ids).modality
    assert {m: t.tolist() for m, t in found.items()} == {
        "image": [False, True, True, False],
        "video": [False, False, False, True],
    }
    kinds = torch.tensor([[0, 0, 1, 2, 3]])
    mask = torch.ones_like(kinds)
    found = context(Config(), input_ids=ids, mm_token_type_ids=kinds, attention_mask=mask).modality
    assert found["image"].tolist() == [False, True, False, False]
    assert found["audio"].tolist() == [False, False, False, True]
    # types of the prompt alone, which a decode step still carries
    stale = context(
        Config(), input_ids=ids[:, :1], mm_token_type_ids=kinds, attention_mask=mask[:, :2]
    )
    assert not stale.modality["image"].any()


def test_drop_first_drops_image_tokens_before_text() -> None:
    model = model_of("qwen3_vl_moe")
    before = fingerprint(model)
    given = tiny_models.inputs()
    image = torch.zeros_like(given["input_ids"])
    image[:, 4:16] = 1
    given["mm_token_type_ids"] = image
    image_rows = image.flatten().bool()
    chosen = next(iter(choices(model, given).values()))[0]
    lost: dict[str, Tensor] = {}
    for first in ("", "image", "text"):
        with attach(model, CAP.replace(drop_first=first)) as pace:
            kept = kept_slots(pace)
            output(model, given)
        lost[first] = ~kept[0]
    assert lost["image"][image_rows].sum() > lost[""][image_rows].sum()
    assert lost["text"][~image_rows].sum() > lost[""][~image_rows].sum()
    assert lost["image"].sum() == lost["text"].sum() == lost[""].sum() > 0
    for e in chosen.unique().tolist():
        dropped, used = (chosen == e) & lost["image"], (chosen == e) & ~lost["image"]
        # an expert that had to drop a text token computes no image token
        assert not (dropped[~image_rows].any() and used[image_rows].any())
    assert fingerprint(model) == before


def test_a_modality_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="drop_first"):
        attach(model_of("mixtral"), CAP.replace(drop_first="audio"))
    attach(model_of("qwen3_vl_moe"), CAP.replace(drop_first="image")).detach()


def test_phase_prefill_leaves_decode_steps_alone() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs(pad=5)
    kwargs: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for phase, capped in (("all", 5), ("prefill", 1)):
        with attach(model, CAP.replace(phase=phase)) as pace:
            model.generate(**given, **kwargs)
            for stats in pace.stats().layers:
                assert (stats.forwards, stats.capped_forwards) == (5, capped)


def test_small_forwards_are_left_alone() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs()
    want = output(model, given)
    # 48 tokens x 2 / 8 experts = 12 a expert
    for enough, capped in ((12, 1), (12.5, 0), ("auto", 1), (64, 0)):
        with attach(model, CAP.replace(min_expert_load=enough)) as pace:
            same = torch.equal(output(model, given), want)
            assert pace.stats().layers[0].capped_forwards == capped
            assert same == (not capped)


def test_protect_first_keeps_the_first_tokens_of_every_sequence() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs(pad=5)
    policy = CAP.replace(protect_first=4, capacity_factor=0.5)
    with attach(model, policy) as pace:
        inputs: list[Any] = []
        pace.watch(lambda layer, given, assignment: inputs.append(given))
        output(model, given)
    high = (inputs[0].token_priority > 0).view(2, 24)
    assert high[0, 5:9].all()  # after the padding of row 0
    assert high[1, :4].all()
    assert high[0, 9:].sum() == high[1, 4:].sum() == 0


def test_own_device_extras_and_source_pools_need_to_know_where_tokens_live() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs(batch=4, length=12)
    place = ExpertPlacement.contiguous(8, 4)
    source = {"token_source": "sequence"}
    with attach(model, "capacity_factor=1,pool=source,min_expert_load=0", place, **source) as pace:
        output(model, given)
        stats = pace.stats().layers[0]
        assert stats.dropped > 0
    policy = "capacity_factor=1,expand=own_device,min_expert_load=0"
    with attach(model, policy, 4, token_source=torch.tensor([3, 2, 1, 0])) as pace:
        counter, _ = counted(model, given)
        stats = pace.stats().layers[0]
        name = pace.layers[0] + ".experts"
    assert stats.extras > 0
    assert counter.rows(name).tolist() == stats.expert_loads_after


def test_random_drops_differ_between_forwards_and_follow_the_seed() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs()

    def runs(seed: int) -> list[Tensor]:
        with attach(model, CAP.replace(keep="random", seed=seed)):
            return [output(model, given) for _ in range(2)]

    a, b, c = runs(0), runs(0), runs(1)
    assert all(map(torch.equal, a, b))
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[0], c[0])


def test_inner_models_can_be_called_on_their_own() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs(pad=5)
    with attach(model, CAP) as pace:
        model.model(**given)
        assert pace.stats().layers[0].tokens == 43
        pace.reset_stats()
        model.model(given["input_ids"], given["attention_mask"])  # by position
        assert pace.stats().layers[0].tokens == 43


def test_a_static_cache_has_masks_of_four_dimensions() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs(pad=5)
    kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    kwargs |= {"cache_implementation": "static", "disable_compile": True}
    want = model.generate(**given, **kwargs)
    with attach(model) as pace:
        assert torch.equal(model.generate(**given, **kwargs), want)
        assert pace.stats().layers[0].tokens == 43 + 3 * 2


def test_experts_that_see_only_some_tokens() -> None:
    """ernie4_5_vl_moe gives text and vision tokens to experts of their own."""
    model = model_of("ernie4_5_vl_moe")
    given = tiny_models.inputs(pad=5)
    kinds = torch.zeros_like(given["input_ids"])
    kinds[:, 8:15] = 1
    with attach(model) as pace:
        for name in ("moe_mm_token_type_ids", "mm_token_type_ids"):
            try:
                with torch.no_grad():
                    model(**given, **{name: kinds})
            except TypeError:
                continue
        stats = {s.name: s for s in pace.stats().layers}
    text = [s for n, s in stats.items() if "text_moe" in n]
    vision = [s for n, s in stats.items() if "vision_moe" in n]
    assert text
    assert vision
    assert vision[0].tokens % 14 == 0
    assert vision[0].tokens > 0


def test_a_policy_in_the_config_survives_saving_and_switches_nothing_on(tmp_path: Path) -> None:
    model, given = tiny_models.build("olmoe"), tiny_models.inputs()
    assert load_policy(model) is None
    want = output(model, given)
    policy = CapacityPolicy(capacity_factor=1.25, drop_first=("image", "video"), min_expert_load=0)
    save_policy(model, policy)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert load_policy(loaded) == policy
    assert torch.equal(output(loaded, given), want)
    assert '"version": 1' in (tmp_path / "config.json").read_text()
    save_policy(loaded, policy.replace(drop_first=()))
    with attach(loaded, "config") as pace:
        assert pace.policy.capacity_factor == 1.25
    loaded.config.capacity_policy["version"] = 2
    with pytest.raises(ValueError, match="must be 1, got 2"):
        load_policy(loaded)
    save_policy(loaded, None)
    assert load_policy(loaded) is None


def test_scores_of_a_half_precision_router_are_computed_in_float32() -> None:
    model = tiny_models.build("mixtral", dtype=torch.bfloat16)
    given = tiny_models.inputs()
    seen: list[Any] = []
    with attach(model, CAP) as pace:
        assert [s.scoring for s in pace.support] == ["softmax"] * len(pace.support)
        pace.watch(lambda layer, given, assignment: seen.append(given))
        output(model, given)
        assert pace.stats().layers[0].dropped > 0
    scores = seen[0].scores
    assert scores.dtype == torch.float32
    assert (scores != scores.bfloat16().float()).float().mean() > 0.9  # not rounded


class Wrapper(torch.nn.Module):
    """A model around a model, whose forward doesn't say what it takes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapped_model_tells_its_tokens_all_the_same() -> None:
    given = tiny_models.inputs(pad=5)
    wrapper = Wrapper(model_of("olmoe")).eval()
    with attach(wrapper, CAP) as pace:
        wrapper(given["input_ids"], given["attention_mask"])
        assert [s.tokens for s in pace.stats().layers] == [43] * 3


def test_a_forward_that_failed_leaves_no_tokens_behind() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs(pad=5)
    with attach(model, CAP) as pace:
        want = output(model, given)
        with pytest.raises(IndexError):
            model(given["input_ids"][:1] + 10_000)
        assert pace._state.context is None
        assert torch.equal(output(model, given), want)


def test_a_copy_of_an_attached_model_runs_itself() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs(pad=5)
    with attach(model, CAP) as pace:
        want = output(model, given)
        counted = pace.stats().to_dict()
        twin = copy.deepcopy(model)
        assert torch.equal(output(twin, given), want)
        with torch.no_grad():
            for weight in twin.parameters():
                weight.zero_()
        assert not torch.equal(output(twin, given), want)
        assert pace.stats().to_dict() == counted
        assert torch.equal(output(model, given), want)
    assert not torch.equal(output(model, given), want)


def test_statistics_go_in_and_out_of_inference_mode_and_keep_no_graph() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs()
    with torch.inference_mode():
        pace = attach(model, CAP.replace(keep="random"))
    with pace:
        for policy in (pace.policy, CAP, None):
            pace.policy = policy
            with torch.inference_mode():
                pace.reset_stats()
                model(**given)
            logits = model(**given).logits  # with gradients, as scripts do that forget no_grad
            assert logits.requires_grad
            assert [s.forwards for s in pace.stats().layers] == [2] * 3
            assert not pace._layers[0].loads._mass.requires_grad


def test_idle_decode_steps_cost_next_to_nothing() -> None:
    """Counted in torch operations, which no other load on the machine changes."""
    model, given = model_of("mixtral"), tiny_models.inputs(batch=1, length=16)
    steps = 128

    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def operations() -> int:
        parameters = inspect.signature(model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        cache, mask = model(**given, use_cache=True)[name], given["attention_mask"]
        with Operations() as counter:
            for _ in range(steps):
                mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
                token = {"input_ids": given["input_ids"][:, :1], "attention_mask": mask}
                model(**token, **{name: cache}, use_cache=True)
        return counter.count

    untouched = operations()
    for policy in (None, "capacity_factor=1.5"):
        with attach(model, policy) as pace:
            assert operations() < 1.02 * untouched
            assert pace.stats().layers[0].forwards == steps + 1


def test_router_logits_that_a_user_asks_for_are_the_models_own() -> None:
    model, given = model_of("olmoe"), tiny_models.inputs()
    with torch.no_grad():
        want = model(**given, output_router_logits=True).router_logits
        with attach(model):
            got = model(**given, output_router_logits=True).router_logits
    assert all(map(torch.equal, got, want))
    assert len(got) == 3


def test_packed_sequences_of_continuous_batching() -> None:
    """One row of 8 places: a decode step, a prompt of 4, a decode step, and filler."""
    ends = torch.tensor([0, 1, 5, 6, 6], dtype=torch.int32)
    positions = torch.tensor([[7, 0, 1, 2, 3, 9, 0, 0]])
    ids = torch.zeros(1, 8, dtype=torch.int64)
    mixed = {"input_ids": ids, "position_ids": positions, "cu_seq_lens_q": ends, "max_length_q": 4}
    packed = context(**mixed, attention_mask=torch.zeros(1, 1, 8, 40), cache=Cached(0))
    assert packed.valid.tolist() == [True] * 6 + [False] * 2
    assert packed.request.tolist()[:6] == [0, 1, 1, 1, 1, 2]
    assert packed.position.tolist() == positions[0].tolist()
    assert packed.decode.tolist()[:6] == [True] + [False] * 4 + [True]
    assert packed.num_requests == 4
    assert not packed.is_decode
    assert context(**{**mixed, "max_length_q": 1}, cache=Cached(0)).is_decode


def test_continuous_batching_counts_its_tokens_and_keeps_requests_apart() -> None:
    model = tiny_models.build("olmoe")
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    sizes = (10, 13, 16)
    ids = [tiny_models.inputs(batch=1, length=n, seed=n)["input_ids"][0] for n in sizes]
    lists = [one.tolist() for one in ids]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)

    def generated(asked: list[list[int]]) -> list[list[int]]:
        results = model.generate_batch(
            inputs=asked, generation_config=config, continuous_batching_config=batching
        )
        found = {tuple(r.prompt_ids): r.generated_tokens for r in results.values()}
        return [found[tuple(one)] for one in asked]

    want = generated(lists)
    with attach(model) as pace:
        assert generated(lists) == want
        # the prompts in one forward, then 3 steps of 3 requests
        assert [s.tokens for s in pace.stats().layers] == [39 + 9] * 3
        pace.policy = CAP.replace(pool="request", capacity_factor=0.75)
        together = generated(lists)
        assert pace.stats().layers[0].dropped > 0
        assert generated(lists[1:2]) == together[1:2]
