"""The key of a plan has all that planning reads: a fact that it lacks would be a wrong plan, not an error."""

import sys
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.backends import NAMES
from linrope.feature_maps import ElementwiseMap, FeatureMap
from linrope.feature_maps.paired import PairedMap
from linrope.feature_maps.unit import UnitMap
from linrope.operation import plan
from linrope.operation.map_facts import MapFacts, facts_of
from linrope.recurrence.call import Call, Resolved
from tests.support.options import Row, draw, problem
from tests.support.oracle import randoms

OF_SHAPE, OF_DTYPE = {"shape", "ndim", "__len__"}, {"dtype", "is_floating_point"}
OF_TENSOR = {*OF_SHAPE, *OF_DTYPE, "device", "layout"}
# What planning may read of a call's tensors, by the name of the argument, and of a state's
OF_STATE = {"kv": OF_TENSOR - {"layout"}, "z": OF_DTYPE, "angle": OF_SHAPE, "slots": OF_SHAPE}
# What it may read of other objects. A rotation is its own key: one of the same class and identity is equal
OF_OBJECT = {
    FeatureMap: {*MapFacts._fields, "__class__"},  # the key tells maps from names
    LinearAttentionState: {"identity", "sequences", *OF_STATE},
    Rotary: {
        *("dim", "rotary_dim", "heads", "layout", "axes", "xpos", "attention_factor", "identity"),
        *("turns_per_position", "xpos_log_decay"),
    },
}
Reads = set[tuple[str, str]]  # what was read, and of which object or tensor
ROWS = draw(0, together=1) + [
    row for row in draw(1, {"tokens": ("one", "two chunks")}) if row["erase"] != "none"
]


class Watched(Tensor):
    """A tensor that notes what is read of it, if it has a label."""

    label: str
    reads: Reads

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__
        for x in args:
            if isinstance(x, Watched) and "label" in vars(x):
                x.reads.add((read, x.label))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def watched(tensors: dict[str, Any], reads: Reads, prefix: str = "") -> dict[str, Any]:
    found = dict(tensors)
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            found[name] = y = x.detach().as_subclass(Watched)
            y.label, y.reads = prefix + name, reads
    return found


def watch_objects(reads: Reads, patch: pytest.MonkeyPatch) -> None:
    """Notes what is read of maps, states and rotations, but by ``facts_of`` and by their own methods."""

    def by_others(self: object) -> bool:
        frame: Any = sys._getframe(2)
        if frame.f_locals.get("self") is self:
            return False
        while frame is not None and frame.f_code is not facts_of.__code__:
            frame = frame.f_back
        return frame is None

    for kind in OF_OBJECT:

        def look(self: Any, name: str, kind: type = kind) -> Any:
            if by_others(self):
                reads.add((name, kind.__name__))
            return object.__getattribute__(self, name)

        patch.setattr(kind, "__getattribute__", look, raising=False)


def reads_of_planning(row: Row, backend: str) -> Reads:
    reads: Reads = set()
    qkv, state, how = problem(row, torch.float32)
    tensors = watched(dict(zip("qkv", qkv, strict=True)) | how, reads)
    if state is not None:
        state = replace(state, **watched(state.tensors(), reads, "state."))
    call = Call(**tensors, state=state, backend=backend, return_state=True)
    reads.clear()
    with pytest.MonkeyPatch.context() as patch, suppress(RuntimeError):  # a backend may refuse the call
        watch_objects(reads, patch)
        plan._make(call, traced=False)
    return reads


@pytest.mark.parametrize("backend", NAMES)
def test_planning_reads_nothing_that_the_key_lacks(backend: str) -> None:
    reads = set().union(*[reads_of_planning(row, backend) for row in ROWS])
    allowed = {(name, kind.__name__) for kind, names in OF_OBJECT.items() for name in names}
    allowed |= {(name, f"state.{tensor}") for tensor, names in OF_STATE.items() for name in names}
    of_inputs = {(name, x) for name, x in reads if x in Call.__dataclass_fields__}
    assert {name for name, _ in of_inputs} <= OF_TENSOR
    assert reads - of_inputs - allowed == set()
    assert {"shape", "dtype"} <= {name for name, _ in of_inputs}
    assert {("xpos", "Rotary"), ("kv", "LinearAttentionState"), ("shape", "state.kv")} <= reads


