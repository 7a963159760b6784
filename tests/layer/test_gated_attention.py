"""LinearRoPEAttention with decays, gates, selective rotation and a short convolution keeps its guarantees."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linrope import LinearAttentionState, LinearRoPEAttention, linear_rope_attention
from linrope.backends import native
from tests.trapezoid_loop import trapezoidal_loop

GATED = {
    "spread": {"decay": {"name": "spread", "longest": 50}},
    "learned decay": {"decay": "learned"},
    "forget gate": {"forget_gate": True},
    "selective": {"rotary": "selective"},
    "selective, added": {
        "rotary": {"name": "selective", "bound": "add", "rank": 3, "per_head": False, "layout": "half"}
    },
    "convolution": {"short_conv": 4},
    "norms": {"qk_norm": True, "out_norm": True},
    "exponential": {"forget_gate": True, "short_conv": 2, "feature_map": "exp", "out_norm": True},
    "signed": {"forget_gate": True, "feature_map": "silu", "normalize": False, "rotary": None},
    "all": {
        "decay": "learned", "forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4,
        "qk_norm": True, "out_norm": True, "gate": True, "bias": True, "num_kv_heads": 2, "value_head_dim": 6,
        "feature_map": "hedgehog",
    },
    "block": {
        "short_conv": {"taps": 4, "activation": "silu", "bias": True, "start": "uniform"}, "forget_gate": True,
        "write_gate": "tied", "out_norm": True, "skip": "after", "gate": True, "value_head_dim": 8,
    },
    "mamba-2": {
        "num_heads": 2, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 8, "feature_map": "identity",
        "normalize": False, "rotary": None, "short_conv": {"activation": "silu", "bias": True}, "forget_gate": True,
        "write_gate": "independent", "out_norm": {"over": "all", "eps": 1e-5}, "skip": "before", "gate": "before",
    },
    "one key head": {
        "num_heads": 1, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 8, "qk_norm": True, "qk_bias": True,
        "forget_gate": True, "skip": "before", "out_norm": "head", "gate": "before",
    },
    "skip alone": {"skip": "after", "num_kv_heads": 2},
    "trapezoid": {
        "trapezoid": True, "forget_gate": True, "write_gate": "independent", "decay": "learned", "rotary": "selective",
        "num_kv_heads": 2, "out_norm": True, "normalize": False, "short_conv": 2, "gate": True,
    },
    "mamba-3": {
        "num_heads": 1, "num_value_heads": 4, "head_dim": 8, "value_head_dim": 6, "feature_map": "identity",
        "normalize": False, "qk_norm": True, "qk_bias": True, "forget_gate": True, "write_gate": "tied",
        "trapezoid": True, "rotary": {"name": "selective", "bound": "add", "rotary_dim": 4}, "skip": "before",
        "gate": "before",
    },
}  # fmt: skip
every_option = pytest.mark.parametrize("options", GATED.values(), ids=GATED)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(dtype: torch.dtype = torch.float64, **options) -> LinearRoPEAttention:
    torch.manual_seed(0)
    layer = LinearRoPEAttention(16, **{"num_heads": 4, **options}).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():  # or what starts at zero could be left out unnoticed
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def assert_same_state(a: LinearAttentionState, b: LinearAttentionState, rows: slice = slice(None)) -> None:
    """a is b's rows; sums in another order differ by rounding, what is copied does not."""
    assert a.identity == b.identity
    assert torch.equal(a.position, b.position[rows])
    for name in ("kv", "z", "log_scale", "conv", "last_token"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert_close(x, y[rows])
    assert (a.angle is None) == (b.angle is None)
    if a.angle is not None:
        assert int((a.angle - b.angle[rows]).abs().max()) < 2**20  # of 2^64 in a turn


def mean_square_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


@every_option
def test_the_layer_is_its_parts_around_the_operation(options) -> None:
    layer, x = make(**options), numbers(2, 9, 16)
    h, keys, g = layer.num_heads, layer.num_kv_heads, layer.num_state_heads
    d, e = layer.head_dim, layer.value_head_dim
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    if (conv := layer.short_conv) is not None:
        line = F.pad(torch.cat((q, k, v), -1).mT, (conv.weight.shape[-1] - 1, 0))
        y = F.conv1d(line, conv.weight, conv.bias, groups=len(conv.weight)).mT
        y = F.silu(y) if "silu" in str(options["short_conv"]) else y
        q, k, v = y.split((h * d, keys * d, g * e), -1)
    q, k, v = q.unflatten(-1, (h, d)), k.unflatten(-1, (keys, d)), v.unflatten(-1, (g, e))
    if layer.q_norm is not None:
        q, k = mean_square_norm(q, layer.q_norm), mean_square_norm(k, layer.k_norm)
    if layer.q_bias is not None:
        q, k = q + layer.q_bias, k + layer.k_bias
    if shared := options.get("num_value_heads"):
        q, k = q.repeat_interleave(shared // h, 2), k.repeat_interleave(shared // h, 2)
        h = shared
    log_decay = torch.zeros(2, 9, g, dtype=torch.float64)
    if layer.decay is not None:
        log_decay = log_decay + layer.decay.log()
    keep = torch.ones(2, 9, g, dtype=torch.float64)
    if layer.forget_gate is not None:
        keep = (x @ layer.forget_gate.weight.T + layer.forget_gate.bias).sigmoid()
    write = {
        None: lambda: torch.ones_like(keep),
        "tied": lambda: 1 - keep,
        "independent": lambda: (x @ layer.write_gate.weight.T + layer.write_gate.bias).sigmoid(),
    }[options.get("write_gate")]()
    steps = None if layer.angle_steps is None else layer.angle_steps(x)
    # The norm of a head cancels the normalizer, except for eps beside squares that a write gate makes small.
    normalize = layer.normalize and not ("write_gate" in options and options["out_norm"] is True)
    log_decay = log_decay + keep.log()
    if options.get("trapezoid"):
        share = (x @ layer.trapezoid.weight.T + layer.trapezoid.bias).sigmoid()
        angles = steps.cumsum(1) + torch.arange(9.0)[:, None, None] * layer.rotary.theta
        phi, psi = layer.feature_map.queries(q), layer.feature_map.keys(k)
        per_row = zip(phi, psi, v, share, write, log_decay, angles.expand(2, 9, g, -1), strict=True)
        out = torch.stack([trapezoidal_loop(*row) for row in per_row])
    else:
        out = linear_rope_attention(
            q, k, v * write[..., None], feature_map=layer.feature_map, rotary=layer.rotary, normalize=normalize,
            log_decay=log_decay, angle_steps=steps, backend="reference",
        )  # fmt: skip
    gate = 1 if layer.g_proj is None else F.silu(layer.g_proj(x)).unflatten(-1, (h, e))
    skipped = 0 if layer.skip is None else layer.skip[:, None] * v.repeat_interleave(h // g, 2)
    if options.get("skip") == "before":
        out = out + skipped
    if options.get("gate") == "before":
        out = out * gate
    if layer.out_norm is not None:
        rows = out.flatten(-2) if len(layer.out_norm.weight) == h * e != e else out
        out = mean_square_norm(rows, layer.out_norm).view(out.shape)
    if options.get("skip") == "after":
        out = out + skipped
    if options.get("gate") is True:
        out = out * gate
    # A norm that replaces the normalizer has its eps beside squares from 1e-3 on.
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if layer.out_norm is not None else {}
    assert_close(layer(x), layer.o_proj(out.flatten(-2)), **tolerance)


@every_option
@pytest.mark.parametrize("cuts", [range(10), (0, 4, 9), (0, 1, 1, 3, 9)], ids=str)
def test_a_sequence_cut_anywhere_is_one_call(options, cuts) -> None:
    layer, x = make(**options), numbers(2, 9, 16)
    expected, last = layer(x, return_state=True)
    pieces, state = [], None
    for a, b in pairwise(cuts):
        y, state = layer(x[:, a:b], state=state, return_state=True)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), expected)
    assert_same_state(state, last)


@every_option
def test_the_state_is_made_only_if_asked_for_and_changes_nothing(options) -> None:
    layer, x = make(**options), numbers(2, 9, 16)
    y, _ = layer(x, return_state=True)
    assert torch.equal(layer(x), y)


PADDING = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 0, 0, 0],
    "inside": [1, 0, 0, 1, 0, 1, 1, 0, 1],
}


