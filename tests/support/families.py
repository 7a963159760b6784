"""Small models of the families that ``linrope.integrations.transformers`` knows, with weights that do something."""

import copy
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from linrope.integrations import transformers as linrope_transformers

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTENTION = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
_MAMBA = {
    "mamba_d_state": 24, "mamba_d_conv": 4, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_GATED_DELTA_NET = _ATTENTION | {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LATENT = _ATTENTION | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
_KIMI = {"linear_num_heads": 4, "linear_head_dim": 16}
_GLM_TEXT = _LATENT | _KIMI | {
    "q_lora_rank": 16, "qk_rope_head_dim": 0, "n_routed_experts": 4, "index_topk": 64, "index_head_dim": 8,
    "index_n_heads": 2, "index_kpool": 4, "hc_mult": 2, "num_hidden_layers": 4, "layer_types": None,
    "mlp_layer_types": None,
}  # fmt: skip
_GLM_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48,
    "projection_intermediate_size": 16,
}  # fmt: skip
_CONVOLUTIONS = _ATTENTION | {
    "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True,
}  # fmt: skip

# The configuration class and its arguments
_CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", {
        "num_heads": 6, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": 2,
    }),
    "bamba": ("BambaConfig", _ATTENTION | _MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", _ATTENTION | _MAMBA | {"mamba_d_ssm": 96, "mamba_rms_norm": True}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", _ATTENTION | _MAMBA | _EXPERTS | {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64,
    }),
    "nemotron_h": ("NemotronHConfig", {**_ATTENTION,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "ssm_state_size": 24, "mamba_num_heads": 6,
        "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16, "head_dim": 12, "num_hidden_layers": 4,
    }),
    "zamba2": ("Zamba2Config", _ATTENTION | {
        "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 24, "mamba_d_conv": 4, "mamba_expand": 2,
        "n_mamba_heads": 6, "mamba_ngroups": 2, "chunk_size": 16, "num_key_value_heads": 4,
    }),
    "minimax": ("MiniMaxConfig", _ATTENTION | _EXPERTS | {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 16, "head_dim": 12,
    }),
    "qwen3_next": ("Qwen3NextConfig", _GATED_DELTA_NET | _MIXTURE),
    "qwen3_5": ("Qwen3_5TextConfig", _GATED_DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _GATED_DELTA_NET | _MIXTURE),
    "qwen4_exp": ("Qwen4ExpTextConfig", _GATED_DELTA_NET | _MIXTURE | {
        "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 64, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid", "ple_layer_ids": [1],
        "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
    }),
    "lara_mini": ("LaraMiniConfig", _GATED_DELTA_NET | _MIXTURE | {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "sliding_window": 9,
    }),
    "olmo_hybrid": ("OlmoHybridConfig", _GATED_DELTA_NET | {
        "linear_num_key_heads": 4, "linear_value_head_dim": 32,
    }),
    "kimi_linear": ("KimiLinearConfig", _LATENT | _KIMI),
    "bailing_hybrid": ("BailingHybridConfig", _LATENT | {"head_dim": 16}),
    "glm5_next": ("Glm5NextConfig", {"text_config": _GLM_TEXT, "vision_config": _GLM_VISION}),
    "inkling": ("InklingTextConfig", _ATTENTION | {
        "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"], "head_dim": 12,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 12, "sliding_window_size": 9,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    }),
    "lfm2": ("Lfm2Config", _CONVOLUTIONS),
    "lfm2_moe": ("Lfm2MoeConfig", _CONVOLUTIONS | {
        "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }),
    "lfm3": ("Lfm3Config", _CONVOLUTIONS | {
        "layer_types": ["conv", "sliding_attention", "full_attention"], "head_dim": 12, "sliding_window": 9,
    }),
}  # fmt: skip
CONFIGURATIONS = {
    family: (kind, options)
    for family, (kind, options) in _CONFIGURATIONS.items()
    if hasattr(transformers, kind)
}
# One family for each set of functions that linrope replaces. make test-newest has all of them.
_EACH_SET = ("mamba2", "minimax", "qwen3_5", "kimi_linear", "lfm2")
TESTED = [x for x in CONFIGURATIONS if x in _EACH_SET or os.environ.get("TEST_FAMILIES") == "all"]


def model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model whose decays, steps and norms differ from head to head and from channel to channel."""
    torch.manual_seed(0)
    kind, arguments = CONFIGURATIONS[family]
    arguments = _COMMON | arguments | options
    if "text_config" in arguments:
        arguments["text_config"] = _COMMON | arguments["text_config"] | options
    config = getattr(transformers, kind)(**arguments)
    models: Any = transformers.AutoModelForCausalLM
    if "text_config" in arguments:  # GLM's models exist only with their vision tower
        models = transformers.AutoModelForImageTextToText
    made: nn.Module = models.from_config(config)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if name.endswith("A_log"):
                x.uniform_(-2, 2.5)
            elif name.endswith("dt_bias"):
                x.uniform_(-4, 0)
            elif x.ndim == 1:  # norms, biases, D
                x.add_(0.2 * torch.randn_like(x))
            else:
                x.normal_(std=0.2 if "embed" in name else x[0].numel() ** -0.5)
    return made.to(dtype).eval()


def recurrent_layer(family: str) -> nn.Module:
    """A model of one recurrent layer, for compilers, whose time is that of the layers."""
    options = {} if family == "mamba2" else {"layer_types": ["linear_attention"]}
    if "mlp_layer_types" in CONFIGURATIONS[family][1]:
        options["mlp_layer_types"] = ["dense"]
    return model(family, num_hidden_layers=1, **options)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


_HEADS = ("ForCausalLM", "ForConditionalGeneration")


def _cache_name(family: str) -> str:
    kind = next(x for name, x in vars(modeling(family)).items() if name.endswith(_HEADS))
    names = inspect.signature(kind.forward).parameters
    return next(x for x in ("cache", "cache_params", "past_key_values") if x in names)


# By family: the argument and the result that hold the cache. transformers 5.24 renamed them to "cache".
CACHE = {family: _cache_name(family) for family in CONFIGURATIONS}


def cache_of(result: Any) -> dict[str, Any]:
    """The cache that a model returned, as the argument of its next call."""
    name = next(x for x in ("cache", "cache_params", "past_key_values") if x in result)
    return {name: result[name]}


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def exactly(family: str, net: nn.Module, run: Callable[[nn.Module], Any]) -> Any:
    """The results of run with linrope, in float64 throughout: transformers' own code converts to float32 at times."""
    wide = copy.deepcopy(net).double()
    for config in (x.config for x in wide.modules() if hasattr(x, "config")):
        config._experts_implementation = "eager"  # the default has no float64
    with pytest.MonkeyPatch.context() as patch, linrope_transformers.enable(family):
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(torch, "float", torch.float64)
        return run(wide)


def assert_as_exact(got: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Over all parameters, the errors of gradients are at most twice those of the expected ones; of one, four times.

    Which parameter has the larger error is a matter of luck, above all in parameters of a few numbers.
    """
    assert got.keys() == expected.keys() == exact.keys()
    errors = []
    for name, x in exact.items():
        if x.any():
            errors.append((relative(got[name], x), relative(expected[name], x)))
            assert errors[-1][0] <= max(4 * errors[-1][1], 2e-5), (name, errors[-1])
        else:
            assert not got[name].any()
    ours, theirs = torch.tensor(errors).square().mean(0).sqrt()
    assert ours <= 2 * theirs


def both(family: str, run: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of run with linrope's functions and with transformers' own."""
    expected = run()
    with linrope_transformers.enable(family):
        return run(), expected
