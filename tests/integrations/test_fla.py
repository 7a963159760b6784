"""linrope.integrations.fla: beside the recurrences in float64, and beside fla's own signatures and naive functions."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import backends
from linrope.backends import eager, native
from linrope.integrations import fla
from linrope.operation import plan

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="fla's functions on a CPU")
B, N, H, K, V = 2, 21, 4, 8, 6


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    h: Any = None,
    unit: bool = False,
    scale: float | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Any]:
    """The equations of linrope.integrations.fla, one token after the other, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    if unit:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (k.shape[3] ** -0.5 if scale is None else scale)
    state = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3])
    z = v.new_zeros(len(v), v.shape[2], k.shape[3])
    if normalize and isinstance(h, tuple):
        state, z = h[0].double(), h[1][:, 0].double()
    elif h is not None:
        state = h.double()
    out = []
    for t in range(v.shape[1]):
        if g is not None:
            a = g[:, t].double().exp()
            state = (a[..., None, None] if a.ndim == 2 else a[..., None]) * state
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None].double() * (u - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        z = z + k[:, t]
        num = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
        out.append(num / ((q[:, t] * z).sum(-1, keepdim=True) + 1e-10) if normalize else num)
    return torch.stack(out, 1), ((state, z[:, None]) if normalize else state)


class Case(NamedTuple):
    function: Callable[..., Any]
    inputs: tuple[str, ...] = ()  # beside q, k, v and the initial state
    options: Mapping[str, Any] = MappingProxyType({})  # of the function
    means: Mapping[str, Any] = MappingProxyType({})  # for the recurrence
    value_heads: int = H


NORM = ({"use_qk_l2norm_in_kernel": True}, {"unit": True})
GROUPED = {"value_heads": 2 * H}
NORMALIZED = ({"normalize": True}, {"normalize": True})
CASES = {
    "linear": Case(fla.chunk_linear_attn, (), {"normalize": False, "scale": 0.5}, {"scale": 0.5}),
    "normalized": Case(fla.chunk_linear_attn, (), *NORMALIZED),
    "retention": Case(fla.chunk_retention, (), {}, {"retnet": True}),
    "simple": Case(fla.chunk_simple_gla, ("g",)),
    "simple, fixed": Case(fla.chunk_simple_gla, ("g_gamma",), {"scale": 1.0}, {"scale": 1.0}),
    "gla": Case(fla.chunk_gla, ("gk as g",)),
    "delta": Case(fla.chunk_delta_rule, ("beta",), *NORM),
    "delta, keys as they are": Case(fla.chunk_delta_rule, ("beta",)),
    "gated delta": Case(fla.chunk_gated_delta_rule, ("g", "beta"), *NORM),
    "gated delta, grouped": Case(fla.chunk_gdn, ("g", "beta"), *NORM, **GROUPED),
    "gated delta, per feature": Case(fla.fused_recurrent_gated_delta_rule, ("g", "gk", "beta"), *NORM),
    "kda": Case(fla.chunk_kda, ("gk as g", "beta"), *NORM),
    "kda, grouped": Case(fla.chunk_kda, ("gk as g", "beta"), *NORM, **GROUPED),
}
cases = pytest.mark.parametrize("name", CASES)


def made(case: Case, dtype: torch.dtype, *, n: int = N, sequences: int = B, b: int = B) -> dict[str, Tensor]:
    """The inputs by fla's names. Without a norm the keys are short, as the delta rule requires."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, means = case.value_heads, case.means
    q, k = normal(b, n, H, K), normal(b, n, H, K)
    if means.get("normalize"):
        q, k = q.exp(), k.exp()
    elif not means.get("unit"):
        k = k / k.norm(dim=-1, keepdim=True)
    inputs = {"q": q, "k": k, "v": normal(b, n, heads, V)}
    gates = {
        "g": F.logsigmoid(normal(b, n, heads) + 1),
        "gk": F.logsigmoid(normal(b, n, heads, K) + 1),
        "g_gamma": -torch.rand(heads, generator=generator, dtype=torch.float64),
        "beta": normal(b, n, heads).sigmoid(),
    }
    for name in case.inputs:
        source, _, called = name.partition(" as ")
        inputs[called or source] = gates[source]
    inputs["initial_state"] = normal(sequences, heads, K, V)
    if means.get("normalize"):
        inputs["z"] = normal(sequences, 1, heads, K).exp()
    half = dtype in (torch.bfloat16, torch.float16)
    return {
        name: x.to(torch.float32 if half and name not in ("q", "k", "v") else dtype).requires_grad_()
        for name, x in inputs.items()
    }


def call(case: Case, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Any]:
    inputs = dict(inputs)
    if "z" in inputs:
        inputs["initial_state"] = (inputs["initial_state"], inputs.pop("z"))  # type: ignore[assignment]
    return case.function(**inputs, output_final_state=True, **case.options, **options)


def expected(case: Case, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
    means = {name: x for name, x in case.means.items() if name != "retnet"}
    q, k, v, g, gk = (inputs.get(name) for name in ("q", "k", "v", "g", "gk"))
    heads = torch.arange(H, dtype=torch.float64)
    for fixed in (inputs.get("g_gamma"), (1 - 2 ** (-5 - heads)).log() if "retnet" in case.means else None):
        g = g if fixed is None else fixed.expand(len(v), v.shape[1], -1)
    if gk is not None:
        g = gk if g is None else g[..., None] + gk
    h = inputs["initial_state"]
    h = (h, inputs["z"]) if "z" in inputs else h
    return recurrence(q, k, v, g=g, beta=inputs.get("beta"), h=h, **means)


def results(o: Tensor, h: Any) -> list[Tensor]:
    return [o, *h] if isinstance(h, tuple) else [o, h]


def gradients(outputs: list[Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a loss on the outputs and on the final state."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    loss = sum(((x * w).sum() for x, w in zip(outputs, weights, strict=True)), torch.zeros(()))
    return dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))


@cases
def test_each_function_is_its_recurrence_with_all_gradients(name: str) -> None:
    case = CASES[name]
    inputs = made(case, torch.float64)
    ours, theirs = results(*call(case, inputs)), results(*expected(case, inputs))
    for got, want in zip(ours, theirs, strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-9)
    got, want = gradients(ours, inputs), gradients(theirs, inputs)
    for key in inputs:
        assert_close(got[key], want[key], rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", fla.__all__)
def test_the_other_functions_of_a_recurrence_compute_the_same(name: str) -> None:
    recurrence = re.sub("^(fused_)?(chunk|recurrent)_", "", name).replace("gdn", "gated_delta_rule")
    case = next(x for x in CASES.values() if x.function.__name__ == f"chunk_{recurrence}")
    inputs = made(case, torch.float32)
    renamed = {"gk" if (key, name) == ("g", "fused_recurrent_gla") else key: x for key, x in inputs.items()}
    got = call(case._replace(function=getattr(fla, name)), renamed)
    assert all(map(torch.equal, results(*got), results(*call(case, inputs))))


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_the_cpu_are_off_by_few_roundings(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are float32. In half precision the scaled queries and o are rounded: 2 u, and as much for gradients."""
    chosen, choose = [], backends.choose
    monkeypatch.setattr(backends, "choose", lambda *x: chosen.append(choose(*x)) or chosen[-1])
    plan.forget_plans()
    case = CASES[name]
    inputs = made(case, dtype)
    exact = {key: x.detach().double().requires_grad_() for key, x in inputs.items()}
    ours, theirs = results(*call(case, inputs)), results(*expected(case, exact))
    assert chosen == [native if native.why_not() is None else eager]
    u = torch.finfo(dtype).eps / 2
    wide = torch.finfo(torch.float32).eps / 2
    assert ours[0].dtype == dtype
    assert {x.dtype for x in ours[1:]} == {torch.float32}
    for got, want, bound in zip(ours, theirs, [4 * u, 16 * wide, 16 * wide], strict=False):
        assert (got - want).abs().max() <= (bound + 16 * wide) * want.abs().max()
    got, want = gradients(ours, inputs), gradients(theirs, exact)
    for key, x in want.items():
        assert (got[key] - x).abs().max() <= (8 * u + 64 * wide) * x.abs().max(), key


@cases
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    """One of them is empty: its state is the initial one."""
    case, bounds = CASES[name], [0, 5, 5, 17, 21]
    inputs = made(case, torch.float64, n=bounds[-1], sequences=len(bounds) - 1, b=1)
    o, h = call(case, inputs, cu_seqlens=torch.tensor(bounds))
    for i, (start, end) in enumerate(pairwise(bounds)):
        per_state, fixed = ("initial_state", "z"), ("g_gamma",)
        part = {
            key: x if key in fixed else x[i : i + 1] if key in per_state else x[:, start:end]
            for key, x in inputs.items()
        }
        want = results(*call(case, part))
        for got, wanted in zip(results(o[:, start:end], row(h, i)), want, strict=True):
            assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def row(h: Any, i: int) -> Any:
    return tuple(x[i : i + 1] for x in h) if isinstance(h, tuple) else h[i : i + 1]


@pytest.mark.parametrize("name", ["simple", "gla", "gated delta", "kda"])
def test_states_with_values_first(name: str) -> None:
    case = CASES[name]
    inputs = made(case, torch.float64)
    turned = inputs | {"initial_state": inputs["initial_state"].mT.contiguous()}
    o, h = call(case, turned, state_v_first=True)
    assert h.is_contiguous()
    assert_close((o, h.mT), call(case, inputs))


def test_without_an_initial_state_sums_start_at_zero_and_no_state_is_returned() -> None:
    for case in CASES.values():
        inputs = {key: x for key, x in made(case, torch.float64).items() if key not in ("initial_state", "z")}
        zeros = {
            key: torch.zeros_like(x) for key, x in made(case, torch.float64).items() if key not in inputs
        }
        o, h = case.function(**inputs, **case.options)
        assert h is None
        assert_close(o, expected(case, inputs | zeros)[0])


def test_a_state_without_z_leaves_its_keys_out_of_the_normalizer() -> None:
    inputs = made(CASES["normalized"], torch.float64)
    inputs["z"] = torch.zeros_like(inputs["z"])
    want, _ = expected(CASES["normalized"], inputs)
    del inputs["z"]
    assert_close(fla.chunk_linear_attn(**inputs)[0], want)


def test_what_is_added_to_the_normalizer_is_added_after_the_scale() -> None:
    q = torch.full((1, 3, 1, 4), 1e-5, dtype=torch.float64)  # 1e-10 <= scale z^T q <= 3e-10
    v = torch.ones(1, 3, 1, 2, dtype=torch.float64)
    o, _ = fla.chunk_linear_attn(q, q, v, scale=0.25)
    assert_close(o, recurrence(q, q, v, scale=0.25, normalize=True)[0], rtol=1e-9, atol=0)
    assert_close(o[0, :, 0, 0], torch.tensor([1 / 2, 2 / 3, 3 / 4], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "function"),
    [("delta", fla.fused_recurrent_delta_rule), ("gated delta, grouped", fla.fused_recurrent_gdn)],
)
def test_beta_is_1_if_none(name: str, function: Callable[..., Any]) -> None:
    inputs = made(CASES[name], torch.float64)
    want = expected(CASES[name], inputs | {"beta": torch.ones_like(inputs.pop("beta"))})
    assert_close(call(CASES[name]._replace(function=function), inputs), want)


def test_half_precision_states_are_widened() -> None:
    inputs = made(CASES["delta"], torch.bfloat16)
    rounded = inputs["initial_state"].detach().bfloat16()
    got = call(CASES["delta"], inputs | {"initial_state": rounded})
    assert_close(got, call(CASES["delta"], inputs | {"initial_state": rounded.float()}), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "per_feature", "lower_bound"),
    [
        (fla.chunk_gated_delta_rule, False, None),
        (fla.fused_recurrent_gated_delta_rule, False, None),
        (fla.chunk_kda, True, -5.0),
        (fla.fused_recurrent_kda, True, None),
    ],
)
def test_gates_and_sigmoids_in_the_call(
    function: Callable[..., Any], per_feature: bool, lower_bound: float | None
) -> None:
    """With sizes as in models: 100 tokens, heads of 128, gates as Gated DeltaNet and Kimi Linear initialize them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = F.silu(torch.randn(3, 1, 100, 2, 128, generator=generator))
    shape = (2, 128) if per_feature else (2,)
    dt = torch.exp(torch.empty(shape).uniform_(-6.9, -2.3, generator=generator))
    gate = {
        "g": torch.randn(1, 100, *shape, generator=generator),
        "A_log": torch.empty(2).uniform_(1, 16, generator=generator).log(),
        "dt_bias": (dt + torch.log(-torch.expm1(-dt))).flatten(),
    }
    beta = torch.randn(1, 100, 2, generator=generator)
    bounded = {"lower_bound": lower_bound} if lower_bound is not None else {}
    o, h = function(
        q, k, v, beta=beta, **gate, **bounded, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, output_final_state=True,
    )  # fmt: skip
    x = gate["g"].double() + gate["dt_bias"].double().view(gate["g"].shape[2:])
    rate = gate["A_log"].double().exp().view(2, *[1] * per_feature)
    g = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    want = recurrence(q, k, v, g=g, beta=2 * beta.double().sigmoid(), unit=True)
    for got, wanted in zip((o, h), want, strict=True):
        assert (got - wanted).abs().max() < 3e-6 * wanted.abs().max()
    if lower_bound is not None:
        options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": lower_bound}
        g = lower_bound * gate["g"].double().sigmoid()
        want = recurrence(q, k, v, g=g, beta=beta.double().sigmoid(), unit=True)[0]
        got = function(q, k, v, gate["g"], beta.sigmoid(), **options)[0]
        assert (got - want).abs().max() < 3e-6 * want.abs().max()


q4, g3 = torch.rand(1, 5, 4, 8), torch.rand(1, 5, 4)
REFUSED = {
    "reverse": (fla.fused_recurrent_linear_attn, (), {"reverse": True}, "reverse: got True.*flip"),
    "gv": (fla.fused_recurrent_gla, (), {"gv": q4}, "gv: got a Tensor.*gk"),
    "context": (fla.chunk_kda, (-q4, g3), {"cp_context": object()}, "cp_context: .*Shard"),
    "graph": (fla.chunk_kda, (-q4, g3), {"use_graph": True}, "use_graph: got True"),
    "states": (
        fla.chunk_kda, (-q4, g3), {"return_intermediate_states": True}, "return_intermediate_states: .*pieces"
    ),
    "head_first": (fla.chunk_gated_delta_rule, (-g3, g3), {"head_first": True}, "head_first: .*transpose"),
    "old name": (fla.chunk_simple_gla, (), {"transpose_state_layout": True}, "state_v_first"),
    "eigenvalues": (fla.chunk_gdn, (-g3, g3), {"allow_neg_eigval": True}, "allow_neg_eigval=True"),
    "two decays": (fla.chunk_simple_gla, (-g3, g3[0, 0]), {}, "g_gamma: .*only one"),
    "growth": (fla.chunk_gla, (q4,), {}, "^g: got up to"),
    "growth, fixed": (fla.chunk_simple_gla, (None, g3[0, 0]), {}, "^g_gamma: got up to"),
    "growth, gk": (fla.fused_recurrent_gla, (q4,), {}, "^gk: got up to"),
    "shape": (fla.chunk_delta_rule, (q4,), {}, "^beta: got shape"),
    "state": (fla.chunk_delta_rule, (g3,), {"initial_state": q4}, "^initial_state: got kv of shape"),
    "z": (fla.chunk_linear_attn, (), {"initial_state": (q4, q4)}, "^initial_state: got z"),
    "scale": (fla.chunk_linear_attn, (), {"scale": 0}, "^scale=0"),
    "bias": (
        fla.fused_recurrent_gdn, (-g3,), {"use_gate_in_kernel": True, "A_log": g3[0, 0], "dt_bias": q4}, "^dt_bias: "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name: str) -> None:
    function, positional, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        function(q4, q4, q4, *positional, **options)


def test_types_are_refused_by_name() -> None:
    for options, message in (
        ({"colour": "red"}, "colour: unknown"),
        ({"use_gate_in_kernel": True}, "^A_log: got NoneType"),
        ({"initial_state": [0]}, "^initial_state: got list"),
        ({"scale": "x"}, "^scale="),
    ):
        with pytest.raises(TypeError, match=message):
            fla.chunk_gated_delta_rule(q4, q4, q4, -g3, g3, **options)
    with pytest.raises(TypeError, match=r"^v: got list"):
        fla.chunk_retention(q4, q4, [1])


@pytest.mark.parametrize(
    ("function", "positional", "options", "message"),
    [
        (fla.chunk_gla, (q4, q4, q4), {}, r"^chunk_gla\(\) missing a required argument: 'g'"),
        (fla.chunk_gla, (q4, q4, q4, q4), {"g": q4}, r"^chunk_gla\(\) multiple values for argument 'g'"),
        (fla.chunk_gla, (q4, q4, q4, q4), {"colour": 1}, r"^chunk_gla\(\) got an unexpected .* 'colour'"),
        (fla.fused_chunk_simple_gla, (q4,) * 10, {}, r"^fused_chunk_simple_gla\(\) too many positional"),
        (fla.chunk_gated_delta_rule, (q4, q4, q4, -g3, g3), {"gk": -q4}, "^gk: unknown argument"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_is_refused(
    function: Callable[..., Any], positional: tuple[Tensor, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        function(*positional, **options)


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it sees no GPU
        return pytest.importorskip("fla.ops", exc_type=ImportError)


@pytest.mark.parametrize("name", fla.__all__)
def test_signatures_are_those_of_fla(name: str, theirs: ModuleType) -> None:
    def of(module: ModuleType) -> list[tuple[str, Any, Any]]:
        return [
            (x.name, x.kind, x.default) for x in inspect.signature(getattr(module, name)).parameters.values()
        ]

    assert of(fla) == of(theirs)


def naive(name: str, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """fla's own function in plain PyTorch for these inputs. Some take heads before tokens, and no scale."""
    from fla.ops.delta_rule import naive as delta
    from fla.ops.gated_delta_rule import naive as gated_delta
    from fla.ops.gla import naive as gla
    from fla.ops.kda import naive as kda
    from fla.ops.linear_attn import naive as linear
    from fla.ops.retention import naive as retention
    from fla.ops.simple_gla import naive as simple

    head_first = {x: inputs[x].transpose(1, 2) for x in ("q", "k", "v", "beta") if x in inputs}
    state = {"initial_state": inputs["initial_state"], "output_final_state": True}
    if name == "linear":
        return linear.naive_recurrent_linear_attn(**inputs, scale=0.5, output_final_state=True)
    if name == "normalized":
        tokens = {x: inputs[x] for x in "qkv"}
        start = (inputs["initial_state"], inputs["z"])
        return linear.naive_recurrent_linear_attn(
            **tokens, initial_state=start, output_final_state=True, normalize=True
        )
    if name == "retention":
        return retention.naive_retention(**head_first).transpose(1, 2), None
    if name == "simple":
        return simple.naive_recurrent_simple_gla(**inputs)
    if name == "gla":
        inputs["gk"] = inputs.pop("g")
        return gla.naive_recurrent_gla(**inputs, output_final_state=True)
    if name == "delta, keys as they are":
        o, h = delta.delta_rule_recurrence(**head_first, **state)
        return o.transpose(1, 2), h
    if name == "gated delta":
        return gated_delta.naive_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    return kda.naive_recurrent_kda(**inputs, output_final_state=True)


