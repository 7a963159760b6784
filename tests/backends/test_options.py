"""Every backend is the equation, whichever options come together: output, last state, and all gradients."""

import inspect
from dataclasses import replace

import pytest
import torch

from linrope import Rotary, linear_rope_attention
from tests.support import options
from tests.support.contract import LONG, TABLE, Contract, check, computed
from tests.support.maps import MAPS
from tests.support.oracle import computes, every_kernel, randoms

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's
# Those that reach a backend as others of the table do
OTHER_MAPS = [label for label in MAPS if label not in options.OF_EACH_KIND]
# Values that reach a backend's code as others do. In tests/backends/test_equation.py test_every_map has each map,
# and test_every_size_of_heads both layouts of a part of the features; make test-long draws these values, too.
OF_PYTORCH = {
    "feature_map": {"relu", "relu2", "identity"},
    "rotary": {"half", "partial", "before the map"},
}
OF_KERNELS = {"feature_map": {"taylor2"}, "rotary": {"before the map", "xpos"}}
OF_THE_INTERPRETER = {
    "feature_map": {"favor+", "taylor2"},
    "rotary": {*OF_PYTORCH["rotary"], "yarn", "before the map, theta per head", "xpos"},
}
ALIKE = {"native": OF_KERNELS, "triton": OF_THE_INTERPRETER}


def draw(contract: Contract, seed: int = 0) -> list[options.Row]:
    """Rows that the backend can run, in which every two values come together; for Triton's interpreter, every value."""
    chosen: dict[str, list[str]] = {}
    if contract.backend in ("native", "triton"):
        chosen["rotary"] = [x for x in options.ROTATIONS if x != "xpos"]
    if seed == 0:
        alike = ALIKE.get(contract.backend, OF_PYTORCH)
        chosen |= {name: [x for x in options.OPTIONS[name] if x not in alike[name]] for name in alike}
    if contract.dtype.itemsize == 2:  # the contract does not count what is rounded before a backend has it
        chosen["rotary"] = [x for x in chosen["rotary"] if x != "yarn" and not x.startswith("before")]
        chosen["feature_map"] = ["elu+1", "relu", "relu2", "silu", "identity", "unit silu", "features"]
    chosen |= computed(contract.backend)
    if contract.backend == "triton":
        # tests/backends/test_equation.py has several chunks.
        chosen["tokens"] = [x for x in options.OPTIONS["tokens"] if "chunks" not in x]
    return options.draw(seed, chosen, together=1 if contract.backend == "triton" else 2)


def more(contract: Contract, i: int) -> list[pytest.MarkDecorator]:
    """Marks every second row of bfloat16 long, and of float16 the others: make test runs a row in one of the two."""
    others = {"native float16": 1, "native bfloat16": 0}
    return [LONG] if others.get(contract.name) == i % 2 else []


def compare(contract: Contract, row: options.Row, *, combined: bool = False) -> None:
    rotary = row["rotary"]
    before_a_backend = rotary == "yarn" or rotary.startswith("before") or row["feature_map"] == "favor+"
    if contract.dtype == torch.float32 and before_a_backend:  # q and k, or features, are rounded
        combined = True
    if combined:  # small normalizers, and sums that cancel, magnify what has been rounded
        row = row | {"eps": "large", "tokens": row["tokens"].replace("many", "two")}
    (q, k, v), state, how = options.problem(row, contract.dtype)
    if contract.dtype == torch.float64:  # of sums of logs as large as 1e5, for one
        contract = replace(contract, out=1e-10, sums=1e-10, gradients=1e-10)
    check(contract, q, k, v, state, combined=combined, every_set=not combined, **how)


@pytest.mark.parametrize(
    ("contract", "row"),
    [
        pytest.param(contract, row, id=f"{contract.name}-{i}", marks=(*contract.marks, *more(contract, i)))
        for contract in TABLE
        for i, row in enumerate(draw(contract))
    ],
)
def test_every_two_options(contract: Contract, row: options.Row) -> None:
    compare(contract, row)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("contract", [pytest.param(x, id=x.name, marks=x.marks) for x in TABLE if x.combined])
def test_every_two_options_beside_others(contract: Contract, seed: int) -> None:
    for row in draw(contract, seed):
        compare(contract, row, combined=True)


@pytest.mark.parametrize(
    "contract",
    [
        pytest.param(x, id=x.name, marks=(*x.marks, *((LONG,) if x.backend == "triton" else ())))
        for x in TABLE
        if x.dtype.itemsize > 2
    ],
)
def test_every_map_beside_other_options(contract: Contract) -> None:
    chosen = {
        "feature_map": [x for x in OTHER_MAPS if computes(contract.backend, x)],
        "tokens": ["two chunks"],
        "heads": ["alike", "grouped", "one of keys"],
    } | computed(contract.backend)
    for row in options.draw(1, chosen, together=1):
        if row["rotary"] == "xpos" and contract.backend in ("native", "triton"):
            row = row | {"rotary": "half"}
        compare(contract, row, combined=True)


def test_every_option_of_the_signature_is_in_the_table() -> None:
    signature = inspect.signature(linear_rope_attention).parameters.keys()
    apart = {"q", "k", "v", "rope_order", "return_state", "backend", "shard"}
    assert options.OPTIONS.keys() - {"heads", "tokens"} == signature - apart


@every_kernel
def test_xpos_is_computed_or_refused_with_a_reason(backend: str) -> None:
    q, k, v = randoms(1, 9, 2, 4, dtype=torch.float32)
    if backend in ("native", "triton"):
        with pytest.raises(RuntimeError, match="use backend='eager'"):
            linear_rope_attention(q, k, v, rotary=Rotary(4, xpos=20.0), backend=backend)
        return
    assert linear_rope_attention(q, k, v, rotary=Rotary(4, xpos=20.0), backend=backend).isfinite().all()
