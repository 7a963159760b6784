"""Models of other people, by their own classes in transformers, at the same size, trained in the same way."""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.study.tasks import Task


class Peer(NamedTuple):
    """A class of transformers, and options whose one free size brings it to the parameters of the others."""

    name: str
    options: Callable[[Task, int], dict[str, Any]]
    start: int  # of the free size


def _llama(task: Task, size: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": task.layers, "num_attention_heads": task.heads, "intermediate_size": size,
        "tie_word_embeddings": True, "max_position_embeddings": 65536,
    }  # fmt: skip


def _mamba2(task: Task, size: int) -> dict[str, Any]:
    # Twice the layers, since a block has no feed-forward part of its own; heads of 16 of 2 x dim channels.
    return {
        "num_hidden_layers": 2 * task.layers, "expand": 2, "head_dim": 16, "num_heads": 2 * task.dim // 16,
        "state_size": size, "n_groups": 1, "chunk_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip


def _recurrent_gemma(task: Task, size: int) -> dict[str, Any]:
    # Its own pattern: two recurrent layers, then one of attention over a window, which is the trained length.
    return {
        "num_hidden_layers": task.layers, "num_attention_heads": task.heads, "intermediate_size": 2 * size,
        "lru_width": task.dim, "attention_window_size": task.length,
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


def _gated_deltanet_init(task: Task, size: int) -> dict[str, Any]:
    # Qwen3-Next's 0.02 is made for wide models: here the deviation of the block's initial weights.
    return _gated_deltanet(task, size) | {"initializer_range": task.dim**-0.5}


PEERS = {
    "llama": Peer("Llama", _llama, 256),
    "mamba-2": Peer("Mamba2", _mamba2, 64),
    "gated-deltanet": Peer("Qwen3Next", _gated_deltanet, 256),
    "gated-deltanet+init": Peer("Qwen3Next", _gated_deltanet_init, 256),
    "recurrent-gemma": Peer("RecurrentGemma", _recurrent_gemma, 256),
}


def why_not(name: str) -> str | None:
    """Why that model cannot be built here; None: it can."""
    if name in PEERS and find_spec("transformers") is None:
        return f"{name}: transformers is not installed"
    return None


def make(
    name: str, task: Task, size: int
) -> tuple[nn.Module, dict[str, Any], Callable[[nn.Module, Tensor], Tensor]]:
    """The model, the options that differ from its class's defaults, and how to read its logits."""
    import transformers

    peer = PEERS[name]
    options = {"vocab_size": task.vocab_size, "hidden_size": task.dim} | peer.options(task, size)
    config = getattr(transformers, f"{peer.name}Config")(**options, use_cache=False)
    model = getattr(transformers, f"{peer.name}ForCausalLM")(config)
    return model, {"class": f"transformers.{peer.name}ForCausalLM"} | options, _logits


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def versions(name: str) -> dict[str, str]:
    return {"transformers": version("transformers")} if name in PEERS else {}
