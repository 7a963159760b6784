"""Models with random weights of the families that ``linrope.integrations.transformers`` knows.

Each family has a small model for tests, and a wide one for ``linrope bench --transformers``: as wide as the smaller
models of the family, with two or three layers that linrope computes. Hybrids also have one layer of softmax attention,
which takes the same time on both sides. Wide models have no mixtures of experts. In Inkling all layers have
convolutions.
"""

from typing import Any

SMALL, WIDE = 0, 1
OWN = object()  # the default of transformers' class

# A pair has the values of the small and of the wide model; any other value is that of both.
COMMON: dict[str, Any] = {
    "vocab_size": (97, 1000), "hidden_size": (48, 1024), "pad_token_id": 0, "bos_token_id": (1, OWN),
    "eos_token_id": (2, OWN),
}  # fmt: skip
_LINEAR, _FULL = "linear_attention", "full_attention"
_HEADS = {"num_attention_heads": (4, 16), "num_key_value_heads": (2, 4), "intermediate_size": (64, 2048)}
_TWO_OR_THREE = _HEADS | {"num_hidden_layers": (2, 3)}
_TWO_OR_FOUR = _HEADS | {
    "num_hidden_layers": (2, 4),
    "layer_types": ([_LINEAR, _FULL], [_LINEAR] * 3 + [_FULL]),
}
_MAMBA = {
    "mamba_d_state": (24, 128), "mamba_d_conv": (4, OWN), "mamba_n_heads": (6, 32), "mamba_d_head": (16, 64),
    "mamba_n_groups": (2, 1), "mamba_chunk_size": (16, OWN),
}  # fmt: skip
_GATED_DELTA_NET = _TWO_OR_FOUR | {
    "head_dim": (16, 64), "linear_num_key_heads": (2, 16), "linear_num_value_heads": (4, 16),
    "linear_key_head_dim": (16, 128), "linear_value_head_dim": (24, 128),
}  # fmt: skip
_MIXTURE = {
    "num_experts": (4, 1), "num_experts_per_tok": (2, 1), "moe_intermediate_size": (32, 1024),
    "shared_expert_intermediate_size": (32, 1024),
}  # fmt: skip
_LATENT = _TWO_OR_FOUR | {
    "num_key_value_heads": (4, 16), "kv_lora_rank": (16, 256), "q_lora_rank": (None, OWN), "qk_rope_head_dim": (8, 64),
    "qk_nope_head_dim": (16, 64), "v_head_dim": (12, 64), "moe_intermediate_size": (32, OWN),
    "num_local_experts": (4, OWN), "num_experts_per_tok": (2, OWN), "n_group": (1, OWN), "topk_group": (1, OWN),
    "mlp_layer_types": (["dense", "sparse"], ["dense"] * 4),
}  # fmt: skip
_KIMI = {"linear_num_heads": (4, 16), "linear_head_dim": (16, 128)}
_GLM_TEXT = _LATENT | _KIMI | {
    "num_hidden_layers": 4, "layer_types": (None, [_LINEAR] * 3 + ["indexed_attention"]),
    "mlp_layer_types": (None, ["dense"] * 4), "q_lora_rank": (16, 512), "qk_rope_head_dim": 0,
    "n_routed_experts": (4, OWN), "index_topk": (64, OWN), "index_head_dim": (8, OWN), "index_n_heads": (2, 8),
    "index_kpool": (4, OWN), "hc_mult": (2, OWN),
}  # fmt: skip
_GLM_VISION = {
    "depth": 1, "hidden_size": (16, OWN), "num_heads": (2, OWN), "intermediate_size": (16, OWN),
    "out_hidden_size": (48, 1024), "projection_intermediate_size": (16, OWN),
}  # fmt: skip
_CONVOLUTIONS = _HEADS | {
    "num_hidden_layers": 3, "num_key_value_heads": (2, 8), "conv_bias": (True, OWN),
    "layer_types": (["conv", _FULL, "conv"], ["conv", "conv", _FULL]),
}  # fmt: skip