def test_the_key_has_every_field_of_a_call() -> None:
    """Apart from those of ``Resolved``, which the plan itself determines."""
    call = Call(**dict(zip("qkv", randoms(1, 5, 2, 4), strict=True)))
    in_key = {*plan._settings_of.__reduce__()[1], *plan._tensors_of.__reduce__()[1], "feature_map", "state"}
    assert in_key == {x.name for x in fields(call)} - {x.name for x in fields(Resolved)}


def hooked(name: str) -> ElementwiseMap:
    fmap = ElementwiseMap(name, 4)
    fmap.register_forward_hook(lambda *_: None)
    return fmap


class Unchanged(ElementwiseMap):
    pass


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        ({"feature_map": PairedMap(UnitMap(4))}, {"feature_map": PairedMap(ElementwiseMap("identity", 4))}, ValueError),
        ({"feature_map": UnitMap(4)}, {"feature_map": Unchanged("identity", 4)}, ValueError),
        ({}, {"q": torch.ones(1, 5, 2, 4).double().to_sparse()}, TypeError),
        ({}, {"erase": torch.ones(1, 5, 2).double().to_sparse()}, TypeError),
    ],
)  # fmt: skip
def test_a_call_is_refused_after_one_that_is_not(
    first: dict[str, Any], second: dict[str, Any], error: type[Exception]
) -> None:
    how: dict[str, Any] = dict(zip("qkv", randoms(1, 5, 2, 4), strict=True))
    how |= {"feature_map": "unit", "normalize": False, "erase": torch.ones(1, 5, 2, dtype=torch.float64)}
    for _ in range(2):
        linear_rope_attention(**how | first)
        with pytest.raises(error):
            linear_rope_attention(**how | second)


def test_maps_with_hooks_make_states_of_their_own() -> None:
    how: dict[str, Any] = dict(zip("qkv", randoms(1, 5, 2, 4), strict=True))
    identities = [
        linear_rope_attention(**how, feature_map=hooked(name), return_state=True)[1].identity
        for name in ("relu", "elu+1")
    ]
    assert identities == ["relu(4); None", "elu+1(4); None"]


class Named(FeatureMap):
    """Names the function that its queries and keys compute."""

    feature_dim, positive, elementwise = 4, True, "relu"

    def queries(self, q: Tensor) -> Tensor:
        return q.relu()

    def keys(self, k: Tensor) -> Tensor:
        return k.relu()


class OtherKeys(Named):
    def keys(self, k: Tensor) -> Tensor:
        return k.relu() * 2 + 1


class Wrapper(torch.nn.Module):
    """Passes attributes on, as PEFT's wrappers do, and computes something else."""

    def __init__(self, inner: FeatureMap) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, q: Tensor | None, k: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return OtherKeys().forward(q, k)


@pytest.mark.parametrize("backend", [x for x in NAMES if x not in ("auto", "triton", "native", "onnx")])
@pytest.mark.parametrize("fmap", [OtherKeys(), Wrapper(Named())], ids=["subclass", "wrapper"])
def test_what_a_map_computes_counts_and_not_the_function_that_it_names(fmap: Any, backend: str) -> None:
    q, k, v = randoms(1, 5, 2, 4)
    expected = linear_rope_attention(q.relu(), k.relu() * 2 + 1, v, feature_map=None, backend=backend)
    torch.testing.assert_close(linear_rope_attention(q, k, v, feature_map=fmap, backend=backend), expected)


class Slower(Rotary):
    factor = 4

    @property
    def identity(self) -> str:
        return f"slower {self.factor}"

    def turns_per_position(self, device: torch.device) -> Tensor:
        return super().turns_per_position(device) * self.factor


def test_the_angles_of_a_subclass_are_read_in_every_call() -> None:
    rotary, qkv = Slower(4), randoms(1, 5, 2, 4)
    first = linear_rope_attention(*qkv, rotary=rotary)
    rotary.factor = 1
    assert not torch.equal(linear_rope_attention(*qkv, rotary=rotary), first)
    torch.testing.assert_close(
        linear_rope_attention(*qkv, rotary=rotary), linear_rope_attention(*qkv, rotary=Rotary(4))
    )
