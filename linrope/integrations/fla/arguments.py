"""fla's arguments as those of ``linear_rope_attention``."""

import math
from typing import Any

import torch
from torch import Tensor

from linrope.common.argument_checks import check_numbers
from linrope.integrations.maps import unit_map
from linrope.operation.checks import check_tensors
from linrope.operation.from_sums import state_from_sums
from linrope.operation.functional import linear_rope_attention

_EPS = 1e-10  # what fla adds to a normalizer
UNREAD = {"chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "safe_gate", "max_num_seqs"}
REFUSED = {
    "reverse": "expected False: flip the tokens of all inputs with x.flip(1), and those of o",
    "gv": "expected None: the columns of a value decay alike; per-feature decays, gk, are those of the keys",
    "cp_context": "expected None: linear_rope_attention(.., shard=linrope.distributed.Shard(..)) shards sequences",
    "use_graph": "expected False: nothing is captured here",
    "return_intermediate_states": "expected False: call on pieces with output_final_state=True for their states",
    "head_first": "expected (B, T, H, ..): transpose axes 1 and 2 of q, k, v and the gates, and of o",
    "transpose_state_layout": "expected its new name, state_v_first",
}


def refuse(name: str, value: Any) -> None:
    """Raises for an argument that has no counterpart, and for an unknown name among fla's **kwargs."""
    if name not in UNREAD | REFUSED.keys():
        raise TypeError(f"{name}: unknown argument; help(linrope.integrations.fla) lists the known ones")
    if name in REFUSED and value is not None and value is not False:
        got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}: got {got}, {REFUSED[name]}")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    unit: bool = False,
    normalize: bool = False,
    decay_name: str = "g",
) -> tuple[Tensor, Any]:
    """One call of ``linear_rope_attention``: (o, final state or None).

    unit: use_qk_l2norm_in_kernel. normalize: both states are (kv, z), with z (N, 1, HV, K). decay_name: fla's name of
    the decay, for errors.
    """
    check_tensors(q, k, v, causal=True)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    check_numbers(scale=scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: expected a positive finite number or None")
    feature_map = unit_map(k.shape[-1], float(scale)) if unit else None
    state = None
    try:
        if initial_state is not None:
            kv, z = _sums(initial_state, normalize)
            kv = kv.mT if state_v_first else kv
            state = state_from_sums(kv, z, feature_map=feature_map)
        result = linear_rope_attention(
            q if unit or normalize else q * scale,
            k,
            v,
            feature_map=feature_map,
            normalize=normalize,
            eps=_EPS / scale,  # of the normalizer without the scale
            eps_mode="add",
            log_decay=g,
            write=beta,
            erase=beta,
            cu_seqlens=cu_seqlens,
            state=state,
            return_state=bool(output_final_state),
        )
    except (TypeError, ValueError) as error:
        names = dict.fromkeys(("kv", "z", "state"), "initial_state") | dict.fromkeys(
            ("write", "erase"), "beta"
        )
        names["log_decay"] = decay_name
        name, colon, rest = str(error).partition(":")
        raise type(error)(names.get(name, name) + colon + rest) from error
    if isinstance(result, Tensor):
        return result, None
    out, last = result
    final = last.kv.mT.contiguous() if state_v_first else last.kv
    return out, (final, last.z[:, None].to(final.dtype)) if normalize else final


def _sums(initial_state: Any, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """kv and z, in dtypes that a state has. As in fla, the keys before a state without z are not in the normalizer."""
    kv, z = initial_state if normalize and isinstance(initial_state, tuple) else (initial_state, None)
    if not isinstance(kv, Tensor):
        kind = "a tensor or (kv, z)" if normalize else "a tensor"
        raise TypeError(f"initial_state: got {type(kv).__name__}, expected {kind}")
    if kv.dtype in (torch.bfloat16, torch.float16):
        kv = kv.float()
    if not normalize:
        return kv, None
    if z is None:
        return kv, kv.new_zeros(kv.shape[:3], dtype=torch.float64)
    if not isinstance(z, Tensor) or z.ndim != 4 or z.shape[1] != 1:
        got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise ValueError(f"initial_state: got z {got}, expected (N, 1, H, K)")
    return kv, z[:, 0].double()
