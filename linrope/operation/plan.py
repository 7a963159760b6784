"""``Plan``: what the settings of a call and the shapes of its tensors determine, found once for all such calls.

The calls of a training run or of a decoding loop differ in their numbers alone, so ``plan_of`` keeps the plans that it
has made. Numbers are checked in every call: by ``operation.checks``, or by the kernel that takes a decoding step.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch

from linrope import backends
from linrope.backends import native
from linrope.backends.protocol import Backend
from linrope.backends.steady import Steady
from linrope.common.private_names import forward_mode
from linrope.common.tracing import plain
from linrope.feature_maps import FeatureMap
from linrope.operation import checks, head_first
from linrope.operation.map_facts import MapFacts, facts_of
from linrope.recurrence.call import Call, Inputs, Settings, TokenLayout
from linrope.recurrence.identities import WITHOUT_Z
from linrope.recurrence.packing import Tokens
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary

_MOST_PLANS = 2048
PLANS: dict[Hashable, Any] = {}  # with those of linrope.ops, whose keys have three parts instead of five


@dataclass
class Plan:
    """How calls with these settings and shapes are computed."""

    named_map: FeatureMap | None  # if the call gives a name; an object is read from the call
    maps_in_python: bool  # True: the backend gets features, or for "exp" what it maps to them
    identity: str | None  # of the next state; None: it depends on the weights of the map
    # Fields in which a backend's call differs from the call: its map and rotation. If ``steady`` calls differ in no
    # others but the positions, the first one adds these.
    resolved: dict[str, Any]
    warning: str | None
    backend: Backend | None = None  # ``backends.choose`` looks at the features: the first call fills it in
    # For one more token of each sequence, without a mask, packing or positions of its own
    step: native.Step | None = None
    # True: all such calls have the same positions, and a backend gets their own tensors but for gates out of range. The
    # first one fills in ``tokens``, the positions, and for the backend native ``direct``, which computes the others.
    steady: bool = False
    tokens: Tokens | None = None
    direct: Steady | None = None


def plan_of(call: Call) -> Plan:
    """The plan of this call. Raises TypeError or ValueError if its settings and shapes do not fit."""
    key = None if torch.compiler.is_compiling() else _key(call)
    try:
        plan: Plan | None = None if key is None else PLANS.get(key)
    except TypeError:  # an argument that cannot be looked up, and that is of no type that a call takes
        key, plan = None, None
    if plan is None:
        plan = _make(call, traced=key is None)
        if key is not None:
            keep(key, plan)
    return plan


def keep(key: Hashable, plan: Any) -> None:
    """Keeps a plan for all calls with this key."""
    if len(PLANS) >= _MOST_PLANS:
        PLANS.clear()
    PLANS[key] = plan


def forget_plans() -> None:
    """Forgets all plans, also those of linrope.ops, so that the next calls choose their backends anew."""
    PLANS.clear()


_settings = [field.name for field in fields(Settings) if field.name != "feature_map"]
_settings_of = attrgetter(*_settings, "rotary", "rope_order", "backend")
_tensors_of = attrgetter(*[field.name for group in (Inputs, TokenLayout) for field in fields(group)], "decay")


def _key(call: Call) -> Hashable | None:
    """All that ``_make`` reads, but the numbers in tensors: a fact that is missing here is a wrong plan, not an error.

    None: the call is traced, or has arguments of a type that is to be refused, or a rotation whose angles may change.
    """
    settings, tensors, state = _settings_of(call), _tensors_of(call), call.state
    rotary = call.rotary
    if not plain(tensors) or forward_mode() or (rotary is not None and type(rotary) is not Rotary):
        return None
    fmap: Hashable = call.feature_map
    if isinstance(fmap, FeatureMap):
        fmap = facts_of(fmap)
    elif type(fmap) is not str and fmap is not None:
        return None
    last = None
    if state is not None:
        if type(state) is not LinearAttentionState:
            return None
        kv, angle, slots = state.kv, state.angle, state.slots
        last = (
            state.identity,
            kv.shape,
            kv.dtype,
            kv.device,
            state.z.dtype,
            None if angle is None else angle.shape,
            None if slots is None else slots.shape,
        )
    shapes = tuple([x if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors])
    return settings, tuple(map(type, settings)), fmap, shapes, last  # the types, because 1 == True


def _make(call: Call, traced: bool) -> Plan:
    """Checks the settings and shapes of a call, and resolves its map and its rotation.

    traced: a graph may be recording the call. It cannot record the kernel of a step.
    """
    fmap = checks.check_settings(call)
    state, rotary, device = call.state, call.rotary, call.k.device
    if state is not None:
        checks.check_state(call, fmap)
    facts = facts_of(fmap)
    xpos = None if rotary is None else rotary.xpos_log_decay
    by_features = rotary is not None and call.rope_order == "after"
    plan = Plan(
        named_map=fmap if isinstance(call.feature_map, str) else None,
        maps_in_python=facts.elementwise is None or facts.log_scaled,
        identity=None if facts.identity is None else next_identity(call, facts),
        resolved={
            "feature_map": facts.elementwise or "identity",
            "query_factor": facts.query_factor,
            "theta_turns": rotary.turns_per_position(device) if rotary is not None and by_features else None,
            "layout": "interleaved" if rotary is None else rotary.layout,
            "xpos_log_decay": None if xpos is None else xpos.to(device),
        },
        warning=head_first.warning(call),
    )
    # Python applies UnitMap itself, in float32 or wider, in two cases: it rotates q and k, or multiplies them by a
    # factor, before the map; or no backend can run the call with a query_factor.
    resolved = call.changed(decay=None, **plan.resolved)
    if facts.query_factor and (
        (rotary is not None and not (by_features and rotary.attention_factor == 1))
        or isinstance(backends.first_of(call.backend, resolved, state), str)
    ):
        plan.maps_in_python = True
        plan.resolved |= {"feature_map": "identity", "query_factor": 0.0}
    by_kernel = (  # a kernel applies the map, and rotates by consecutive positions
        not traced
        and not plan.maps_in_python
        and call.positions is call.key_positions is call.cu_seqlens is None
        and (
            rotary is None
            or (by_features and rotary.attention_factor == 1 and rotary.axes is rotary.xpos is None)
        )
    )
    plan.steady = by_kernel and state is None and call.decay is call.angle_steps is None
    is_step = (
        by_kernel
        and state is not None
        and call.q is not None
        and call.k.shape[1] == 1
        and call.causal
        and call.key_mask is None
    )
    if is_step:
        plan.backend = backends.choose(call.backend, resolved, state)
        plan.step = native.Step(resolved) if plan.backend is native else None
    return plan


def identity_of(fmap: FeatureMap | MapFacts | None, rotary: Rotary | None, rope_order: str) -> str:
    """The identity stored in a state. A call with another map or rotation rejects the state."""
    order = " before" if rope_order == "before" else ""
    return f"{'features' if fmap is None else fmap.identity}; {rotary and rotary.identity}{order}"


def next_identity(call: Call, fmap: FeatureMap | MapFacts | None) -> str:
    """The identity of the state after the call. Raises ValueError if calls of another identity made its own state."""
    identity, state = identity_of(fmap, call.rotary, call.rope_order), call.state
    without_z = call.erase is not None
    if state is not None:
        checks.check_identity(state, identity)
        without_z = without_z or state.identity.endswith(WITHOUT_Z)
    return identity + (WITHOUT_Z if without_z else "")
