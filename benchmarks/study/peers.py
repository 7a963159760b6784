"""Models of other people, by their own classes in transformers, at the same size, trained in the same way."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.study.tasks import Task


class Peer(NamedTuple):
    """A class of transformers, and options whose one free size brings it to the parameters of the others."""

    name: str
    options: Callable[[Task, int], dict[str, Any]]
    start: int  # of the free size
    family: str | None  # for enable(); None: softmax attention, which runs on PyTorch's fused kernel
    state: tuple[tuple[str, ...], ...]  # the options whose products add up to the size of the state


def _llama(task: Task, size: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": task.layers, "num_attention_heads": task.heads, "intermediate_size": size,
        "tie_word_embeddings": True, "max_position_embeddings": 65536,
    }  # fmt: skip


def _gpt2(task: Task, size: int) -> dict[str, Any]:
    # In nanoGPT's shape, without dropout. transformers' class has biases, nanoGPT's has none.
    return {
        "n_layer": task.layers, "n_head": task.heads, "n_inner": size, "n_positions": task.length,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _mamba2(task: Task, size: int) -> dict[str, Any]:
    # Twice the layers, since a block has no feed-forward part of its own; heads of 16 of 2 x dim channels.
    return {
        "num_hidden_layers": 2 * task.layers, "expand": 2, "head_dim": 16, "num_heads": 2 * task.dim // 16,
        "state_size": size, "n_groups": 1, "chunk_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip


def _gated_deltanet(task: Task, size: int) -> dict[str, Any]:
    # The linear layer of Qwen3-Next in every layer, with the heads, and so the state, of the study's other models.
    return {
        "num_hidden_layers": task.layers, "layer_types": ["linear_attention"] * task.layers,
        "linear_num_key_heads": task.heads, "linear_num_value_heads": task.heads,
        "linear_key_head_dim": task.head_dim, "linear_value_head_dim": task.head_dim,
        "intermediate_size": size, "mlp_only_layers": list(range(task.layers)), "num_attention_heads": task.heads,
        "num_key_value_heads": task.heads, "head_dim": task.head_dim, "tie_word_embeddings": True,
    }  # fmt: skip


def _kimi(task: Task, size: int) -> dict[str, Any]:
    # Kimi Linear's layer in every layer, likewise.
    return {
        "num_hidden_layers": task.layers, "layer_types": ["linear_attention"] * task.layers,
        "mlp_layer_types": ["dense"] * task.layers, "linear_num_heads": task.heads, "linear_head_dim": task.head_dim,
        "intermediate_size": size, "num_attention_heads": task.heads, "num_key_value_heads": task.heads,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True,
    }  # fmt: skip


def _minimax(task: Task, size: int) -> dict[str, Any]:
    # Lightning attention in every layer, and one expert in place of the mixture, whose product needs a multiple of 4.
    return {
        "num_hidden_layers": task.layers, "layer_types": ["linear_attention"] * task.layers,
        "num_attention_heads": task.heads, "num_key_value_heads": task.heads, "head_dim": task.head_dim,
        "intermediate_size": 4 * round(size / 4), "num_local_experts": 1, "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
    }  # fmt: skip


_LAYERS = "num_hidden_layers"
PEERS = {
    "llama": Peer("Llama", _llama, 256, None, ()),
    "gpt-2": Peer("GPT2", _gpt2, 512, None, ()),
    "mamba-2": Peer("Mamba2", _mamba2, 64, "mamba2", ((_LAYERS, "num_heads", "head_dim", "state_size"),)),
    "gated-deltanet": Peer(
        "Qwen3Next", _gated_deltanet, 256, "qwen3_next",
        ((_LAYERS, "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),),
    ),
    "kimi-linear": Peer(
        "KimiLinear", _kimi, 256, "kimi_linear", ((_LAYERS, "linear_num_heads", "linear_head_dim", "linear_head_dim"),)
    ),
    "minimax": Peer("MiniMax", _minimax, 256, "minimax", ((_LAYERS, "num_attention_heads", "head_dim", "head_dim"),)),
}  # fmt: skip


def why_not(name: str) -> str | None:
    """Why that model cannot be built here; None: it can."""
    if name not in PEERS:
        return None
    if find_spec("transformers") is None:
        return f"{name}: transformers is not installed"
    import transformers

    kind = f"{PEERS[name].name}Config"
    return None if hasattr(transformers, kind) else f"{name}: this transformers has no {kind}"


def make(
    name: str, task: Task, size: int
) -> tuple[nn.Module, dict[str, Any], Callable[[nn.Module, Tensor], Tensor]]:
    """The model, the options that differ from its class's defaults, and how to read its logits."""
    import transformers

    peer = PEERS[name]
    options = {"vocab_size": task.vocab_size, "hidden_size": task.dim} | peer.options(task, size)
    config = getattr(transformers, f"{peer.name}Config")(**options, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model, {"class": f"transformers.{type(model).__name__}"} | options, _logits


def on_linrope(name: str) -> AbstractContextManager[Any]:
    """Runs other people's linear layers on linrope's kernels, the fastest that they have on a CPU."""
    family = PEERS[name].family if name in PEERS else None
    if family is None:
        return nullcontext()
    from linrope.integrations import transformers as linrope_transformers

    return linrope_transformers.enable(family)


def state_numbers(name: str, options: dict[str, Any]) -> int | None:
    """The size of the model's state; None: it grows with the sequence, or the model is not one of these."""
    products = PEERS[name].state if name in PEERS else ()
    return sum(prod(options[each] for each in names) for names in products) or None


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def last_output(model: nn.Module, tokens: Tensor) -> Tensor:
    """The last token's output (b, dim) of the model's last norm."""
    out: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    return out


def versions(name: str) -> dict[str, str]:
    return {"transformers": version("transformers")} if name in PEERS else {}
