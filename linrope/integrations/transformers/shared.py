"""What the layers of several families share: the recurrence with a cache, the convolution, the gated norm, packed rows.

The functions take the arguments that transformers' functions of the same names take. b batch, n tokens, h heads of p
values, s features, c channels.
"""

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from linrope.feature_maps import FeatureMap
from linrope.integrations.transformers.past import record, recording_layer
from linrope.operation.from_sums import state_from_sums
from linrope.operation.functional import linear_rope_attention
from linrope.ops import convolve, gated_norm
from linrope.recurrence.state import LinearAttentionState

SILU = ("silu", "swish")  # the two names that transformers has for it
ACTIVATIONS = (*SILU, "sigmoid")  # of a gate


class Gates(NamedTuple):
    """The gates of ``linear_rope_attention``."""

    decay: Tensor | None = None  # (h,)
    log_decay: Tensor | None = None  # (b, n, h), as are the next two
    write: Tensor | None = None
    erase: Tensor | None = None


def state_before(
    sums: Tensor, dtype: torch.dtype, gradients: bool, feature_map: FeatureMap | None = None
) -> LinearAttentionState:
    """The state of a cache's sums (b, h, s, p).

    gradients: whether a backward pass will read the sums again. They are copied then, because the owner of the cache
    overwrites them with the sums after this call.
    """
    copied = sums.to(dtype, copy=gradients)
    return state_from_sums(copied, feature_map=feature_map)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    *,
    before: Tensor | None,
    return_state: bool,
    swapped: bool = False,
    feature_map: FeatureMap | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """linear_rope_attention without a normalizer: out (b, n, h, p) and, if wanted, the sums after the last token.

    before: a cache's sums (b, h, s, p), or (b, h, p, s) if swapped, as are the sums returned. seq_idx (b, n) or
    cu_seqlens (sequences + 1,) pack sequences into rows. There is then a row of sums after each sequence's last token.
    """
    rows = v.shape[:2]
    state = None
    before = before.mT if swapped and before is not None else before
    _record(before, k, v, gates, swapped, feature_map)
    if before is not None:
        wide = torch.promote_types(v.dtype, torch.float32)
        state = state_before(before, wide, requires_gradients(q, k, v, *gates), feature_map)
    if cu_seqlens is None and seq_idx is not None:
        cu_seqlens = packed_bounds(seq_idx)
    if cu_seqlens is not None:
        q, k, v = (_in_one_row(x) for x in (q, k, v))
        gates = Gates(gates.decay, *(None if x is None else _in_one_row(x) for x in gates[1:]))
    result = linear_rope_attention(
        q,
        k,
        v,
        feature_map=feature_map,
        normalize=False,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=return_state,
        **gates._asdict(),
    )
    out, last = result if isinstance(result, tuple) else (result, None)
    out = out.view(*rows, *out.shape[2:])
    if last is None:
        return out, None
    return out, last.kv.mT if swapped else last.kv


def _record(
    before: Tensor | None, k: Tensor, v: Tensor, gates: Gates, swapped: bool, feature_map: FeatureMap | None
) -> None:
    if (layer := recording_layer()) is None:
        return
    per_token = {"k": k, "v": v, "log_decay": gates.log_decay, "write": gates.write, "erase": gates.erase}
    record(layer, before, swapped, per_token, decay=gates.decay, feature_map=feature_map)


def _in_one_row(x: Tensor) -> Tensor:
    return x.reshape(1, -1, *x.shape[2:])


# The last state in each tensor of a cache: making one anew for every token would take as long as half a step.
_last_states: MutableMapping[Tensor, LinearAttentionState] = WeakTensorKeyDictionary()


