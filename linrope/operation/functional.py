"""The public operation: ``linear_rope_attention`` and ``linear_rope_state``."""

from typing import Any, Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from linrope.common.keywords import PYTORCH, check_keywords, shows
from linrope.feature_maps import FeatureMap
from linrope.operation.attend import attend
from linrope.operation.options import Options
from linrope.operation.shards import TokenShard, check_shard
from linrope.recurrence.call import Call
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary

_INSTEAD = PYTORCH | {
    "context_positions": "key_positions",
    "forget_gate": "log_decay, the log of what the gate keeps",
    "write_gate": "write, the factor of each value",
    "erase_gate": "erase, the share that each token takes out",
}


@overload
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[False] = ...,
    shard: TokenShard | None = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[True],
    shard: TokenShard | None = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, LinearAttentionState]: ...
@overload
def linear_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: bool,
    shard: TokenShard | None = ...,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, LinearAttentionState]: ...
@shows({}, required=["q", "k", "v"])
def linear_rope_attention(
    q: Tensor = None,  # type: ignore[assignment]
    k: Tensor = None,  # type: ignore[assignment]
    v: Tensor = None,  # type: ignore[assignment]
    *others: Any,
    feature_map: str | FeatureMap | None = "elu+1",
    rotary: Rotary | None = None,
    causal: bool = True,
    normalize: bool = True,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    angle_steps: Tensor | None = None,
    write: Tensor | None = None,
    erase: Tensor | None = None,
    positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearAttentionState | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    eps_mode: str = "clamp",
    rope_order: str = "after",
    backend: str = "auto",
    shard: TokenShard | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Linear attention with rotary position embedding on the feature maps.

        num_i = sum_j e^(L_i - L_j) <R(Theta_i) phi(q_i), R(Theta_j) psi(k_j)> w_j v_j
        den_i = sum_j e^(L_i - L_j) <phi(q_i), psi(k_j)>
        out_i = num_i / max(den_i, eps)

        Theta_i = p_i theta + sum_(t<=i) omega_t      angles, one per pair of features
        L_i     = sum_(t<=i) a_t                      log decay, one per key/value head, or one per unit
        a_t     = log_decay_t + (p_t - p_(t-1)) log gamma

    The sums run over j <= i (causal) or over all keys. A query that sees no key gets 0. With causal=True, training,
    prefill and decoding are this one call: a sequence in pieces, each with the state that the piece before returned,
    gives the same result as the whole sequence.

    Args:
        q: (b, n, h, d) queries; float64, float32, bfloat16 or float16.
        k: (b, m, g, d) keys; query head i reads key/value head i // (h/g).
        v: (b, m, g, e) values. If q has as many heads as k, v may have c times as many. Head i of v then reads
            head i // c of q and k, as if these were repeated. In all that follows, g and h are then the number of
            heads of v. Mamba-2 shares its C and B in this way. backend="native" makes no copies.
        feature_map: the name or FeatureMap of phi and psi. None: q and k already are features.
        rotary: the rotation R with its frequencies theta. None: plain linear attention (eq. 18).
        causal: whether query i sees only the keys j <= i of this call. If False, it sees all of them. Every query sees
            all keys of the state.
        normalize: False: the output is the numerator alone.
        decay: gamma in (0, 1], (g,), one per key/value head; None: 1. Causal attention only. Positions must then be
            non-decreasing.
        log_decay: (b or 1, n, g or 1) <= 0, a forget gate. When token t arrives, the sums over all earlier tokens
            are multiplied by e^(a_t). Token t itself does not decay. Causal attention only. Values below -10^4 count as
            -10^4, which keeps nothing. Or (b or 1, n, g or 1, units), as in GLA and Kimi Linear: one number per pair of
            features that turns, then one per feature that does not (all of them, without rotary and angle_steps). The
            features of a pair decay alike, or outputs would depend on absolute positions. decay adds to every unit.
            A log_decay per unit requires rope_order="after".
        angle_steps: omega, (b or 1, n, g or 1, pairs), the radians by which token t advances the rotation, in
            addition to its position. The first 2 * pairs features turn, in rotary's layout (interleaved without
            rotary).
        write: w, (b or 1, m, g or 1), the factor of each value in the numerator, for example a write gate, or Mamba's
            step size. None: 1. backend="native" does not store the products.
        erase: b, (b or 1, n, g or 1), as in DeltaNet: before token t writes, the share b of what its key reads is taken
            out. With S the sums that it finds, decayed, u_t = w_t v_t - b_t S^T R(Theta_t) psi(k_t) then takes the
            place of w_t v_t. None: 0. Requires causal=True and normalize=False, and allows no xPos. The state has no
            z. It stays bounded only if b_t |psi(k_t)|^2 <= 2: take feature_map="unit" and b <= 2, or divide b by
            |psi(k_t)|^2 and pass features with feature_map=None. Maps whose keys may be longer, such as the default,
            and maps with a log_scale are refused. With feature_map=None nothing checks the keys: long ones lead to NaN.
        positions: integers (n,) or (b, n), 0 .. 2^31 - 1. Default: 0, 1, .., or the positions that follow the
            state. If rotary has axes they are required, (n, axes) or (b, n, axes). For padded batches (left or right):
            ``(key_mask.cumsum(1) - 1).clamp(min=0)``.
        key_positions: the positions of the keys, (m,) or (b, m); with axes (m, axes) or (b, m, axes), and required if
            m != n. Default: positions if m == n, else 0, 1, .., or those that follow the state. Must be None with
            decay, log_decay or xPos.
        key_mask: bool (b, m); False hides a token from all queries. The log_decay and angle_steps of a hidden token
            count as 0, so it neither decays what came before it nor rotates what follows. A fixed decay still counts
            its position.
        cu_seqlens: int32 or int64 (s + 1,), the bounds of s packed sequences, with b == 1: sequence i is the tokens
            cu_seqlens[i] .. cu_seqlens[i + 1] - 1. Default positions restart in each sequence, and the state has s
            sequences. On a GPU and in torch.compile the values are not checked, but never cause an access out
            of bounds, and tokens outside of all sequences get outputs and gradients of 0.
        state: the state to continue from. Of a pool, ``state.at(slots)`` selects rows, which the call overwrites.
        return_state: True: return (out, state).
        eps: lower bound of the normalizer; relative to the largest key if the map returns a log_scale.
        eps_mode: "clamp"; or "add": out_i = num_i / (den_i + eps), as in other implementations.
        rope_order: "after" rotates the features (eq. 19). "before" rotates q and k instead, as in pretrained softmax
            models; except with the identity map, scores then depend on absolute position.
        backend: "auto", "reference" (quadratic if causal, in the inputs' dtype), "eager" (chunked), "native" (fused,
            for CPUs) or "triton" (fused, for GPUs). "auto" takes native on a CPU and triton on a GPU if they support
            the call, else eager; in torch.onnx.export it takes reference. "onnx" is for torch.onnx.export alone.
        shard: a ``linrope.distributed.Shard``. The tokens are then this rank's part of each sequence, and all ranks
            make this call. The shard holds cu_seqlens. Every rank passes the same state, and every rank returns the
            state after all tokens or, for packed sequences, after each of its own sequences.

    Returns:
        out (b, n, h, e) in v's dtype, or (out, state). All backends but reference sum in float32 or wider.

    Raises:
        TypeError: dtypes differ or are not floating, or positions or cu_seqlens are not integers.
        ValueError: shapes, devices, positions, decays, steps, mask, packing or state do not fit, a name is unknown,
            or a signed feature map is combined with normalize=True.
        RuntimeError: the backend cannot run this call, or state holds rows of a pool and the call needs gradients.

    Source: RoFormer eq. 19 (arXiv 2104.09864); decay as in RetNet (arXiv 2307.08621); gates and steps as in
    Mamba-2 (arXiv 2405.21060) and Selective RoPE (arXiv 2511.17388); erase as in Gated DeltaNet (arXiv 2412.06464);
    log_decay per unit as in GLA (arXiv 2312.06635) and, with erase, Kimi Linear (arXiv 2510.26692).

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64)
    >>> rotary = Rotary(64)
    >>> out = linear_rope_attention(q, k, v, rotary=rotary)
    >>> a, b = [x[:, :900] for x in (q, k, v)], [x[:, 900:] for x in (q, k, v)]
    >>> head, state = linear_rope_attention(*a, rotary=rotary, return_state=True)
    >>> tail = linear_rope_attention(*b, rotary=rotary, state=state)
    >>> torch.testing.assert_close(torch.cat((head, tail), 1), out)
    >>> packed = linear_rope_attention(q, k, v, rotary=rotary, cu_seqlens=torch.tensor([0, 900, 1000]))
    >>> torch.testing.assert_close(packed[:, :900], head)
    """
    if others or unknown:
        known = [*Options.__annotations__, "return_state", "shard"]
        check_keywords("linear_rope_attention", ["attn_mask"] if others else unknown, known, _INSTEAD)
    if q is None:  # a Call without q asks for the last state alone: see linear_rope_state
        raise TypeError("q: got NoneType, expected a dense torch.Tensor")
    call = Call(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        angle_steps=angle_steps,
        write=write,
        erase=erase,
        positions=positions,
        key_positions=key_positions,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        feature_map=feature_map,
        causal=causal,
        normalize=normalize,
        eps=eps,
        eps_mode=eps_mode,
        return_state=return_state,
        rotary=rotary,
        decay=decay,
        rope_order=rope_order,
        backend=backend,
        state=state,
    )
    if shard is None:
        out, last = attend(call)
    else:
        check_shard(shard)
        out, last = shard.attend(call)
    return (out, last) if return_state and last is not None else out


def linear_rope_state(
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | FeatureMap | None = "elu+1",
    rotary: Rotary | None = None,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    angle_steps: Tensor | None = None,
    write: Tensor | None = None,
    erase: Tensor | None = None,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LinearAttentionState | None = None,
    rope_order: str = "after",
    backend: str = "auto",
) -> LinearAttentionState:
    """The state that ``linear_rope_attention`` would return, without the outputs and at a fraction of the cost.

        kv = sum_j e^(L - L_j) R(Theta_j) psi(k_j) w_j v_j^T      z = sum_j e^(L - L_j) psi(k_j)

    Arguments, errors and source are those of ``linear_rope_attention``. k and v may have no tokens: the
    result is then the given state, or an empty one.

    >>> q, k, v = torch.randn(3, 1, 100, 8, 64)
    >>> _, state = linear_rope_attention(q, k, v, return_state=True)
    >>> torch.testing.assert_close(linear_rope_state(k, v).kv, state.kv)
    """
    call = Call(
        q=None,
        k=k,
        v=v,
        log_decay=log_decay,
        angle_steps=angle_steps,
        decay=decay,
        write=write,
        erase=erase,
        positions=positions,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        feature_map=feature_map,
        rotary=rotary,
        normalize=False,
        rope_order=rope_order,
        backend=backend,
        state=state,
        return_state=True,
    )
    last = attend(call)[1]
    assert last is not None
    return last
