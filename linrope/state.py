"""The state that carries a sequence on: constant memory per token."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linrope.files import load_tensors, save_tensors

_FORMAT, _VERSION = "linrope.LinearAttentionState", 1


@dataclass(frozen=True, eq=False)
class LinearAttentionState:
    """What causal linear attention remembers of the keys and values it has seen.

        kv = sum_j g^(p - p_j) R(p_j) psi(k_j) v_j^T      z = sum_j g^(p - p_j) psi(k_j)

    as the last token sees them: p = position - 1 (without decay g = 1). Packed sequences have a state each:
    then b counts sequences.

    Args:
        kv: (b, g, f, e), float32 or float64.
        z: (b, g, f), float64 (float32 is taken too): it counts tokens, and a float32 count stalls.
        position: (b,) int64, of the next token.
        identity: of the feature map and the rotation that made it; another one is refused.
        donated: see ``donate``.

    Raises:
        TypeError, ValueError: a tensor of another type or shape.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 18 and 19; RoFormer eq. 19.

    >>> q = k = v = torch.randn(1, 5, 2, 4)
    >>> out, state = linear_rope_attention(q, k, v, return_state=True)
    >>> state.kv.shape, state.position
    (torch.Size([1, 2, 4, 4]), tensor([5]))
    """

    kv: Tensor
    z: Tensor
    position: Tensor
    identity: str
    donated: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kv, Tensor):  # a pytree of something else, while tracing
            return
        for name, tensor in (("kv", self.kv), ("z", self.z)):
            if tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"state.{name}: got {tensor.dtype}, expected float32 or float64")
        if not self.kv.device == self.z.device == self.position.device:
            raise ValueError(
                f"state: got kv on {self.kv.device}, z on {self.z.device}, position on "
                f"{self.position.device}; expected one device"
            )
        if self.position.dtype != torch.int64:
            raise TypeError(f"state.position: got {self.position.dtype}, expected int64")
        if self.kv.ndim != 4 or self.z.shape != self.kv.shape[:3] or self.position.shape != self.kv.shape[:1]:
            raise ValueError(
                f"state: got kv {tuple(self.kv.shape)}, z {tuple(self.z.shape)}, position "
                f"{tuple(self.position.shape)}; expected (b, g, f, e), (b, g, f), (b,)"
            )

    def _map(self, function: Any) -> "LinearAttentionState":
        kv, z, position = function(self.kv), function(self.z), function(self.position)
        return LinearAttentionState(kv, z, position, self.identity)

    def detach(self) -> "LinearAttentionState":
        """The same numbers, cut from the graph: what truncated backpropagation passes on."""
        return self._map(lambda tensor: tensor.detach().clone())

    def clone(self) -> "LinearAttentionState":
        return self._map(torch.clone)

    def donate(self) -> "LinearAttentionState":
        """The same memory, given away: a decoding step (one token, no gradients) writes the next state there.

        This saves an allocation per token, and keeps addresses fixed, as a CUDA graph needs them. Other
        calls make a new state as always. The state given away must not be used again.

        >>> q = k = v = torch.randn(1, 5, 2, 4)
        >>> _, state = linear_rope_attention(q, k, v, return_state=True)
        >>> token = torch.randn(1, 1, 2, 4)
        >>> _, after = linear_rope_attention(token, token, token, state=state.donate(), return_state=True)
        >>> after.kv is state.kv, after.position
        (True, tensor([6]))
        """
        return replace(self, donated=True)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "LinearAttentionState":
        """A copy on that device; dtype, float32 or float64, is kv's. z stays as wide as it is."""
        if dtype not in (None, torch.float32, torch.float64):
            raise TypeError(f"dtype: got {dtype}, expected float32 or float64")
        moved = self._map(lambda tensor: tensor.to(device, copy=True))
        return moved if dtype is None else replace(moved, kv=moved.kv.to(dtype))

    def reorder(self, index: Tensor) -> "LinearAttentionState":
        """The states of the sequences index (b',): repeats and drops them, as beam search does."""
        if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(
                f"index: got {index.dtype} {tuple(index.shape)}, expected integers of shape (b,)"
            )
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, atomically."""
        metadata = {"format": _FORMAT, "version": str(_VERSION), "identity": self.identity}
        save_tensors(Path(path), {"kv": self.kv, "z": self.z, "position": self.position}, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LinearAttentionState":
        """Reads what ``save`` wrote.

        Raises:
            FileNotFoundError, ValueError: no such file; a damaged or newer one, or one of other content.
        """
        tensors, metadata = load_tensors(Path(path), _FORMAT, _VERSION)
        if set(tensors) != {"kv", "z", "position"} or "identity" not in metadata:
            raise ValueError(f"{path}: got {sorted(tensors)}, expected kv, z, position and an identity")
        try:
            return cls(tensors["kv"], tensors["z"], tensors["position"], metadata["identity"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


_LEAVES = ("kv", "z", "position")


def _flatten(state: LinearAttentionState) -> tuple[list[Tensor], str]:
    return [state.kv, state.z, state.position], state.identity


def _flatten_with_keys(state: LinearAttentionState) -> tuple[list[Any], str]:
    leaves, identity = _flatten(state)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(_LEAVES, leaves, strict=True)], identity


def _unflatten(leaves: Any, identity: Any) -> LinearAttentionState:
    kv, z, position = leaves
    return LinearAttentionState(kv, z, position, identity)


pytree.register_pytree_node(
    LinearAttentionState,
    _flatten,
    _unflatten,
    serialized_type_name="linrope.LinearAttentionState",
    flatten_with_keys_fn=_flatten_with_keys,
)
