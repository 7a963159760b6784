"""Small models of the families that ``linrope.integrations.transformers`` knows, with weights that do something."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

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

# The configuration class and its arguments
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
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
}  # fmt: skip


def model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model whose decays, steps and norms differ from head to head and from channel to channel."""
    torch.manual_seed(0)
    kind, arguments = CONFIGURATIONS[family]
    config = getattr(transformers, kind)(**(_COMMON | arguments | options))
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
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


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _cache_name(family: str) -> str:
    kind = next(x for name, x in vars(modeling(family)).items() if name.endswith("ForCausalLM"))
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


def both(family: str, run: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of run with linrope's functions and with transformers' own."""
    expected = run()
    with linrope_transformers.enable(family):
        return run(), expected