@every_option
@pytest.mark.parametrize("side", PADDING)
def test_padding_changes_neither_outputs_nor_states(options, side: str) -> None:
    layer, x = make(**options), numbers(2, 9, 16)
    mask = torch.tensor([PADDING[side], [1] * 9]).bool()
    how = {"key_mask": mask, "positions": (mask.long().cumsum(1) - 1).clamp(min=0)}
    x[~mask] = 99.0
    y, state = layer(x, **how, return_state=True)
    head, middle = layer(x[:, :5], **{name: t[:, :5] for name, t in how.items()}, return_state=True)
    tail, end = layer(
        x[:, 5:], **{name: t[:, 5:] for name, t in how.items()}, state=middle, return_state=True
    )
    for row in range(2):
        alone, last = layer(x[row : row + 1, mask[row]], return_state=True)
        for got, after in ((y, state), (torch.cat((head, tail), 1), end)):
            assert_close(got[row : row + 1, mask[row]], alone)
            assert_same_state(last, after, slice(row, row + 1))


@every_option
def test_packed_sequences_are_those_alone_and_go_on_apart(options) -> None:
    layer, x, cuts = make(**options), numbers(1, 12, 16), [0, 3, 3, 8, 12]
    packed, states = layer(x, cu_seqlens=torch.tensor(cuts), return_state=True)
    more = numbers(1, 4, 16, seed=2)
    after = layer(more, cu_seqlens=torch.arange(5), state=states)
    for i, (a, b) in enumerate(pairwise(cuts)):
        alone = layer(torch.cat((x[:, a:b], more[:, i : i + 1]), 1))
        assert_close(packed[:, a:b], alone[:, :-1])
        assert_close(after[:, i : i + 1], alone[:, -1:])


