"""torch.library's own checks of the operator, and torch.compile without recompilation.

Where no gradients are asked for, what is compiled runs as it was traced, without AOTAutograd.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.backends.bridge import flatten
from linrope.recurrence.call import Call, Sums
from tests.support.oracle import NATIVE

LONG_HERE = pytest.mark.long if torch.get_default_device().type == "cpu" else ()  # seconds each, interpreted
OPERATOR = torch.ops.linrope.attend.default
B, G, H, D, E = 2, 2, 4, 4, 6


@pytest.fixture(autouse=True)
def _no_compiled_code_from_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype, device="cpu").to(torch.get_default_device())


def tokens(n: int, m: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = (B, n, H, D), (B, m, G, D), (B, m, G, E)
    return [numbers(*shape, dtype=dtype) for shape in shapes]


def operator_arguments(
    n: int = 70, m: int | None = None, *, dtype=torch.float64, causal=True, state=False, mask=False,
    rotary=True, layout="interleaved", positions=False, save=True, decay=False, steps=False, packed=False,
    return_state=True, state_only=False, write=False, erase=False, backend="eager",
) -> tuple:  # fmt: skip
    m = n if m is None else m
    q, k, v = tokens(n, m, dtype)
    b = 1 if packed else B
    q, k, v = None if state_only else q[:b].clone(), k[:b].clone(), v[:b].clone()
    sequences = 3 if packed else b
    kv = z = angle = None
    if state:
        kv, z = numbers(sequences, G, D, E, dtype=dtype), numbers(sequences, G, D, dtype=torch.float64).abs()
        angle = torch.arange(sequences * G * D // 2).view(sequences, G, -1) * 2**60 if steps else None
    log_decay = -numbers(b, m, G, dtype=dtype).abs() if decay else None
    angle_steps = numbers(b, m, 1, D // 2, dtype=dtype) if steps else None
    factors = numbers(b, m, G, dtype=dtype) if write else None
    shares = (numbers(b, m, 1, dtype=dtype).sigmoid() / 50) if erase else None
    for x in (q, k, v, kv, z, log_decay, angle_steps, factors, shares):
        if x is not None:
            x.requires_grad_(save)
    call = Call(
        q=q, k=k, v=v, log_decay=log_decay, angle_steps=angle_steps, write=factors, erase=shares,
        theta_turns=Rotary(D).turns_per_position(torch.get_default_device()) if rotary else None,
        positions=torch.arange(b * n).view(b, n) if positions else torch.tensor([[3]]),
        key_positions=None if m == n else torch.tensor([[0]]), key_mask=numbers(b, m) > 0 if mask else None,
        cu_seqlens=torch.tensor([0, 5, 5, n]) if packed else None, layout=layout, feature_map="elu+1",
        causal=causal, return_state=return_state, normalize=not erase,
    )  # fmt: skip
    sums = None if kv is None or z is None else Sums(kv, z, angle)
    return *flatten(backend, call, sums), save


CONFIGURATIONS = {
    "causal": {},
    "causal, inference": {"save": False},
    "causal, state, mask": {"state": True, "mask": True},
    "causal, positions, half": {"positions": True, "layout": "half"},
    "no rotary": {"rotary": False},
    "decay": {"decay": True, "state": True},
    "decay, steps": {"decay": True, "steps": True, "state": True},
    "steps alone, no state wanted": {"steps": True, "rotary": False, "return_state": False},
    "packed": {"packed": True, "state": True, "decay": True},
    "state only": {"state_only": True, "decay": True},
    "float32": {"dtype": torch.float32, "state": True},
    "float32, inference": {"dtype": torch.float32, "save": False, "mask": True},
    "erase": {"erase": True, "decay": True, "steps": True, "state": True, "mask": True},
    "erase, packed, inference": {"erase": True, "packed": True, "save": False, "dtype": torch.float32},
    "erase, state only": {"erase": True, "state_only": True, "state": True},
    "bidirectional": {"causal": False},
    "bidirectional, inference": {"causal": False, "save": False, "state": True},
    "bidirectional, state, mask": {"causal": False, "state": True, "mask": True},
    "one token": {"n": 1, "state": True, "save": False},
    "cross": {"causal": False, "m": 9, "dtype": torch.float32},
}
IN_FLOAT32 = {  # of the compiled kernels, which share the operator
    "packed": {"packed": True, "state": True, "decay": True},
    "causal, inference, mask": {"save": False, "mask": True},
    "no rotary, no state": {"rotary": False, "return_state": False},
    "cross": {"causal": False, "m": 5, "state": True},
    "bidirectional": {"causal": False, "state": True},
}
ERASE = {"erase": True, "decay": True, "steps": True, "state": True, "mask": True, "positions": True}
OF_NATIVE = IN_FLOAT32 | {"write": {"write": True, "decay": True}, "erase": ERASE}
SHORT = {"dtype": torch.float32, "n": 9, "layout": "half"}
CHECKED = [
    *(pytest.param("native", x | SHORT, id=f"native-{name}", marks=NATIVE.marks) for name, x in OF_NATIVE.items()),
    *(pytest.param("eager", x, id=f"eager-{name}") for name, x in CONFIGURATIONS.items()),
    *(pytest.param("triton", x | SHORT, id=f"triton-{name}", marks=() if name in ("packed", "erase") else LONG_HERE)
      for name, x in (IN_FLOAT32 | {"erase": ERASE}).items()),
]  # fmt: skip
# Tracing calls of any size, for a second each, is the operator's, not a backend's: two calls show it.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch 2.15 reads it itself
@pytest.mark.parametrize(("backend", "configuration"), CHECKED)
def test_operator_passes_torch_library_s_checks(backend, configuration) -> None:
    """Schema, autograd registration, fake tensors (shapes and dtypes), and dynamic-shape tracing."""
    traced = backend == "native" and configuration in (
        OF_NATIVE["packed"] | SHORT,
        ERASE | SHORT,
    )
    checks = (*QUICK, "test_aot_dispatch_dynamic") if traced else QUICK
    torch.library.opcheck(OPERATOR, operator_arguments(**configuration, backend=backend), test_utils=checks)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=LONG_HERE)])
def test_operator_passes_them_with_segments(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the states before segments among what is saved."""
    for name in ("SHORTEST_SEGMENT", "SEGMENT_MULTIPLE"):
        monkeypatch.setattr(f"linrope_kernels.tiles.{name}", 32)
    how = {"dtype": torch.float32, "layout": "half", "decay": True, "state": True, "n": 90}
    torch.library.opcheck(OPERATOR, operator_arguments(**how, backend=backend))


