"""The capped layers of an SGLang worker: found, tried, and checked against SGLang's settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from torch import Tensor, nn

from paceline.engines.scoring import find_rule
from paceline.engines.serving.batch import Batch
from paceline.engines.serving.capped_layer import CappedLayer, Ranks, slots_for
from paceline.engines.serving.capped_model import CappedModel
from paceline.engines.serving.environment import (
    ACCEPT_SHARED_BUDGET,
    CALIBRATION,
    DEVICES,
    Settings,
)
from paceline.engines.serving.kept_rows import run_pairs
from paceline.engines.serving.stand_ins import StandIns, fingerprints
from paceline.engines.sglang import tokens
from paceline.engines.sharing import shares_budget, warn_of_shared_cache
from paceline.placement import ExpertPlacement
from paceline.policy import CapacityPolicy
from paceline.settings import read_placement
from paceline.stand_ins.calibration_file import Calibration
from paceline.stand_ins.identity import LayerIdentity

NOT_SUPPORTED = (
    "enable_dp_attention", "enable_two_batch_overlap", "enable_single_batch_overlap",
    "enable_eplb", "enable_torch_compile",
)  # fmt: skip
"""Switches of SGLang under which a layer's rows, ids or experts are others than those read here."""

_ROUNDINGS = 8  # by which experts on kept pairs may differ from those on all pairs


class SglangLayer(CappedLayer):
    """The cap behind one of SGLang's routers."""

    slots = 0  # ids per token after expansion, 0 if the policy doesn't expand

    def set_policy(self, policy: CapacityPolicy | None) -> None:
        """Put a checked policy in force; None: nothing is dropped or counted."""
        super().set_policy(policy)
        self.slots = 0 if policy is None else slots_for(policy, self.units, self.k)

    def choose(self, result: Any, hidden: Tensor, logits: Tensor) -> Any:
        """Return the output of SGLang's router with what the cap drops marked -1."""
        if self.policy is None:
            return result
        weights, ids = result.topk_weights.clone(), result.topk_ids.clone()
        if self.slots:
            weights, ids = self.expand(weights, ids, hidden, logits, max(self.slots, self.k))
        else:
            self.cap(weights, ids, hidden, logits)
        return result._replace(topk_weights=weights, topk_ids=ids)

    def _batch(self, rows: int) -> Batch:
        return tokens.current_batch(rows)

    def _prompt_lengths(self, requests: int) -> Tensor:
        return tokens.prompt_lengths(requests)


class SglangModel(CappedModel):
    """The capped layers of the model that one SGLang worker runs.

    Args:
        runner: SGLang's ModelRunner, whose weights are loaded.
        rank: of the worker among those of its tensor-parallel group.

    Raises:
        ValueError: if a layer, a setting or the plan excludes a cap.
    """

    engine = "paceline in SGLang"
    log = logging.getLogger("sglang.paceline")

    def __init__(self, runner: Any, settings: Settings, rank: int) -> None:
        self._args = runner.server_args
        _check_engine(runner)
        pairs = moe_layers(runner.model)
        if settings.plan is not None:
            experts, ks = [m.num_experts for _, m in pairs], [r.topk_config.top_k for r, _ in pairs]
            settings.plan.check_model(experts, ks, replicates=True)
        layers = [_capped(*pair, index, settings) for index, pair in enumerate(pairs)]
        super().__init__(layers, settings, rank)
        self.by_id = {pair[0].layer_id: own for pair, own in zip(pairs, layers, strict=True)}
        for router, experts in pairs:
            try_experts(experts, router.topk_config.top_k)
        if settings.calibration_folder is not None:
            _load_stand_ins(settings.calibration_folder, runner, pairs, layers)
        self.kernels = {"moe_forward_native": "one row per kept slot"}
        self.layers[0].warns = not self.accepted and rank == 0
        self.set_policies(self.start_policies())
        self.warm_up()
        if rank == 0:
            self.say_what_is_capped()
            if self.shares_cache() and not self.accepted and any(p.caps for p in settings.policies):
                warn_of_shared_cache("say --disable-radix-cache")

    def shares_cache(self) -> bool:
        """Return True if SGLang's radix cache is on."""
        return not self._args.disable_radix_cache

    def request_ids(self) -> list[str] | None:
        """Return SGLang's names of the running forward's requests, None if it has none."""
        return tokens.request_ids()

    def check_settings(self, policies: Sequence[CapacityPolicy]) -> None:
        """Refuse settings of SGLang that contradict a policy of a layer."""
        capping = [policy for policy in policies if policy.caps]
        if capping and self._args.enable_deterministic_inference:
            raise ValueError(
                "--enable-deterministic-inference contradicts a cap, which depends on the batch: "
                "use one of the two."
            )
        shared = next((policy for policy in capping if shares_budget(policy)), None)
        if shared is not None and self.shares_cache() and not self.accepted:
            raise ValueError(
                f"pool={shared.pool} with the radix cache lets one user's batch change what "
                "another reads from the cache: say pool=request, --disable-radix-cache, or accept "
                f"it with {ACCEPT_SHARED_BUDGET}=1."
            )
        mixed = self._args.enable_mixed_chunk
        if mixed and any(policy.phase == "prefill" for policy in capping):
            raise ValueError(
                "phase=prefill needs to know which rows decode, which --enable-mixed-chunk mixes "
                "into prompts: use one of the two."
            )


