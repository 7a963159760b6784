"""Equation 19 on CPUs, in the compiled kernels of kernels/cpu. ``why_not`` says why, if they cannot be loaded.

Sums are float32, z is float64. For the backward pass the forward pass saves the states before blocks of tokens and,
with ``erase``, what each token wrote; the rest is recomputed from the inputs.
"""

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from linrope.backends import bridge, library
from linrope.backends.protocol import COMMON
from linrope.backends.value_columns import Divided, parts_of
from linrope.common.tracing import traced
from linrope.feature_maps import ELEMENTWISE
from linrope.recurrence.call import (
    INPUTS,
    TOKEN_INPUTS,
    Call,
    Gradients,
    ResultGradients,
    Results,
    Sums,
    contiguous,
    dense_heads,
    needs_gradients,
    summed_to,
    sums_of,
    with_dense_rows,
)
from linrope.recurrence.state import LinearAttentionState

OPTIONS, TAKES_VALUE_GROUPS, CLAMPS_GATES = COMMON | {"erase", "query_factor"}, True, False
MAX_DIM, MAX_TAPS, MAX_VALUES, BLOCK = map(library.limit, ("max_dim", "max_taps", "max_values", "block"))
LAYOUTS, WRITE_FACTORS = map(library.numbers_of, ("layouts", "write_factors"))
# Without a library all maps count as computed, so that the missing library is the reason why a call cannot run
MAPS: Mapping[str, Any] = library.numbers_of("maps") or ELEMENTWISE

_in_use = next(iter(library.INSTRUCTION_SETS), None)
why_not = library.why_not


def instruction_sets() -> list[str]:
    """The instruction sets with kernels that this machine can run, the best one first."""
    return [*library.INSTRUCTION_SETS]


def instruction_set() -> str | None:
    """The instruction set in use."""
    return _in_use


def use_instruction_set(name: str) -> None:
    """Switches to another of ``instruction_sets``, for tests. Raises RuntimeError for other names."""
    global _in_use
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    if name not in library.INSTRUCTION_SETS:
        raise RuntimeError(f"name: got {name!r}, expected one of {', '.join(library.INSTRUCTION_SETS)}")
    library.use_instruction_set(name)
    _in_use = name


def why_not_on(device: torch.device, dtypes: Collection[torch.dtype]) -> str | None:
    """The reason why no kernel takes tensors of these dtypes there; None: they do."""
    if torch.float64 in dtypes:
        return "float64: use backend='eager'"
    return None if device.type == "cpu" else f"tensors on {device}: native runs on CPUs only"


def why_not_call(call: Call, state: LinearAttentionState | None) -> str | None:
    f, e = call.k.shape[3], call.v.shape[3]
    if (reason := why_not_on(call.k.device, (call.k.dtype, call.v.dtype))) is not None:
        return reason
    if state is not None and (state.kv.dtype != torch.float32 or state.z.dtype != torch.float64):
        return f"a state with kv in {state.kv.dtype} and z in {state.z.dtype}: use backend='eager'"
    if library.WHY_NOT is None and max(f, e) > MAX_DIM:
        return (
            f"{f} features and {e} values per head: native takes up to {MAX_DIM} of each; use backend='eager'"
        )
    return None


