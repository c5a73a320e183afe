"""A mid-size random model whose routers are skewed as wanted, for timings without a download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def random_model(
    hidden: int = 768,
    intermediate: int = 512,
    layers: int = 6,
    experts: int = 32,
    k: int = 4,
    hot: int = 16,
    share: float = 0.8,
    vocabulary: int = 4096,
    seed: int = 0,
) -> Any:
    """A mid-size random OLMoE whose routers send `share` of their load to the first `hot` experts.

    One coordinate of every embedding is the same and stays so, which lets a router have a constant
    preference; how strong it has to be is found layer by layer on random tokens.
    """
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(seed)
    config = OlmoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        num_experts=experts,
        num_experts_per_tok=k,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    model: Any = OlmoeForCausalLM(config).eval()
    tokens = torch.randint(1, vocabulary, (2, 128))
    with torch.inference_mode(False), torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.2
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(std=hidden**-0.5)
            layer.mlp.gate.weight[:, 0] = 0.0
            # else what all tokens of a random sequence have in common decides alone
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.experts.down_proj.mul_(0.1)
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.experts.down_proj[:, 0] = 0.0
        for layer in model.model.layers:
            _prefer(model, layer.mlp.gate, tokens, slice(0, hot), share, k)
    return model


def random_model_named(name: str) -> Any:
    """The model of a name: "random", or "random:hidden,intermediate,experts,k,layers".

    Raises:
        ValueError: if it is neither.
    """
    if name == "random":
        return random_model()
    sizes = name.removeprefix("random:").split(",")
    if len(sizes) == 5 and all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        hidden, intermediate, experts, k, layers = map(int, sizes)
        if hidden % 64 == 0 and k <= experts // 2:
            return random_model(hidden, intermediate, layers, experts, k, experts // 2)
    raise ValueError(
        f"model {name!r} is not allowed: it is random, or random:hidden,intermediate,experts,k,"
        "layers with hidden a multiple of 64 and k at most half of the experts."
    )


def _prefer(model: Any, gate: Any, tokens: Tensor, hot: slice, share: float, k: int) -> None:
    """Give a router the constant preference that sends `share` of its load to the `hot` experts."""
    seen: list[Tensor] = []
    hook = gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    model.model(input_ids=tokens)
    hook.remove()
    logits = seen[0] @ gate.weight.T
    is_hot = torch.zeros(logits.shape[1])
    is_hot[hot] = 1
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        chosen = torch.topk(logits + middle * is_hot, k, dim=-1).indices
        low, high = (middle, high) if float(is_hot[chosen].mean()) < share else (low, middle)
    gate.weight[hot, 0] = high / seen[0][:, 0].mean()
