"""The state of a sequence: what decoding and processing in pieces carry from call to call."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrope.common.files import load_tensors, save_tensors
from linrope.common.private_names import pytree
from linrope.common.tracing import values_readable
from linrope.common.writable import check_slots, check_sources, rows_to_copy, write_rows
from linrope.recurrence.identities import may_replace, same_identity

_FORMAT, _VERSION = "linrope.LinearAttentionState", 1

_WRITTEN = ("kv", "z", "position", "angle", "log_scale")  # the tensors that a call may overwrite
_TENSORS = (*_WRITTEN, "angle_gradient_path")  # all tensors with a row for each sequence

NO_KEYS = -1e30  # log_scale before the first key; finite, because -inf - -inf is NaN


class _Wide:
    """Holds a state's tensors where FSDP2's cast to half precision, in which sums stall, does not see them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors


# FSDP2 takes a dataclass apart, casts every tensor in it and builds a new one. Beside the wide tensors a state holds
# this one: if it comes back in another dtype, the state has been cast.
_MARK = torch.zeros((), dtype=torch.float64, device="cpu")


@dataclass(frozen=True, eq=False, repr=False)
class LinearAttentionState:
    """The sums over past keys and values that linear attention carries from one call to the next.

        kv = sum_j e^(L - L_j) R(Theta_j) psi(k_j) w_j v_j^T      z = sum_j e^(L - L_j) psi(k_j)

    where L is the sum of log decays up to the last token (0 without decay). Every packed sequence has a row of
    its own, and b is the number of sequences.

    Args:
        kv: (b, g, f, e), float32 or float64.
        z: (b, g, f), float64: a float32 sum over tokens would stop growing near 2^24. float32 is accepted, but not by
            "native".
        position: (b,) int64, the position of the next token.
        identity: names the feature map and the rotation that made the state. Calls with others reject it.
        angle: (b, g or 1, pairs) int64: the sum of angle_steps in 2^-64 turns, which wrap.
        log_scale: (b, g) float64, for maps that return a log_scale: m, the largest key's log_scale, decayed to the
            last token. kv and z are then sums of e^-m times the keys.
        angle_gradient_path: (b, g or 1, pairs) zeros, only in calls with gradients. The gradients of later calls flow
            through them to the angle_steps summed in ``angle``, which is an integer tensor.
        slots: (b',) int64: rows of a pool; see ``at``.
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
    angle: Tensor | None = None
    log_scale: Tensor | None = None
    angle_gradient_path: Tensor | None = None
    slots: Tensor | None = None
    donated: bool = False
    _wide: tuple[_Wide, Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kv, Tensor):  # tracing rebuilds the pytree with placeholders
            return
        tensors = self.tensors()
        if not torch.compiler.is_compiling():
            if self._wide is not None and self._wide[1].dtype != _MARK.dtype:
                tensors |= self._wide[0].tensors
                self.__dict__.update(tensors)
            self.__dict__["_wide"] = _Wide(tensors), _MARK
        for name, x in (("kv", self.kv), ("z", self.z), ("log_scale", self.log_scale)):
            if x is not None and x.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"state.{name}: got {x.dtype}, expected float32 or float64")
        for name, y in (("position", self.position), ("angle", self.angle), ("slots", self.slots)):
            if y is not None and y.dtype != torch.int64:
                raise TypeError(f"state.{name}: got {y.dtype}, expected int64")
        device = self.kv.device
        for x in tensors.values():
            if x.device != device:
                devices = sorted({str(x.device) for x in tensors.values()})
                raise ValueError(f"state: got tensors on {devices}, expected one device")
        shape = self.kv.shape
        rows = shape[:1]
        if len(shape) != 4 or self.z.shape != shape[:3] or self.position.shape != rows:
            raise ValueError(
                f"state: got kv {tuple(self.kv.shape)}, z {tuple(self.z.shape)}, position "
                f"{tuple(self.position.shape)}; expected (b, g, f, e), (b, g, f), (b,)"
            )
        if (angle := self.angle) is not None and (angle.ndim != 3 or angle.shape[:1] != rows):
            raise ValueError(f"state.angle: got {tuple(angle.shape)}, expected ({rows[0]}, g or 1, pairs)")
        if self.log_scale is not None and self.log_scale.shape != shape[:2]:
            raise ValueError(
                f"state.log_scale: got {tuple(self.log_scale.shape)}, expected {tuple(shape[:2])}"
            )

    def __getstate__(self) -> dict[str, object]:
        return {name: x for name, x in self.__dict__.items() if name != "_wide"}

    def __repr__(self) -> str:
        others = "".join(f", {name}" for name in self.tensors() if name not in ("kv", "z", "position"))
        at = "" if self.slots is None else f" at {len(self.slots)} slots"
        first = self.position[:4].tolist() if values_readable(self.position) else ["?"]
        positions = ", ".join(map(str, first)) + (", .." if len(self.position) > 4 else "")
        kind = str(self.kv.dtype).removeprefix("torch.")
        return f"LinearAttentionState(kv {tuple(self.kv.shape)} {kind}{others}{at}, position [{positions}])"

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Restores a copy or a pickle, with the checks of ``__post_init__`` and of ``at``."""
        names = [field.name for field in fields(self) if field.name != "_wide"]
        required, optional = names[:4], names[4:]  # fields with a default stand last
        if not set(required) <= set(values) <= set(names):
            raise ValueError(
                f"state: got {', '.join(map(str, values))}; expected {', '.join(required)}, and otherwise only "
                f"{', '.join(optional)}"
            )
        for name, x in values.items():
            kind = {"identity": str, "donated": bool}.get(name, Tensor)
            if not isinstance(x, kind) and (x is not None or name in (*required, "donated")):
                raise TypeError(f"state.{name}: got {type(x).__name__}, expected {kind.__name__}")
        self.__dict__.update(values)
        self.__post_init__()
        if self.slots is not None:
            check_slots(self.slots, len(self.kv), self.kv.device)

    @classmethod
    def cat(cls, states: Sequence["LinearAttentionState"]) -> "LinearAttentionState":
        """Joins states along the batch: one state with the sequences of all of them, in order.

        Raises:
            ValueError: states is empty, or they differ in identity, shapes, dtypes, devices or optional tensors.

        >>> from linrope import linear_rope_state
        >>> k = v = torch.randn(3, 5, 2, 4)
        >>> one, two = linear_rope_state(k[:1], v[:1]), linear_rope_state(k[1:], v[1:])
        >>> LinearAttentionState.cat([one, two])
        LinearAttentionState(kv (3, 2, 4, 4) float32, position [5, 5, 5])
        """
        if not states:
            raise ValueError("states: got none, expected at least one")
        # The identity with the fewest unknown digests, so that all are compared with what is known
        first = min(states, key=lambda state: state.identity.count("#?"))
        rows = [state.rows().tensors() for state in states]
        name = "angle_gradient_path"
        if paths := [tensors[name] for tensors in rows if name in tensors]:
            for x in rows:  # calls without gradients leave these zeros out
                x.setdefault(name, paths[0].new_zeros(len(x["kv"]), *paths[0].shape[1:]))
        for state, tensors in zip(states, rows, strict=True):
            if not same_identity(state.identity, first.identity):
                identities = f"{state.identity} and {first.identity}"
                raise ValueError(f"states: got identities {identities}, expected one")
            kinds, expected = _kinds(tensors), _kinds(rows[0])
            if differ := [name for name in _TENSORS if kinds.get(name) != expected.get(name)]:
                got, want = (", ".join(f"{name} {x.get(name)}" for name in differ) for x in (kinds, expected))
                expected_text = "equal shapes apart from the batch, equal dtypes and equal devices"
                raise ValueError(f"states: got {got} and {want}, expected {expected_text}")
        joined: dict[str, Any] = {name: torch.cat([tensors[name] for tensors in rows]) for name in rows[0]}
        return replace(first, slots=None, donated=False, **joined)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors with a row for each sequence, by name."""
        return {name: x for name in _TENSORS if (x := getattr(self, name)) is not None}

    def written(self) -> dict[str, Tensor]:
        """The tensors that a call may overwrite."""
        return {name: x for name in _WRITTEN if (x := getattr(self, name)) is not None}

    def _map(self, function: Any) -> "LinearAttentionState":
        return replace(self, donated=False, **{name: function(x) for name, x in self.tensors().items()})

    @property
    def sequences(self) -> int:
        """b, or the number of slots."""
        return self.kv.shape[0] if self.slots is None else self.slots.shape[0]

    def detach(self) -> "LinearAttentionState":
        """A copy without gradients, for truncated backpropagation."""
        return replace(self._map(lambda tensor: tensor.detach().clone()), angle_gradient_path=None)

    def clone(self) -> "LinearAttentionState":
        return self._map(torch.clone)

    def donate(self) -> "LinearAttentionState":
        """Lets the next decoding step (one token, no gradients) overwrite this state's memory with the next state.

        This saves an allocation per token and keeps addresses fixed, as CUDA graphs require. Calls with more tokens or
        with gradients make a new state as usual. Do not use the donated state again. Tensors made in inference mode, or
        whose entries share memory, raise a ValueError before anything changes. Read-only memory (of a numpy array or a
        mapped file) cannot be told from other memory: do not donate it.

        >>> q = k = v = torch.randn(1, 5, 2, 4)
        >>> _, state = linear_rope_attention(q, k, v, return_state=True)
        >>> token = torch.randn(1, 1, 2, 4)
        >>> _, after = linear_rope_attention(token, token, token, state=state.donate(), return_state=True)
        >>> after.kv is state.kv, after.position
        (True, tensor([6]))
        """
        return self._replace_unchecked(donated=True)

    def _replace_unchecked(self, **fields: Any) -> "LinearAttentionState":
        """A state with other values of these fields. Skips the checks, which they have passed."""
        if torch.compiler.is_compiling():  # PyTorch 2.11 cannot trace the lines below
            return replace(self, **fields)
        state = object.__new__(LinearAttentionState)
        state.__dict__.update(self.__dict__, **fields)
        if "kv" in fields:  # FSDP2's cast would bring back the tensors of this state
            state.__dict__["_wide"] = _Wide(state.tensors()), _MARK
        return state

    def at(self, slots: Tensor) -> "LinearAttentionState":
        """Rows of this state, used as a pool: calls without gradients read and write them in place.

        slots (b,) int64 or int32, all different: for each sequence of the call, its row in the pool. On a GPU their
        values are not checked. Calls with gradients raise a RuntimeError.
        Sequences may join, leave and fork between calls, as in continuous batching. A decoding step or a packed
        prefill updates its rows and leaves the others alone.

        >>> from linrope import linear_rope_state
        >>> pool = linear_rope_state(torch.zeros(8, 0, 2, 4), torch.zeros(8, 0, 2, 4))  # 8 rows, all empty
        >>> q = k = v = torch.randn(2, 1, 2, 4)
        >>> out = linear_rope_attention(q, k, v, state=pool.at(torch.tensor([6, 1])))
        >>> pool.position
        tensor([0, 1, 0, 0, 0, 0, 1, 0])
        """
        check_slots(slots, len(self.kv), self.kv.device)
        return replace(self, slots=slots.long().contiguous())

    def rows(self) -> "LinearAttentionState":
        """A copy of the rows at the slots; without slots, the state itself."""
        return self if self.slots is None else self._select(self.slots)

    def _select(self, rows: Tensor) -> "LinearAttentionState":
        """A copy of these rows of the tensors, without slots."""
        return replace(self._map(lambda tensor: tensor.index_select(0, rows)), slots=None)

    def write(self, new: "LinearAttentionState | Mapping[str, Tensor | None]") -> None:
        """Copies another state, or some tensors by name, into this one's memory: at the slots, if it has slots.

        Raises:
            ValueError: the other state has another identity or other optional tensors, a shape does not fit, or the
                memory is not writable. Nothing is written then.

        >>> k = v = torch.randn(3, 5, 2, 4)
        >>> from linrope import linear_rope_state
        >>> pool = linear_rope_state(k, v)
        >>> pool.at(torch.tensor([2])).write(pool.at(torch.tensor([0])).rows())  # row 2 is now a copy of row 0
        >>> torch.equal(pool.kv[2], pool.kv[0])
        True
        """
        targets = self.tensors()
        if isinstance(new, LinearAttentionState):
            if not may_replace(new.identity, self.identity):
                raise ValueError(f"state: made with {new.identity}; expected {self.identity}")
            new = new.rows().tensors()
            if (new.keys() ^ targets.keys()) - {"angle_gradient_path"}:  # which holds zeros
                raise ValueError(f"state: got {', '.join(new)}; expected {', '.join(targets)}")
        sources = {name: x for name, x in new.items() if x is not None and name != "angle_gradient_path"}
        check_sources(targets, sources, self.sequences)
        self._write_unchecked(sources)

    def _write_unchecked(self, tensors: Mapping[str, Tensor | None]) -> None:
        """``write`` without the checks."""
        write_rows(vars(self), tensors, self.slots)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "LinearAttentionState":
        """A copy on that device, with kv in dtype (float32 or float64). z keeps its dtype."""
        if dtype not in (None, torch.float32, torch.float64):
            raise TypeError(f"dtype: got {dtype}, expected float32 or float64")
        slots = None if self.slots is None else self.slots.to(device)
        if slots is not None and slots is self.slots and dtype in (None, self.kv.dtype):
            return self  # a copy of a pool's rows would not receive what calls write
        moved = {name: x.to(device, copy=True) for name, x in self.tensors().items()}
        moved["kv"] = moved["kv"].to(dtype or self.kv.dtype)
        return replace(self, donated=False, slots=slots, **moved)  # type: ignore[arg-type]

    def reorder(self, index: Tensor) -> "LinearAttentionState":
        """A copy of the sequences at index (b',), which may repeat or omit some, as in beam search.

        With slots, index counts the slots, and the copy has none.
        """
        index = rows_to_copy(index, self.sequences, self.kv.device)
        return self._select(index if self.slots is None else self.slots[index])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, atomically."""
        metadata = {"format": _FORMAT, "version": str(_VERSION), "identity": self.identity}
        save_tensors(Path(path), self.rows().detach().tensors(), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LinearAttentionState":
        """Reads a file that ``save`` wrote.

        Raises:
            FileNotFoundError: no such file. ValueError: it is damaged, newer, or holds something else.
        """
        tensors, metadata = load_tensors(Path(path), _FORMAT, _VERSION)
        if not {"kv", "z", "position"} <= set(tensors) <= set(_TENSORS) or "identity" not in metadata:
            raise ValueError(f"{path}: got {sorted(tensors)}, expected kv, z, position and an identity")
        try:
            return cls(identity=metadata["identity"], **tensors)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def _kinds(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Each tensor's shape without the batch, its dtype and its device."""
    return {name: f"{tuple(x.shape[1:])} {x.dtype} {x.device}" for name, x in tensors.items()}


def _leaves(state: LinearAttentionState) -> dict[str, Tensor]:
    """The tensors that PyTorch's pytree functions, such as ``tree_map``, visit.

    They rebuild the state without ``donated``, so the next step copies it instead of overwriting its memory.
    """
    return state.tensors() | ({} if state.slots is None else {"slots": state.slots})


def _flatten(state: LinearAttentionState) -> tuple[list[Tensor], str]:
    tensors = _leaves(state)
    return list(tensors.values()), f"{' '.join(tensors)}; {state.identity}"


def _flatten_with_keys(state: LinearAttentionState) -> tuple[list[Any], str]:
    return [(pytree.GetAttrKey(name), x) for name, x in _leaves(state).items()], _flatten(state)[1]


def _unflatten(leaves: Any, context: Any) -> LinearAttentionState:
    names, _, identity = context.partition("; ")
    return LinearAttentionState(identity=identity, **dict(zip(names.split(), leaves, strict=True)))


torch.serialization.add_safe_globals([LinearAttentionState])  # torch.load accepts no other classes
pytree.register_pytree_node(
    LinearAttentionState,
    _flatten,
    _unflatten,
    serialized_type_name="linrope.LinearAttentionState",
    flatten_with_keys_fn=_flatten_with_keys,
)