def attend(call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
    """out and, if wanted, the last sums. Without gradients it may update a donated state or a pool's rows."""
    if traced(call.k) or needs_gradients(call, state):
        return bridge.attend("native", call, state)
    # The library cuts other calls by tokens. With a decay per unit most of the work would be done again
    cut = call.erase is not None and not call.decays_by_unit
    if cut and (parts := parts_of(call)) > 1:
        divided = Divided.of(call, state, parts)
        return divided.joined(*attend(divided.call, divided.state))
    is_step = call.k.shape[1] == 1 and call.causal and call.q is not None and call.cu_seqlens is None
    if is_step and state is not None:
        return _step(call, state)
    if (
        state is not None
        and state.slots is not None
        and not (fits_in_place(state) and state.kv.is_contiguous())
    ):
        state = state.rows()  # a copy: the caller writes the results back
    sums, slots = sums_of(state), None if state is None else state.slots
    out, kv, z, _ = _forward(call, sums, slots, save=False)
    if not call.return_state:
        return out, None
    if sums is not None and slots is not None:  # the kernel has written the pool's rows
        if call.erase is not None:
            _clear_z(sums.z, slots)
        _count_write(*sums)
        return out, sums
    return out, Sums(kv, z, call.last_angle(None if sums is None else sums.angle))


# Tensors that a step's kernel takes as the call has them
_OF_TOKEN = [name for name in INPUTS if name != "log_decay"]


class Step:
    """One more token of each sequence, for calls that differ in their numbers alone.

    What these calls share is put together once. The kernel checks all numbers before it writes any.
    """

    def __init__(self, call: Call) -> None:
        names = [name for name in _OF_TOKEN if getattr(call, name) is not None]
        self._tensors_of = attrgetter(*names)
        self.shared = settings(call) | {"advance": True}
        state = call.state
        assert state is not None
        self._has_angle_or_slots = not (call.angle_steps is state.angle is state.slots is None)
        names += "kv", "positions", "z", "log_decay"
        names += ("angle", "slots") if self._has_angle_or_slots else ()
        self._run = library.Prepared("step", self.shared, names)

    def __call__(
        self, call: Call, log_decay: Tensor | None, state: LinearAttentionState, in_place: bool
    ) -> tuple[Tensor, Sums, Tensor]:
        """out, the sums after the token and the positions after it: in the state's memory if ``in_place``."""
        sums, slots = _memory_of_step(call, state, in_place)
        (kv, z, angle), position = sums, state.position
        if state.slots is not None:
            position = position[state.slots]
        elif not in_place:
            position = position.clone(memory_format=torch.contiguous_format)
        of_state = kv, position, z if call.erase is None else None
        angle_and_slots = (angle, slots) if self._has_angle_or_slots else ()
        out = self._run(*dense_heads(self._tensors_of(call), 3), *of_state, log_decay, *angle_and_slots)
        if call.erase is not None:
            _clear_z(z, slots)
        if in_place:
            _count_write(kv, z, position, angle)
        return out, sums, position


def _step(call: Call, state: LinearAttentionState) -> tuple[Tensor, Sums]:
    """One token of every sequence, for calls that ``Step`` does not take, for example with a mask.

    It is computed in the state's memory if the kernel may write there.
    """
    in_place = (state.donated or state.slots is not None) and fits_in_place(state)
    sums, slots = _memory_of_step(call, state, in_place)
    q, k, v, same_dtype = _kernel_qkv(call)
    token = {
        "q": q,
        "k": k,
        "v": v,
        "kv": sums.kv,
        "z": sums.z if call.erase is None else None,
        "angle": sums.angle,
        "slots": slots,
        "key_mask": call.key_mask,
        "advance": False,
        **{name: getattr(call, name) for name in TOKEN_INPUTS},
    }
    out = library.run_by_name("step", token | positions(call) | settings(call))
    if call.erase is not None:
        _clear_z(sums.z, slots)
    if in_place:
        _count_write(*sums)
    return out if same_dtype else out.to(call.v.dtype), sums


def fits_in_place(state: LinearAttentionState) -> bool:
    """True if a step's kernel can update the state in place: kv may lie in memory as (b, g, e, f), too."""
    kv, z, position, angle = state.kv, state.z, state.position, state.angle
    if not kv.is_contiguous() and not kv.mT.is_contiguous():
        return False
    if not z.is_contiguous() or not position.is_contiguous() or not (angle is None or angle.is_contiguous()):
        return False
    inference = kv.is_inference() or z.is_inference() or position.is_inference()
    inference |= angle is not None and angle.is_inference()
    return not inference or torch.is_inference_mode_enabled()


def _memory_of_step(call: Call, state: LinearAttentionState, in_place: bool) -> tuple[Sums, Tensor | None]:
    """Where a step reads and writes the sums, and its rows there."""
    rows = state if in_place else state.rows()
    kv, z, angle = rows.kv, rows.z, rows.angle
    if not in_place:
        kv, z = (x.clone(memory_format=torch.contiguous_format) for x in (kv, z))
        angle = None if angle is None else angle.clone(memory_format=torch.contiguous_format)
    if call.angle_steps is not None:
        heads, pairs = call.angle_steps.shape[2:]
        if angle is None:  # the state was made without angle_steps
            angle = state.position.new_zeros(len(kv), heads, pairs)
        elif angle.shape[1] < heads:  # or with steps that all heads share
            angle = angle.expand(-1, heads, -1).clone(memory_format=torch.contiguous_format)
    return Sums(kv, z, angle), rows.slots


def _clear_z(z: Tensor, slots: Tensor | None) -> None:
    """Makes a state one without z, as it is after a call with erase: once the kernel has refused nothing."""
    z.zero_() if slots is None else z.index_fill_(0, slots, 0)


def _count_write(*written: Tensor | None) -> None:
    """Tells autograd that a kernel wrote to these tensors: a backward pass that requires the old numbers raises."""
    increment_version([x for x in written if x is not None])


def settings(call: Call) -> dict[str, Any]:
    """The kernels' arguments that stay the same from token to token."""
    return {
        "feature_map": MAPS[call.feature_map],
        "query_factor": call.query_factor,
        "theta": call.theta_turns,
        "layout": LAYOUTS[call.layout if call.pairs else "none"],
        "normalize": call.normalize,
        "eps": call.eps,
        "add_eps": call.eps_mode == "add",
        "save_z": _saves_z(call),
    }


def _saves_z(call: Call) -> bool:
    return call.causal and call.erase is None and (call.normalize or call.return_state)


def _saved_blocks(call: Call) -> int:
    """How many blocks of tokens have a state before them that the backward pass requires."""
    b, m = call.k.shape[:2]
    return b * ((m - 1) // BLOCK) if m else 0


def saved_states(call: Call) -> list[str]:
    """The names of the sums before blocks that the kernel saves."""
    if not call.causal or _saved_blocks(call) == 0:
        return []
    return ["saved_kv", "saved_z"] if _saves_z(call) else ["saved_kv"]


def new_saved(call: Call) -> list[Tensor]:
    b, m, g, f, e = *call.v.shape[:3], call.k.shape[3], call.v.shape[3]
    blocks = _saved_blocks(call)
    real, erases = call.k.new_empty, call.erase is not None
    return [
        real(blocks, g, f, e, dtype=torch.float32) if call.causal else real(0, dtype=torch.float32),
        real(blocks, g, f, dtype=torch.float64) if _saves_z(call) else real(0, dtype=torch.float64),
        real(b, m, g, e, dtype=torch.float32) if erases else real(0, dtype=torch.float32),
    ]


def reads_results(call: Call) -> bool:
    return False


def forward(call: Call, sums: Sums | None, save: bool) -> Results:
    out, kv, z, saved = _forward(call, sums, None, save)
    last = (kv, z) if call.return_state else None
    return None if call.q is None else out, last, filled(call, saved) if save else []


def filled(call: Call, saved: Iterable[Tensor | None]) -> list[Tensor]:
    """What the kernel saved, with the empty tensors of ``new_saved`` for what it did not."""
    return [new if x is None else x for x, new in zip(saved, new_saved(call), strict=True)]


def _forward(
    call: Call, sums: Sums | None, slots: Tensor | None, save: bool
) -> tuple[Tensor, Any, Any, list[Tensor | None]]:
    """out, the last kv and z if wanted, and what the kernel saved."""
    q, k, v, same_dtype = _kernel_qkv(call)
    arguments = {
        "q": q if call.q is not None else None,
        "k": k,
        "v": v,
        "slots": slots,
        "want_state": call.return_state,
        "save": save,
    }
    out, kv, z, *saved = library.run_by_name("forward", arguments | _tensors(call, sums) | settings(call))
    if call.erase is not None and kv is not None:
        z = kv.new_zeros(kv.shape[:-1], dtype=torch.float64)  # states without z hold zeros
    return out if same_dtype else out.to(call.v.dtype), kv, z, saved


def _input_gradient(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient in the shape of the input ``like``; zeros if ``gradient`` is None. None without ``like``."""
    if like is None or gradient is None:
        return None if like is None else torch.zeros_like(like)
    return summed_to(gradient, like)


def sum_of_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient in the shape and dtype of the input ``like``. Several partial sums of a shared head are added up."""
    if gradient.shape[2] != (heads := like.shape[2]):
        gradient = gradient.unflatten(2, (heads, -1)).sum(3)
    return gradient.to(like.dtype)


def backward(call: Call, sums: Sums | None, saved: list[Tensor], g: ResultGradients) -> Gradients:
    q, k, v, _ = _kernel_qkv(call)
    # Without tokens the library has no gradients of the inputs per token.
    has_tokens = call.k.shape[1] > 0
    wanted = ("log_decay", "angle_steps", "write", "erase")
    arguments = {
        "g_out": None if g.out is None else with_dense_rows(g.out.to(v.dtype)),
        "g_kv": contiguous(g.kv),
        "g_z": contiguous(g.z) if call.erase is None else None,
        "q": q if call.q is not None else None,
        "k": k,
        "v": v,
        **dict(
            zip(("saved_kv", "saved_z", "saved_u"), (x if x.ndim > 1 else None for x in saved), strict=True)
        ),
        **{f"want_{name}": has_tokens and getattr(call, name) is not None for name in wanted},
    }
    found = library.named_results("backward", arguments | _tensors(call, sums) | settings(call))
    if has_tokens and not call.decays_by_unit and call.log_decay is not None:
        found["log_decay"] = found["log_decay"].squeeze(3)
    if sums is not None and call.erase is not None:
        found["z"] = torch.zeros_like(sums.z)
    return Gradients(
        q=None if call.q is None else sum_of_heads(found["q"], q),
        k=sum_of_heads(found["k"], k),
        v=found["v"].to(call.v.dtype),
        **{
            name: _input_gradient(found[name] if has_tokens else None, getattr(call, name)) for name in wanted
        },
        kv=None if sums is None else found["kv"],
        z=None if sums is None else found["z"],
    )


def positions(call: Call) -> dict[str, Tensor | None]:
    """The positions of queries and keys; none if no angle depends on them."""
    if call.theta_turns is None:
        return {"positions": None, "key_positions": None}
    return {"positions": call.positions.contiguous(), "key_positions": contiguous(call.key_positions)}


def _tensors(call: Call, sums: Sums | None) -> dict[str, Any]:
    """The arguments that the forward and backward kernels share, in addition to ``settings``."""
    return {
        **positions(call),
        "log_decay": call.log_decay,
        "write": call.write,
        "erase": call.erase,
        "angle_steps": call.angle_steps,
        "angle": None if sums is None else contiguous(sums.angle),
        "key_mask": contiguous(call.key_mask),
        "cu_seqlens": contiguous(call.cu_seqlens),
        "kv": None if sums is None else sums.kv.contiguous(),
        "z": None if sums is None or call.erase is not None else sums.z.contiguous(),
        "causal": call.causal,
    }


def _kernel_qkv(call: Call) -> tuple[Tensor, Tensor, Tensor, bool]:
    """q, k and v in one dtype with a last stride of 1, and whether the call already had them in one dtype."""
    q, k, v = call.k if call.q is None else call.q, call.k, call.v
    same_dtype = v.dtype == k.dtype == q.dtype
    if not same_dtype:  # a map's features are float32 even if v is half precision
        wide = torch.promote_types(k.dtype, v.dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    q, k, v = dense_heads((q, k, v), 3)
    return q, k, v, same_dtype
