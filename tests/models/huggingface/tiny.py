"""Tiny models and tokens."""

from typing import Any

import torch
from torch import Tensor

from linrope.models.huggingface import LinRopeCache, LinRopeConfig, LinRopeForCausalLM

HYBRID: dict[str, Any] = {"full_attention_interval": 2}
# What layers can be: of one kind, of both, and with all options.
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"decay": None},
    "hybrid": HYBRID,
    "decay": {"decay": "retnet", "feature_map": "hedgehog", "rope_order": "before", "attention_bias": True},
    "gated": {
        "forget_gate": {"longest": 64}, "selective_rope": True, "short_conv": 4, "qk_norm": True, "decay": "learned",
    },
    "trapezoid": {
        "num_key_value_heads": 4, "num_value_heads": 8, "qk_norm": True, "trapezoid": True,
    },
    "delta rule": {"erase_gate": {"name": "tied", "largest": 2}},
    "kimi delta attention": {"erase_gate": "tied", "forget_gate": {"per": "feature", "bound": 5}},
    "plain": {"feature_map": "identity", "normalize": False, "gate": False, "num_key_value_heads": 4},
}  # fmt: skip


def config(**options: Any) -> LinRopeConfig:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LinRopeConfig(**(sizes | heads | {"pad_token_id": 0, "initializer_range": 0.3} | options))


def causal_lm(**options: Any) -> LinRopeForCausalLM:
    """In float64, where what differs by rounding alone differs by nothing."""
    torch.manual_seed(0)
    return LinRopeForCausalLM(config(**options)).to(torch.get_default_device(), torch.float64).eval()


def tokens(b: int, n: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 50, (b, n), generator=generator, device="cpu").to(torch.get_default_device())


def filled_cache(model: LinRopeForCausalLM, ids: Tensor, **options: Any) -> LinRopeCache:
    """The cache of a model that has read the tokens."""
    cache = LinRopeCache(model.config)
    with torch.no_grad():
        model(ids, cache=cache, **options)
    return cache


def checkpoint_activations(model: LinRopeForCausalLM, options: dict[str, Any]) -> None:
    """transformers has renamed it, after 5.20."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