def moe_layers(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the router and the experts of every MoE layer, in order.

    Raises:
        ValueError: if there is none, or one can't be capped.
    """
    routers = {module.layer_id: module for module in model.modules() if isinstance(module, TopK)}
    experts = {m.layer_id: m for m in model.modules() if isinstance(m, FusedMoE)}
    if not experts:
        raise ValueError(
            f"{type(model).__name__} has no MoE layer that could be capped: serve it without a "
            "policy."
        )
    for number, layer in experts.items():
        reason = out_of_reach(routers.get(number), layer)
        if reason:
            raise ValueError(
                f"layer {layer.layer_name or number} is out of the cap's reach: {reason}."
            )
    return [(routers[number], experts[number]) for number in sorted(experts)]


def out_of_reach(router: Any, experts: Any) -> str | None:
    """Return the reason why a layer can't be capped; None if it can."""
    if router is None:
        return "it has no router of SGLang's (TopK)"
    if experts.num_fused_shared_experts or router.topk_config.num_shared_topk_slots:
        return "its shared experts are fused with the routed ones (--disable-shared-experts-fusion)"
    if experts.moe_runner_config.apply_router_weight_on_input:
        return "it applies weights to the inputs of experts"
    method = type(experts.quant_method).__name__
    if method != "UnquantizedFusedMoEMethod":
        return f"its experts run by {method}, which was never tried"
    return None


def run_kept(
    native: Any, layer: Any, x: Tensor, output: Any, config: Any, capped: CappedLayer | None = None
) -> Tensor:
    """Run SGLang's native experts on the kept pairs alone; they know no dropped slots.

    Args:
        native: `moe_forward_native` as SGLang has it.
        x: [tokens, hidden].
        output: of the router, ids [tokens, k] negative where dropped or of another rank.
        capped: whose stand-ins are added; None: none are.
    """
    made = torch.empty_like(x)

    def experts(results: Tensor, hidden: Tensor, weights: Tensor, ids: Tensor) -> None:
        results.copy_(native(layer, hidden, StandardTopKOutput(weights, ids, None), config))

    run_pairs(experts, made, x, output.topk_weights, output.topk_ids, None)
    if capped is not None and capped.stand_ins is not None:
        capped.stand_ins.add(made, x)
    return made


def try_experts(layer: Any, k: int) -> None:
    """Compare a layer's experts on kept pairs with all pairs, dropped ones at weight 0.

    Raises:
        ValueError: if they differ by more than rounding.
    """
    rng, dtype = torch.Generator().manual_seed(0), layer.w13_weight.dtype
    x = torch.randn(24, layer.hidden_size, generator=rng).to(dtype)
    ids = torch.rand(24, layer.num_local_experts, generator=rng).topk(
        min(k, layer.num_local_experts)
    )
    weights = torch.rand(ids.indices.shape, generator=rng)
    dropped = torch.rand(ids.indices.shape, generator=rng) < 0.4
    dropped[0], dropped[1] = True, False
    weights = weights.masked_fill(dropped, 0)
    chosen, config = ids.indices.int(), layer.moe_runner_config
    native = fused_moe_native.moe_forward_native
    wanted = native(layer, x, StandardTopKOutput(weights, chosen, None), config)
    marked = StandardTopKOutput(weights, chosen.masked_fill(dropped, -1), None)
    got = native(layer, x, marked, config)
    known = torch.isfinite(wanted)
    error = (got[known].double() - wanted[known].double()).abs()
    most = _ROUNDINGS * torch.finfo(dtype).eps * wanted[known].double().abs().max()
    if not bool((error <= most).all()):
        raise ValueError(
            f"layer {layer.layer_name} is out of the cap's reach: with one row per kept slot its "
            f"outputs differ by {float(error.max()):.2g}."
        )


def _check_engine(runner: Any) -> None:
    args = runner.server_args
    if runner.device != "cpu":
        raise ValueError(
            f"SGLang on {runner.device} is not supported: the plugin has only ever run on a CPU."
        )
    for name in NOT_SUPPORTED:
        if getattr(args, name, False):
            raise ValueError(f"--{name.replace('_', '-')} is not supported with a policy.")
    if args.ep_num_redundant_experts or args.init_expert_location != "trivial":
        raise ValueError("experts in other places than in order are not supported with a policy.")
    if args.pp_size > 1:
        raise ValueError("pipeline parallelism is not supported with a policy.")


def _capped(router: Any, experts: Any, index: int, settings: Settings) -> SglangLayer:
    name, count = experts.layer_name or f"layer {experts.layer_id}", experts.num_experts
    ranks = experts.moe_ep_size
    named: ExpertPlacement | int | None = settings.devices
    if named is None and settings.plan is not None:
        named = settings.plan.placement_of(index)
    given = read_placement(named, count, name)
    if ranks > 1:
        real = ExpertPlacement.contiguous(count, ranks)
        if given is not None and given != real:
            raise ValueError(
                f"{DEVICES} or the plan places {count} experts on {given.num_devices} devices, "
                f"expert parallelism on {ranks} ranks: remove that setting."
            )
        given = real
    place = Ranks(experts.moe_ep_rank, ranks, 1, ranks > 1 or experts.moe_tp_rank == 0)
    shape = (name, router.topk_config.top_k, count)
    return SglangLayer(shape, index, given, place, _scoring_rule(router, experts))


def _load_stand_ins(
    folder: Path, runner: Any, pairs: list[tuple[Any, Any]], layers: list[SglangLayer]
) -> None:
    """Give every layer the stand-ins of its experts in this process.

    Raises:
        ValueError: if the calibration is of another model, or ranks split an expert.
    """
    calibration = Calibration.load(folder)
    modules, identities, local = dict(runner.model.named_modules()), [], []
    for number, (router, experts) in enumerate(pairs):
        if experts.moe_tp_size > 1:
            raise ValueError(f"{CALIBRATION} is not supported where ranks split experts.")
        path = next(name for name, module in modules.items() if module is experts)
        block = modules.get(path.rpartition(".")[0])
        gate, prints = fingerprints(block, experts.w13_weight, experts.w2_weight)
        if gate is None:
            raise ValueError(f"{CALIBRATION} is not supported: the router of {path} was not found.")
        first = experts.moe_ep_rank * experts.num_local_experts
        local.append(list(range(first, first + experts.num_local_experts)))
        known = calibration.layers[number].name if number < len(calibration.layers) else path
        identities.append(LayerIdentity(
            name=known, k=router.topk_config.top_k, num_experts=experts.num_experts, router=gate,
            experts=dict(zip(local[-1], prints, strict=True)),
        ))  # fmt: skip
    calibration.check_model(type(runner.model).__name__, identities)
    for layer, own, ids in zip(layers, calibration.layers, local, strict=True):
        layer.stand_ins = StandIns(own, ids, runner.dtype)


def _scoring_rule(router: Any, experts: Any) -> str | None:
    """Return the rule by which a router scores, as it was seen to weigh made-up tokens."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(64, experts.num_experts, generator=rng)
    hidden = torch.zeros(64, experts.hidden_size)
    made = router(hidden, logits.clone())
    rule, _ = find_rule(logits, made.topk_ids.long(), made.topk_weights, experts.num_experts)
    return rule