@every_option
@torch.no_grad()
def test_beams_saved_states_and_copies_go_on_alike(options, tmp_path) -> None:
    layer, x = make(**options), numbers(3, 6, 16)
    y, state = layer(x, return_state=True)
    beams, token = torch.tensor([2, 0, 0, 1]), numbers(4, 1, 16, seed=2)
    expected = layer(torch.cat((x[beams], token), 1))[:, -1:]
    reordered = state.reorder(beams)
    reordered.save(tmp_path / "state")
    for other in (reordered, LinearAttentionState.load(tmp_path / "state"), copy.deepcopy(reordered)):
        assert_close(layer(token, state=other), expected)
    assert torch.equal(copy.deepcopy(layer)(x), y)


@every_option
@torch.no_grad()
def test_a_donated_state_is_written_in_place(options) -> None:
    layer, x = make(**options), numbers(2, 8, 16)
    _, state = layer(x[:, :5], return_state=True)
    memory = {name: getattr(state, name) for name in ("kv", "z", "conv", "angle", "last_token")}
    expected, last = layer(x, return_state=True)
    for i in range(5, 8):
        y, state = layer(x[:, i : i + 1], state=state.donate(), return_state=True)
        assert_close(y, expected[:, i : i + 1])
        assert all(getattr(state, name) is tensor for name, tensor in memory.items())
    assert_same_state(state, last)


@every_option
@pytest.mark.parametrize("return_state", [False, True])
@torch.no_grad()
def test_rows_of_a_pool_are_read_and_written_in_place(options, return_state: bool) -> None:
    layer, x = make(**options), numbers(1, 11, 16)
    _, pool = layer(numbers(6, 0, 16), return_state=True)
    slots, how = torch.tensor([4, 1]), {"return_state": return_state}
    layer(x[:, :9], cu_seqlens=torch.tensor([0, 6, 9]), state=pool.at(slots), **how)
    layer(x[:, 9:].transpose(0, 1), state=pool.at(slots), **how)
    for slot, tokens in ((4, [0, 1, 2, 3, 4, 5, 9]), (1, [6, 7, 8, 10])):
        _, alone = layer(x[:, tokens], return_state=True)
        assert_same_state(alone, pool, slice(slot, slot + 1))
    others = pool.reorder(torch.tensor([0, 2, 3, 5]))
    assert not others.kv.any()
    assert others.conv is None or not others.conv.any()


def test_a_pool_is_refused_in_a_call_with_gradients() -> None:
    layer = make(short_conv=4)
    _, pool = layer(numbers(3, 0, 16), return_state=True)
    with pytest.raises(RuntimeError, match=r"state: got rows of a pool in a call with gradients"):
        layer(numbers(1, 1, 16), state=pool.detach().at(torch.tensor([1])))


@every_option
def test_gradients_reach_every_parameter_also_when_recomputed(options) -> None:
    layer, found = make(**options), []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        x = numbers(2, 7, 16).requires_grad_()
        (run(x) * numbers(2, 7, 16, seed=3)).sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for name, a, b in zip(["x", *dict(layer.named_parameters())], *found, strict=True):
        assert bool(a.isfinite().all()), name
        assert bool(a.any()), name
        assert torch.equal(a, b), name


