"""Reordered checkpoints of every architecture compute what the original did."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from model_runs import choices, output
from safetensors.torch import load_file, save_file

from paceline.analysis.expert_map import ExpertMap
from paceline.checkpoint.folder import open_checkpoint
from paceline.checkpoint.reorder import ORDER_FILE, reorder

transformers.logging.set_verbosity_error()
# attach refuses these too; llama4 and switch_transformers can be reordered all the same
REFUSED = {
    "jetmoe": "no tensor of a gate or router",
    "nllb_moe": "which of them a plan is for",
    "vitpose_backbone": "no tensor of a gate or router",
}
# numbered experts, stacked ones, blocks of rows, groups, experts that compute nothing, a refusal
FIRST_TIER = ("mixtral", "gpt_oss", "dbrx", "deepseek_v3", "longcat_flash", "jetmoe")
WITHOUT_GROUPS = {"deepseek_v2"}  # its topk_method is greedy


def saved(name: str, folder: Path, **overrides: Any) -> Path:
    model = tiny_models.build(name, **overrides)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def loaded(name: str, folder: Path) -> Any:
    model, info = tiny_models.model_class(name).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    return model.eval()


def shuffled(layers: int, experts: int, groups: int, devices: int = 4) -> list[ExpertMap]:
    """An order a layer, each another one, that moves groups and experts inside groups."""
    rng = np.random.default_rng(layers * 100 + experts)
    maps = []
    for _ in range(layers):
        blocks = np.arange(experts).reshape(groups, -1)[rng.permutation(groups)]
        slots = [expert for block in blocks for expert in rng.permutation(block).tolist()]
        maps.append(ExpertMap(tuple(slots), experts, devices))
    assert any(m.slots != tuple(range(experts)) for m in maps)
    return maps


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST_TIER else pytest.param(name, marks=pytest.mark.full)
        for name in tiny_models.architectures()
    ],
)
def test_architecture(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(name, tmp_path / "model"))
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            reorder(checkpoint, [ExpertMap.contiguous(8, 4)], tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    layers = checkpoint.layers()
    maps = shuffled(len(layers), layers[0].num_experts, checkpoint.config.expert_groups)
    reorder(checkpoint, maps, tmp_path / "out")
    before, after = loaded(name, tmp_path / "model"), loaded(name, tmp_path / "out")
    given = tiny_models.inputs_for(before, pad=5)
    assert torch.allclose(output(before, given), output(after, given), rtol=0, atol=1e-5)
    if name in ("llama4", "switch_transformers"):
        return  # their experts aren't called with the chosen ids
    valid = given["attention_mask"].flatten().bool()
    was, now = choices(before, given), choices(after, given)
    assert list(was) == list(now)
    checked = 0
    for (module, (old, _)), (new, _) in zip(was.items(), now.values(), strict=True):
        if not old[valid].numel() or old.shape[0] != len(valid):
            continue
        # layers run in the order of the checkpoint's, some of them twice
        fits = [
            m
            for m in maps
            if torch.equal(_former(new[valid], m).sort(1).values, old[valid].sort(1).values)
        ]
        assert fits, module
        checked += 1
    assert checked or name == "ernie4_5_vl_moe"


def _former(ids: torch.Tensor, order: ExpertMap) -> torch.Tensor:
    """What experts were called before."""
    table = torch.tensor([*order.slots, *range(order.num_experts, 64)])
    return table[ids]


def test_routers_that_look_tokens_up(tmp_path: Path) -> None:
    """A table of expert ids by token is mapped, not permuted."""
    model = saved("deepseek_v4", tmp_path / "model", mlp_layer_types=["hash_moe", "moe", "moe"])
    checkpoint = open_checkpoint(model)
    assert "values" in checkpoint.layers()[0].tensors.values()
    reorder(checkpoint, shuffled(3, 8, 1), tmp_path / "out")
    before, after = loaded("deepseek_v4", model), loaded("deepseek_v4", tmp_path / "out")
    given = tiny_models.inputs()
    assert torch.allclose(output(before, given), output(after, given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_models.build("mixtral", dtype=dtype)
    model.save_pretrained(tmp_path / "model")
    order = shuffled(3, 8, 1)
    reorder(open_checkpoint(tmp_path / "model"), order, tmp_path / "out")
    was = load_file(tmp_path / "model" / "model.safetensors")
    now = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(was) == sorted(now)
    for place, former in enumerate(order[1].slots):
        name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
        assert torch.equal(now[name.format(place)], was[name.format(former)])
        router = "model.layers.1.block_sparse_moe.gate.weight"
        assert torch.equal(now[router][place], was[router][former])


def quantised(folder: Path, fused: bool) -> dict[str, torch.Tensor]:
    """The tensors of a layer in FP8 with scales by block, or in MXFP4, as hub checkpoints name
    them: made here, since no small one is at hand."""
    rng = torch.Generator().manual_seed(0)
    fp8, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

    def raw(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=rng, dtype=torch.uint8)

    block = "model.layers.0.mlp"
    if fused:
        tensors = {
            f"{block}.experts.gate_up_proj_blocks": raw(4, 16, 2, 16),
            f"{block}.experts.gate_up_proj_scales": raw(4, 16, 2).view(e8m0),
            f"{block}.experts.gate_up_proj_bias": torch.randn(4, 16, generator=rng),
            f"{block}.router.weight": torch.randn(4, 8, generator=rng),
            f"{block}.router.bias": torch.randn(4, generator=rng),
        }
    else:
        tensors = {f"{block}.gate.weight": torch.randn(4, 8, generator=rng)}
        for e in range(4):
            tensors[f"{block}.experts.{e}.up_proj.weight"] = raw(8, 8).view(fp8)
            tensors[f"{block}.experts.{e}.up_proj.weight_scale_inv"] = torch.randn(1, 1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    return tensors


@pytest.mark.parametrize("fused", [False, True])
def test_scales_and_packed_weights_move_with_their_expert(fused: bool, tmp_path: Path) -> None:
    was = quantised(tmp_path / "model", fused)
    slots = (2, 0, 3, 1)
    reorder(open_checkpoint(tmp_path / "model"), [ExpertMap(slots, 4, 2)], tmp_path / "out")
    now = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(now) == sorted(was)

    def bits(tensor: torch.Tensor) -> list[Any]:
        return (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).tolist()

    for name, tensor in was.items():
        assert now[name].dtype == tensor.dtype
        for place, former in enumerate(slots):
            if ".experts." in name and not fused:
                if f".experts.{former}." in name:
                    moved = name.replace(f".experts.{former}.", f".experts.{place}.")
                    assert bits(now[moved]) == bits(tensor)
            else:
                assert bits(now[name][place]) == bits(tensor[former])


def test_files_beside_the_weights(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"not in the new order")
    (model / "original").mkdir()
    maps = shuffled(3, 8, 1)
    told: list[tuple[int, int, str]] = []
    reorder(open_checkpoint(model), maps, tmp_path / "out", lambda *step: told.append(step))
    out = tmp_path / "out"
    shards = sorted(f.name for f in model.glob("*.safetensors"))
    assert len(shards) > 1
    assert [step[:2] for step in told] == [(i + 1, len(shards)) for i in range(len(shards))]
    assert sorted(f.name for f in out.iterdir()) == sorted(
        [f.name for f in model.iterdir() if f.name not in ("pytorch_model.bin", "original")]
        + [ORDER_FILE]
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        assert name in load_file(out / shard)
    assert (
        index["metadata"]
        == json.loads((model / "model.safetensors.index.json").read_text())["metadata"]
    )
    order = json.loads((out / ORDER_FILE).read_text())["original_expert_of_place"]
    assert list(order.values()) == [list(m.slots) for m in maps]
    with pytest.raises(ValueError, match="was reordered before"):
        reorder(open_checkpoint(out), maps, tmp_path / "again")


def test_the_new_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved("olmoe", tmp_path / "model"))
    last = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(Exception, match=r".+"):
        reorder(checkpoint, [ExpertMap((1, 0, *range(2, 8)), 8, 4)], tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_layers_for_multi_token_prediction_stay(tmp_path: Path) -> None:
    """They lie after the last hidden layer, and no placement speaks of them."""
    model = saved("deepseek_v3", tmp_path / "model")
    file = sorted(model.glob("*.safetensors"))[0]
    extra = {
        f"model.layers.3.mlp.experts.{e}.up_proj.weight": torch.full((2, 2), e * 1.0)
        for e in range(8)
    }
    extra["model.layers.3.mlp.gate.weight"] = torch.randn(8, 32)
    save_file(extra, model / "mtp.safetensors")
    assert file.exists()
    checkpoint = open_checkpoint(model)
    assert [layer.name for layer in checkpoint.layers()] == [
        "model.layers.1.mlp",
        "model.layers.2.mlp",
    ]
    reorder(checkpoint, shuffled(2, 8, 2), tmp_path / "out")
    now = load_file(tmp_path / "out" / "mtp.safetensors")
    assert sorted(now) == sorted(extra)
    assert all(torch.equal(now[name], extra[name]) for name in extra)


def test_what_does_not_fit(tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path / "model")
    checkpoint = open_checkpoint(model)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="keep them whole"):
        reorder(checkpoint, [ExpertMap((0, 4, 1, 2, 3, 5, 6, 7), 8, 4)], out)
    with pytest.raises(ValueError, match="places 4 experts"):
        reorder(checkpoint, [ExpertMap.contiguous(4, 4)], out)
    with pytest.raises(ValueError, match="of 3 layers, the checkpoint has 2"):
        reorder(checkpoint, [ExpertMap.contiguous(8, 4)] * 3, out)
    with pytest.raises(ValueError, match="1 replicas"):
        reorder(checkpoint, [ExpertMap((*range(8), 0), 8, 4)], out)
    out.mkdir()
    with pytest.raises(ValueError, match="exists"):
        reorder(checkpoint, [ExpertMap.contiguous(8, 4)], out)
    with pytest.raises(ValueError, match="there is no folder"):
        reorder(checkpoint, [ExpertMap.contiguous(8, 4)], tmp_path / "no" / "out")
    config = model / "config.json"
    named = json.loads(config.read_text())
    named["quantization_config"] = {"ignore": ["model.layers.1.mlp.experts.3.up_proj"]}
    config.write_text(json.dumps(named))
    with pytest.raises(ValueError, match="names single experts"):
        reorder(open_checkpoint(model), [ExpertMap.contiguous(8, 4)], tmp_path / "other")


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json can't be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json can't be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no .safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="is no safetensors file"):
        open_checkpoint(tmp_path)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="dense model"):
        open_checkpoint(tmp_path).layers()


def test_unknown_forms_are_refused(tmp_path: Path) -> None:
    """A router packed the other way round, experts with gaps, a strange tensor among them."""
    (tmp_path / "config.json").write_text("{}")
    expert = {f"layers.0.mlp.experts.{e}.w.weight": torch.ones(6, 6) for e in range(4)}
    router = {"layers.0.mlp.gate.weight": torch.ones(4, 6)}
    for tensors, said in (
        (expert, "no tensor of a gate"),
        (expert | {"layers.0.mlp.gate.qweight": torch.ones(6, 4)}, "no tensor of a gate"),
        (expert | router | {"layers.0.mlp.gate.packed": torch.ones(6, 4)}, "form is not known"),
        (expert | router | {"layers.0.mlp.experts.odd": torch.ones(7, 6)}, "form is not known"),
        ({k: v for k, v in expert.items() if ".2." not in k} | router, "how many experts"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=said):
            open_checkpoint(tmp_path).layers()


def test_folder_can_be_read_by_others(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved("olmoe", tmp_path / "model"))
    reorder(checkpoint, [ExpertMap.contiguous(8, 4)], tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