def attend_in_place(
    cached: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    *,
    swapped: bool,
    feature_map: FeatureMap | None = None,
) -> Tensor:
    """One token of linear_rope_attention without a normalizer: out (b, 1, h, p). Overwrites the cached sums.

    cached: (b, h, s, p), or (b, h, p, s) if swapped.
    """
    kv = cached.mT if swapped else cached
    _record(kv, k, v, gates, swapped, feature_map)
    compiling = torch.compiler.is_compiling()
    gradients = requires_gradients(cached, q, k, v, *gates)
    if gradients:
        state = state_before(kv, kv.dtype, True, feature_map)
    else:
        last = None if compiling else _last_states.get(cached)
        if last is None or last.kv.data_ptr() != kv.data_ptr() or last.kv.stride() != kv.stride():
            last = state_before(kv.detach(), kv.dtype, False, feature_map)
        state = last.donate()
    out, after = linear_rope_attention(
        q, k, v, feature_map=feature_map, normalize=False, state=state, return_state=True, **gates._asdict()
    )
    if gradients or compiling:
        kv.copy_(after.kv)
    else:
        _last_states[cached] = after
    return out


def requires_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The causal convolution of channels (b, c, n) with weight (c, taps), and SiLU if activation names it."""
    b, c, n = hidden_states.shape
    x = hidden_states.transpose(1, 2)
    if cu_seqlens is None and seq_idx is not None:
        cu_seqlens = packed_bounds(seq_idx)
    if cu_seqlens is not None:
        x = x.reshape(1, b * n, c)
    y = convolve(x, weight, bias, cu_seqlens=cu_seqlens, silu=activation in SILU)
    return y.view(b, n, c).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Some tokens (b, c, n) of ``causal_conv1d_fn`` after those in conv_state (b, c, taps - 1 or more).

    conv_state then holds its last columns and these tokens. Sums are float32 or wider.
    """
    n, taps, columns = hidden_states.shape[-1], weight.shape[-1], conv_state.shape[-1]
    if (layer := recording_layer()) is not None:  # the cache's tensor grows until it is cropped
        index = next(i for i, x in layer.conv_states.items() if x is conv_state)
        inputs = layer.update_conv_state(hidden_states, index)
        inputs = inputs[..., 1 - n - taps :]
        return causal_conv1d_fn(inputs, weight, bias, activation)[..., -n:]
    first = columns - max(columns - n, taps - 1)
    inputs = torch.cat((conv_state[..., first:], hidden_states), -1)  # the backward pass reads this copy
    conv_state.copy_(inputs[..., inputs.shape[-1] - columns :])
    inputs = inputs[..., inputs.shape[-1] - n - taps + 1 :]
    if n != 1:
        return causal_conv1d_fn(inputs, weight, bias, activation)[..., taps - 1 :].to(hidden_states.dtype)
    wide = torch.promote_types(weight.dtype, torch.float32)
    y = torch.linalg.vecdot(inputs.to(wide), weight.to(wide))
    y = y if bias is None else y + bias
    y = F.silu(y) if activation in SILU else y
    return y.to(hidden_states.dtype)[..., None]


def norm_forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None, *, of_mamba2: bool) -> Tensor:
    """``forward`` of the classes of gated norms: RMS norm of each group of channels (.., c), times the gate.

    of_mamba2: the class has groups, and its gate, which is SiLU's, comes before the norm unless it says otherwise.
    """
    shape, size = hidden_states.shape, hidden_states.shape[-1]
    groups, gate_first, activation = 1, False, "silu"
    if of_mamba2:
        groups = size // self.group_size if hasattr(self, "group_size") else getattr(self, "n_groups", 1)
        gate_first = not getattr(self, "norm_before_gate", False)
    elif self.activation not in SILU:
        activation = self.activation
    y = gated_norm(
        hidden_states.reshape(1, -1, groups, size // groups),
        self.weight.view(groups, -1),
        eps=self.variance_epsilon,
        gate=None if gate is None else gate.reshape(1, -1, size),
        gate_order="before" if gate_first else "after",
        gate_activation=activation,
    )
    return y.view(shape)


def packed_bounds(seq_idx: Tensor) -> Tensor:
    """The bounds of the sequences that share rows, over all b n tokens. seq_idx (b, n): the sequence of each token."""
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    first = starts.flatten().nonzero()[:, 0]
    return torch.cat((first, first.new_tensor([seq_idx.numel()])))