@every_option
def test_gradients_are_those_of_finite_differences(options) -> None:
    layer, x = make(**options), numbers(1, 4, 16)
    names = [name for name, _ in layer.named_parameters() if not name.endswith("_proj.weight")]
    parameters = [layer.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def run(*values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values)), x).sum((0, 1))

    if parameters:
        # fast: along random directions, of which a projection has hundreds.
        assert torch.autograd.gradcheck(run, tuple(parameters), fast_mode=True, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "masked"), [(GATED["all"], True), (GATED["exponential"], False)], ids=["all", "exponential"]
)
def test_compiled_in_one_graph_the_layer_computes_the_same(options, masked: bool) -> None:
    """One length with a graph for gradients, then any length without."""
    torch._dynamo.reset()  # the code of all layers is one to it, and its variants are counted
    layer = make(**options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for n, grad in ((5, True), (9, False)):
        x, mask = numbers(2, n, 16), numbers(2, n) > -1 if masked else None
        with torch.set_grad_enabled(grad):
            y, state = layer(x, key_mask=mask, return_state=True)
            got, other = compiled(x, key_mask=mask, return_state=True)
        assert_close(got, y)
        assert_close(other.kv, state.kv)


@every_option
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_stay_near_with_wide_states(options, dtype: torch.dtype) -> None:
    layer, x = make(torch.float32, **options), numbers(2, 7, 16).float()
    expected = copy.deepcopy(layer).double()(x.double())
    with torch.autocast("cpu", dtype):
        inside, state = layer(x, return_state=True)
    assert state.kv.dtype == torch.float32
    half, after = copy.deepcopy(layer).to(dtype)(x.to(dtype), return_state=True)
    assert half.dtype == dtype
    assert after.kv.dtype == torch.float32
    for y in (inside, half):
        # Rounded projections, convolution, norms and gates in a chain: some units in the last place of the
        # largest output for each.
        error, largest = (float(t.detach().abs().max()) for t in (y - expected, expected))
        assert error < 24 * torch.finfo(dtype).eps * largest


@torch.no_grad()
def test_long_rows_in_bfloat16_have_the_angles_and_decays_of_float32() -> None:
    layer, x = (
        make(torch.float32, rotary="selective", forget_gate=True).bfloat16(),
        numbers(1, 4000, 16).bfloat16(),
    )
    _, state = layer(x, return_state=True)
    steps = layer.angle_steps(x)
    assert steps.dtype == layer.forget_gate(x).dtype == torch.float32
    exact = steps.double().sum(1) / (2 * torch.pi)
    turned = state.angle.double() / 2.0**64
    assert float(((turned - exact + 0.5) % 1 - 0.5).abs().max()) < 1e-9  # turns


def test_selective_rotation_starts_as_the_fixed_one_bit_for_bit() -> None:
    x = numbers(2, 9, 16)
    torch.manual_seed(0)
    fixed = LinearRoPEAttention(16, 4, dtype=torch.float64)
    for bound in ("multiply", "add"):
        selective = LinearRoPEAttention(
            16, 4, rotary={"name": "selective", "bound": bound}, dtype=torch.float64
        )
        selective.load_state_dict(fixed.state_dict(), strict=False)
        assert torch.equal(selective(x), fixed(x))
        assert torch.equal(
            selective(x, positions=torch.arange(9) * 3), fixed(x, positions=torch.arange(9) * 3)
        )


@pytest.mark.skipif(native.why_not() is not None, reason="the native library is not available")
@pytest.mark.parametrize("name", ["block", "mamba-2", "one key head", "all"])
def test_in_float32_on_the_fused_kernels_the_layer_is_the_one_in_float64(name: str) -> None:
    exact, x = make(**GATED[name]), numbers(2, 70, 16)
    layer, losses, gradients = copy.deepcopy(exact).float(), [], []
    for module, inputs in ((exact, x), (layer, x.float())):
        inputs.requires_grad_()
        loss = (module(inputs).double() * numbers(2, 70, 16, seed=2)).sum()
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, [inputs, *module.parameters()]))
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-3)
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        assert float((got.double() - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-6


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
def test_native_keeps_no_copies_of_shared_queries_and_keys() -> None:
    layer = make(torch.float32, **GATED["one key head"], backend="native")
    saved: list[tuple[int, ...]] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(numbers(1, 5, 16).float())
    assert (1, 5, 1, 6) in saved
    assert (1, 5, 4, 6) not in saved


def test_a_module_may_give_the_steps() -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, None, :2].tanh()

    layer, x = make(rotary=Steps()), numbers(2, 9, 16)
    q, k, v = (p(x).unflatten(-1, (4, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    out = linear_rope_attention(q, k, v, angle_steps=x[:, :, None, :2].tanh())
    assert_close(layer(x), layer.o_proj(out.flatten(-2)))