@pytest.mark.parametrize(
    "name",
    [
        "linear", "normalized", "retention", "simple", "gla", "delta, keys as they are", "gated delta", "kda",
        "kda, grouped",
    ],
)  # fmt: skip
def test_results_and_gradients_are_those_of_fla_s_naive_functions(name: str, theirs: ModuleType) -> None:
    """They compute in float32, and leave the division of q and k by their lengths to the caller."""
    case = CASES[name]
    inputs = made(case, torch.float32)
    if name == "retention":
        inputs["initial_state"] = torch.zeros_like(inputs["initial_state"])
    unit = {
        key: F.normalize(x, dim=-1) if key in "qk" and "unit" in case.means else x
        for key, x in inputs.items()
    }
    ours, reference = results(*call(case, inputs)), results(*naive(name, unit))
    if reference[1] is None:  # naive_retention has no state
        ours, reference, inputs = ours[:1], reference[:1], {x: inputs[x] for x in "qkv"}
    for got, want in zip(ours, reference, strict=True):
        assert (got - want).abs().max() <= 3e-6 * want.abs().max()
    got, want = gradients(ours, inputs), gradients(reference, inputs)
    for key in inputs:
        assert (got[key] - want[key]).abs().max() <= 1e-5 * want[key].abs().max(), key