class Model(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = LinearRoPEAttention(16, H, num_kv_heads=G, out_norm=True, gate=True, **options)
        self.outer = nn.Linear(16, 8)

    def forward(self, x, state=None) -> tuple[torch.Tensor, LinearAttentionState]:
        y, state = self.inner(x, state=state, return_state=True)
        return self.outer(torch.relu(y)), state


def gradients(model: nn.Module, run, x: torch.Tensor, *rest) -> list[torch.Tensor]:
    """Output, last state, and the gradients of input and parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y, state = run(x, *rest)
    (y.square().sum() + state.sums.kv.square().sum() + state.sums.z.sum()).backward()
    return [y, state.sums.kv, state.sums.z, x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decays", [False, True])
def test_the_running_maximum_has_an_operator(decays: bool, packed: bool) -> None:
    scale = numbers(1, 9, 2).double()
    log_decay = -scale.abs() if decays else None
    bounds = torch.tensor([0, 4, 9]) if packed else None
    operator = torch.ops.linrope.running_maximum.default
    torch.library.opcheck(operator, (scale, log_decay, scale.new_zeros(1, 2), bounds))


LONG = {"marks": pytest.mark.long}
LENGTHS = (2, 3, 16, 31, 32, 33, 63, 64, 65, 129)  # short of, at and past the sizes of blocks
AS_TRACED = "eager"  # a compiler: runs what was traced, without AOTAutograd and so without gradients


# The tracer looks at .grad of its inputs, also of slices that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("options", "lengths", "compiler"),
    [({"feature_map": "softmax", "rotary": "half"}, LENGTHS, "aot_eager"),
     ({"causal": False}, LENGTHS, AS_TRACED),
     pytest.param({"causal": False}, (9, 70), "aot_eager", **LONG),
     pytest.param({"feature_map": "favor+"}, (9, 70), "aot_eager", **LONG),
     pytest.param({"feature_map": "hedgehog", "decay": "retnet", "rope_order": "before"}, (9, 70), "aot_eager", **LONG),
     pytest.param({"backend": "triton"}, (9, 70), "aot_eager", marks=LONG_HERE),
     pytest.param({"backend": "triton", "causal": False}, (9, 70), "aot_eager", marks=LONG_HERE)],
    ids=str,
)  # fmt: skip
def test_in_one_graph_a_module_computes_the_same_and_all_lengths_compile_at_most_twice(
    options: dict[str, Any], lengths: tuple[int, ...], compiler: str
) -> None:
    """Once for the first length, and once, when it sees a second one, for all lengths.

    Each row comes in two pieces: what compiled code returns as a state it takes again, and gradients flow through it.
    """
    model, counter = Model(**options), CompileCounterWithBackend(compiler)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    b = 1 if "backend" in options else B

    def results(run: Any, x: torch.Tensor, state: LinearAttentionState) -> Any:
        def pieces(x: torch.Tensor) -> tuple[torch.Tensor, LinearAttentionState]:
            head, after = run(x[:, : x.shape[1] // 2], state)
            tail, after = run(x[:, x.shape[1] // 2 :], after)
            return torch.cat((head, tail), 1), after

        if compiler != AS_TRACED:
            return gradients(model, pieces, x)
        with torch.no_grad():
            out, last = pieces(x)
        return [out, last.sums.kv, last.sums.z, last.position]

    with torch.no_grad():
        _, state = model(numbers(b, 5, 16))
    if compiler != AS_TRACED:  # as the state that the first piece leaves
        state.sums.kv.requires_grad_()
        state.sums.z.requires_grad_()
    for n in lengths:
        x = numbers(b, 2 * n, 16)
        for actual, expected in zip(results(compiled, x, state), results(model, x, state), strict=True):
            assert_close(actual, expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=LONG_HERE)])
def test_compiled_decoding_goes_on_from_a_state_and_compiles_once(backend: str) -> None:
    model, counter = Model(backend=backend), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = numbers(B, 14, 16)
    with torch.no_grad():
        expected, _ = model(x)
        _, state = model(x[:, :10])
        for i in range(10, 14):
            y, state = compiled(x[:, i : i + 1], state)
            assert_close(y, expected[:, i : i + 1])
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_delta_rule_compiles_twice_for_all_lengths_with_the_state_handed_on() -> None:
    """With a log_decay per unit, positions and a mask, too."""

    def run(q, k, v, erase, log_decay, positions, mask, state) -> tuple[torch.Tensor, LinearAttentionState]:
        how = {"rotary": Rotary(D), "feature_map": "unit", "normalize": False, "return_state": True}
        given = {"erase": erase, "log_decay": log_decay, "positions": positions, "key_mask": mask}
        return linear_rope_attention(q, k, v, state=state, **given, **how)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    found, rows = [], tokens(4, 4, torch.float32)
    gates = numbers(B, 4, G).sigmoid(), -numbers(B, 4, G, D // 2).abs()
    _, first = run(*rows, *gates, torch.arange(4), numbers(B, 4) > -1, None)
    for call in (compiled, run):
        state, results = first, []
        for n in (7, 70, 3, 20):
            gates = numbers(B, n, G).sigmoid(), -numbers(B, n, G, D // 2).abs()
            inputs = [x.requires_grad_() for x in (*tokens(n, n, torch.float32), *gates)]
            out, after = call(*inputs, 3 * torch.arange(n) + 9, numbers(B, n) > -1, state)
            gradients = torch.autograd.grad(out.square().sum() + after.kv.square().sum(), inputs)
            state = after.detach()
            results += [out, state.kv, state.position, *gradients]
        found.append(results)
    for a, b in zip(*found, strict=True):
        assert_close(a, b)
    assert counter.frame_count <= 2
