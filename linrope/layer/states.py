"""One file for the states of all layers of a model."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrope.common.files import load_tensors, save_tensors
from linrope.layer.key_value_state import KeyValueState
from linrope.layer.state import LayerState

_FORMAT, _VERSION = "linrope.States", 1

State = LayerState | KeyValueState


def save_states(states: Sequence[State], path: str | os.PathLike[str]) -> None:
    """Writes the states of a model, one per block, to one safetensors file, atomically.

    Of states at slots (``LayerState.at``) it writes the rows at the slots.

    >>> import tempfile
    >>> from linrope.models import LanguageModel, LanguageModelConfig, load_states, save_states
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))
    >>> _, states = model(torch.randint(256, (1, 10)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_states(states, f"{folder}/states.safetensors")
    ...     loaded = load_states(f"{folder}/states.safetensors")
    >>> [state.position for state in loaded]
    [tensor([10]), tensor([10])]
    """
    write_states(path, _FORMAT, states)


def load_states(path: str | os.PathLike[str], device: torch.device | str | None = None) -> list[Any]:
    """Reads the list of states that ``save_states`` wrote. device: the model's; default: the CPU.

    A model with another feature map or rotation rejects the states in its first call. Nothing checks the weights.

    Raises:
        FileNotFoundError, ValueError: there is no such file; it is damaged, newer, or of another kind.
    """
    return read_states(path, _FORMAT, device)[0]


def forms(states: object) -> list[Any]:
    """The kind of each layer's state, its tensors' shapes and dtypes, by which states are matched with a model."""
    if not isinstance(states, list | tuple):
        raise TypeError(f"states: got {type(states).__name__}, expected a list with a LayerState per layer")
    return [
        {"identity": x.identity} | {name: (tuple(y.shape), y.dtype) for name, y in x.tensors().items()}
        if isinstance(x, LayerState)
        else type(x).__name__
        for x in states
    ]


def write_states(
    path: str | os.PathLike[str],
    kind: str,
    states: Sequence[State | None],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """``save_states`` in a file of this kind, with further metadata. None: a layer that has read no token."""
    if isinstance(states, str) or not isinstance(states, Sequence):
        raise TypeError(
            f"states: got {type(states).__name__}, expected a list with one per block, then the path"
        )
    tensors: dict[str, Tensor] = {}
    texts = {**(metadata or {}), "format": kind, "version": str(_VERSION), "layers": str(len(states))}
    for i, state in enumerate(states):
        if state is not None:
            texts[f"{i}.identity"] = state.identity
            tensors |= {f"{i}.{name}": x for name, x in state.rows().detach().tensors().items()}
    save_tensors(Path(path), tensors, texts)


def read_states(
    path: str | os.PathLike[str], kind: str, device: torch.device | str | None = None
) -> tuple[list[Any], dict[str, str]]:
    """The states and all metadata of a file that ``write_states`` wrote. Raises what ``load_states`` does."""
    tensors, metadata = load_tensors(Path(path), kind, _VERSION)
    try:
        rows: list[dict[str, Tensor]] = [{} for _ in range(int(metadata["layers"]))]
        for name, x in tensors.items():
            layer, _, field = name.partition(".")
            rows[int(layer)][field] = x.to(device)
        states = [_state(row, metadata.get(f"{i}.identity", "")) for i, row in enumerate(rows)]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: does not hold the states of a model ({error})") from error
    return states, metadata


def _state(tensors: dict[str, Any], identity: str) -> State | None:
    if not tensors:
        return None
    if "kv" in tensors:
        return LayerState.from_tensors(tensors, identity)
    return KeyValueState(**tensors, identity=identity)