# The configuration class of transformers, and its options
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", {
        "num_heads": (6, 32), "head_dim": (16, 64), "state_size": (24, 128), "n_groups": (2, 1),
        "chunk_size": (16, OWN), "num_hidden_layers": 2,
    }),
    "bamba": ("BambaConfig", _TWO_OR_THREE | _MAMBA | {"attn_layer_indices": ([1], [2])}),
    "falcon_h1": ("FalconH1Config", _HEADS | _MAMBA | {
        "num_hidden_layers": 2, "mamba_d_ssm": (96, 2048), "mamba_rms_norm": (True, OWN),
    }),
    "granitemoehybrid": ("GraniteMoeHybridConfig", _TWO_OR_THREE | _MAMBA | {
        "layer_types": (["mamba", "attention"], ["mamba", "mamba", "attention"]), "num_local_experts": (4, 0),
        "num_experts_per_tok": (2, OWN), "shared_intermediate_size": (64, 2048),
    }),
    "nemotron_h": ("NemotronHConfig", _HEADS | {
        "layers_block_type": (["mamba", "attention", "mamba", "mlp"], ["mamba", "mlp", "mamba", "attention"]),
        "num_hidden_layers": (4, OWN), "ssm_state_size": (24, 128), "mamba_num_heads": (6, 32),
        "mamba_head_dim": (16, 64), "n_groups": (2, 8), "chunk_size": (16, OWN), "head_dim": (12, 64),
    }),
    "zamba2": ("Zamba2Config", _TWO_OR_THREE | {
        "layers_block_type": (["mamba", "hybrid"], ["mamba", "mamba", "hybrid"]), "mamba_d_state": (24, 128),
        "mamba_d_conv": (4, OWN), "mamba_expand": (2, OWN), "n_mamba_heads": (6, 32), "mamba_ngroups": (2, 1),
        "chunk_size": (16, OWN), "num_key_value_heads": (4, 16),
    }),
    "minimax": ("MiniMaxConfig", _HEADS | {
        "num_hidden_layers": 3, "layer_types": ([_LINEAR, _FULL, _LINEAR], [_LINEAR, _LINEAR, _FULL]),
        "block_size": (16, OWN), "head_dim": (12, OWN), "num_local_experts": (4, 1), "num_experts_per_tok": (2, 1),
    }),
    "qwen3_next": ("Qwen3NextConfig", _GATED_DELTA_NET | _MIXTURE),
    "qwen3_5": ("Qwen3_5TextConfig", _GATED_DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _GATED_DELTA_NET | _MIXTURE),
    "qwen4_exp": ("Qwen4ExpTextConfig", _GATED_DELTA_NET | _MIXTURE | {
        "hc_count": (2, OWN), "hc_lowrank": (8, OWN), "indexer_n_heads": (2, 4), "indexer_kv_heads": 1,
        "indexer_head_dim": (16, 64), "indexer_budget": (64, 2048), "indexer_compress_ratio": (4, 16),
        "output_gate_type": ("sigmoid", OWN), "ple_layer_ids": ([1], OWN), "ple_embed_dim": (16, OWN),
        "heads_per_ngram": (2, OWN), "ngram_vocab_size_base": (50, OWN),
    }),
    "lara_mini": ("LaraMiniConfig", _GATED_DELTA_NET | _MIXTURE | {
        "num_hidden_layers": (3, 4), "sliding_window": (9, OWN),
        "layer_types": ([_LINEAR, "sliding_attention", _FULL], [_LINEAR] * 3 + [_FULL]),
    }),
    "olmo_hybrid": ("OlmoHybridConfig", _GATED_DELTA_NET | {
        "linear_num_key_heads": (4, 16), "linear_key_head_dim": (16, 96), "linear_value_head_dim": (32, 192),
    }),
    "kimi_linear": ("KimiLinearConfig", _LATENT | _KIMI),
    "bailing_hybrid": ("BailingHybridConfig", _LATENT | {"head_dim": (16, 128)}),
    "glm5_next": ("Glm5NextConfig", {"text_config": COMMON | _GLM_TEXT, "vision_config": _GLM_VISION}),
    "inkling": ("InklingTextConfig", _HEADS | {
        "num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "intermediate_size": (64, 4096),
        "mlp_layer_types": (["dense", "sparse"], ["dense", "dense"]), "head_dim": (12, 64),
        "swa_num_attention_heads": (4, 16), "swa_num_key_value_heads": (2, 4), "swa_head_dim": (12, 64),
        "sliding_window_size": (9, OWN), "moe_intermediate_size": (32, OWN), "n_routed_experts": (4, OWN),
        "num_experts_per_tok": (2, OWN), "n_shared_experts": (1, OWN),
    }),
    "lfm2": ("Lfm2Config", _CONVOLUTIONS | {"intermediate_size": (64, 6656)}),
    "lfm2_moe": ("Lfm2MoeConfig", _CONVOLUTIONS | {
        "intermediate_size": (64, 3584), "num_dense_layers": (1, 3), "num_experts": (4, OWN),
        "num_experts_per_tok": (2, OWN), "moe_intermediate_size": (32, OWN),
    }),
    "lfm3": ("Lfm3Config", _CONVOLUTIONS | {
        "intermediate_size": (64, 3840), "head_dim": (12, 64), "sliding_window": (9, OWN),
        "layer_types": (["conv", "sliding_attention", _FULL], ["conv", "conv", _FULL]),
    }),
}  # fmt: skip


def options_of(family: str, size: int) -> dict[str, Any]:
    """The options of the family's configuration class for its SMALL or WIDE model."""
    return _of_size(COMMON | FAMILIES[family][1], size)


def _of_size(options: dict[str, Any], size: int) -> dict[str, Any]:
    chosen = {name: x[size] if isinstance(x, tuple) else x for name, x in options.items()}
    return {
        name: _of_size(x, size) if isinstance(x, dict) else x for name, x in chosen.items() if x is not OWN
    }


def model_of(family: str, size: int, **changes: Any) -> Any:
    """The model, with changes to the options of its text."""
    import transformers

    options = options_of(family, size) | changes
    models: Any = transformers.AutoModelForCausalLM
    if "text_config" in options:  # GLM's models exist only with their vision tower
        options["text_config"] |= changes
        models = transformers.AutoModelForImageTextToText
    return models.from_config(getattr(transformers, FAMILIES[family][0])(**options))
