"""A state from sums that another library, or the caller, has computed."""

import torch
from torch import Tensor

from linrope.common.argument_checks import ROPE_ORDERS, check_name
from linrope.feature_maps import FeatureMap
from linrope.operation import checks
from linrope.operation.plan import identity_of
from linrope.operation.rotary_type import check_rotary_type
from linrope.recurrence.identities import WITHOUT_Z
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary


def state_from_sums(
    kv: Tensor,
    z: Tensor | None = None,
    *,
    feature_map: str | FeatureMap | None = "elu+1",
    rotary: Rotary | None = None,
    rope_order: str = "after",
    position: Tensor | None = None,
    angle: Tensor | None = None,
    log_scale: Tensor | None = None,
) -> LinearAttentionState:
    """Makes a state from sums that exist already, without copying kv.

        kv = sum_j e^(L - L_j) R(Theta_j) psi(k_j) v_j^T      z = sum_j e^(L - L_j) psi(k_j)

    If your sums x are stored as (b, g, e, f), as in Mamba, pass ``x.mT``. If the new state is donated, a decoding
    step of the backend "native" writes into the given memory, whether it holds (b, g, f, e) or (b, g, e, f).
    The backward pass of a call with gradients reads kv again: pass a copy if its owner overwrites it before then.

    Args:
        kv: (b, g, f, e), float32 or float64.
        z: (b, g, f). None: unknown. Calls with normalize=True then reject this state and every state computed from it.
        feature_map: the feature map of the calls that will use this state. A map whose number of features differs from
            the head's size, such as taylor2, must be passed as the object that ``feature_maps.make`` made, because the
            head's size cannot be told from kv.
        rotary: the rotation of these calls.
        rope_order: the rope_order of these calls.
        position: (b,) int64, the position of the next token. Default: 0, which is right for any number of earlier
            tokens if the calls pass no positions, and neither the rotation nor the map depends on them.
        angle: (b, g or 1, pairs) int64, the sum of the angle steps in 2^-64 turns, if the calls have angle_steps.
        log_scale: (b, g) float64, required if the map returns a log_scale, and None otherwise. kv and z are then the
            sums times e^-log_scale.

    Raises:
        TypeError, ValueError: a tensor of another type or shape, an unknown name, or a log_scale that the map does not
            return or that is missing.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 18 and 19; RoFormer eq. 19.

    >>> from linrope import linear_rope_attention, state_from_sums
    >>> mamba_state = torch.zeros(1, 2, 8, 4)  # (b, heads, values, features)
    >>> state = state_from_sums(mamba_state.mT, feature_map=None).donate()
    >>> q, k, v = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 8)
    >>> out = linear_rope_attention(q, k, v, feature_map=None, normalize=False, state=state)
    >>> out[0, 0, 0, 0].item(), mamba_state[0, 0, 0].tolist()
    (4.0, [1.0, 1.0, 1.0, 1.0])
    """
    optional = {"z": z, "position": position, "angle": angle, "log_scale": log_scale}
    tensors = {"kv": kv} | {name: x for name, x in optional.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor")
    if kv.ndim != 4:
        raise ValueError(f"kv: got shape {tuple(kv.shape)}, expected (b, g, f, e)")
    check_name("rope_order", rope_order, ROPE_ORDERS)
    check_rotary_type(rotary)
    features = kv.shape[2]
    head_dim = getattr(feature_map, "head_dim", None) or features
    fmap = checks.resolve_map(feature_map, head_dim)
    if fmap is not None and fmap.feature_dim not in (None, features):
        if isinstance(feature_map, str):
            expected = (
                "the object that feature_maps.make made, because the name does not tell the head's size"
            )
            raise ValueError(
                f"feature_map={feature_map!r}: got kv of {features} features, expected {expected}"
            )
        raise ValueError(f"kv: got {features} features, expected the {fmap.feature_dim} of {feature_map}")
    scaled = fmap is not None and fmap.log_scaled
    if scaled != (log_scale is not None):
        expected = "a tensor (b, g), zeros for sums that are not scaled" if scaled else "None"
        got = "None" if log_scale is None else "a tensor"
        raise ValueError(f"log_scale: got {got}, expected {expected}, with feature_map={feature_map!r}")
    identity = identity_of(fmap, rotary, rope_order)
    if z is None:
        identity += WITHOUT_Z
        z = kv.new_zeros(kv.shape[:3], dtype=torch.float64)
    if position is None:
        position = torch.zeros(len(kv), dtype=torch.int64, device=kv.device)
    return LinearAttentionState(kv, z, position, identity, angle=angle, log_scale=log_scale)
