"""LinearRoPEAttention: projections around the operation, and its options."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linrope import LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from linrope.layer.softmax_attention import SoftmaxAttention
from tests.layer.cases import ALL, GATED, by_hand, every_module, every_option, inputs, make, numbers


@every_option
def test_the_layer_is_its_parts_around_the_operation(options) -> None:
    layer = make(**options)
    x = inputs(layer)
    assert_close(layer(x), by_hand(layer, options, x, x))


@pytest.mark.parametrize("width", [None, 16, 10])
@pytest.mark.parametrize("length", [3, 7, 12])
def test_cross_attention_takes_keys_and_values_from_the_context(length: int, width: int | None) -> None:
    options = {"causal": False, "num_kv_heads": 2, "gate": True, "context_dim": width}
    layer, x, context = make(**options), numbers(2, 7, 16), numbers(2, length, width or 16)
    assert_close(layer(x, context), by_hand(layer, options, x, context))
    mask, here, there = numbers(2, length) > 0, torch.arange(7) + 5, torch.arange(length) * 2
    out = layer(x, context, positions=here, context_positions=there, key_mask=mask)
    how = {"positions": here, "key_positions": there, "key_mask": mask}
    assert_close(out, by_hand(layer, options, x, context, **how))


@every_option
def test_gradients_reach_every_parameter_and_input_also_when_recomputed(options) -> None:
    layer, found = make(**options), []
    of_one_sequence = {"forget_gate", "erase_gate", "short_conv", "skip"} & options.keys()
    one_sequence = of_one_sequence or "selective" in str(options.get("rotary"))
    for run in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=False)):
        layer.zero_grad()
        given = [inputs(layer, n=7, seed=i).requires_grad_() for i in ((1,) if one_sequence else (1, 2))]
        (run(*given) * inputs(layer, n=7, seed=3)).sum().backward()
        found.append([x.grad for x in (*given, *layer.parameters())])
    for name, a, b in zip([*"xc"[: len(given)], *dict(layer.named_parameters())], *found, strict=True):
        assert bool(a.isfinite().all()), name
        assert bool(a.any()), name
        assert torch.equal(a, b), name


@every_module
def test_the_state_dict_carries_the_layer_over(options) -> None:
    # favor+ by name: another projection, until the state dict brings the first one's
    layer, twin = make(**options), LinearRoPEAttention(16, **{"num_heads": 4, **copy.deepcopy(options)})
    x, twin = inputs(layer), twin.to(layer.o_proj.weight.dtype)
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_parameters_have_the_names_and_shapes_that_adapters_expect() -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 6, "value_head_dim": 10}
    layer = LinearRoPEAttention(16, 4, **sizes, out_norm=True, gate=True, bias=True)
    assert {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} == {
        "q_proj.weight": (24, 16), "q_proj.bias": (24,),
        "k_proj.weight": (12, 16), "k_proj.bias": (12,),
        "v_proj.weight": (20, 16), "v_proj.bias": (20,),
        "o_proj.weight": (16, 40), "o_proj.bias": (16,),
        "g_proj.weight": (40, 16), "g_proj.bias": (40,),
        "out_norm.weight": (10,),
    }  # fmt: skip
    names = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
    assert list(LinearRoPEAttention(16, 4).state_dict()) == names


NORM_AND_GATE = {"out_norm": True, "gate": True, "feature_map": "favor+"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("options", "units"),
    # Rounded projections, convolution, norms and gates in a chain: some units in the last place of the largest output
    # for each.
    [({}, 8), (NORM_AND_GATE, 8), *((options, 24) for options in GATED.values())],
    ids=["plain", "norm and gate", *GATED],
)
def test_half_precision_and_autocast_stay_near_with_wide_states(options, units: int, dtype) -> None:
    layer = make(torch.float32, **options)
    x, expected = inputs(layer, n=7), copy.deepcopy(layer).double()(numbers(2, 7, 16).float().double())
    with torch.autocast("cpu", dtype):
        inside, within = layer(x, return_state=True)
    half, x = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
    y, state = half(x, return_state=True)
    piece, _ = half(x.detach()[:, :1], state=state.detach(), return_state=True)
    assert y.dtype == piece.dtype == dtype
    assert state.sums.kv.dtype == within.sums.kv.dtype == torch.float32
    assert state.sums.z.dtype == torch.float64
    for z in (inside, y):
        error, largest = (float(t.detach().abs().max()) for t in (z - expected, expected))
        assert error < units * torch.finfo(dtype).eps * largest
    y.sum().backward()
    # A gate may write so little that the norm magnifies the gradient beyond float16's range
    assert bool(x.grad.isfinite().all()) or (dtype == torch.float16 and "write_gate" in options)


def test_device_and_dtype_are_those_asked_for_or_the_ambient_ones() -> None:
    options = {"out_norm": True, "gate": True, "bias": True, "feature_map": "favor+"}
    layer = LinearRoPEAttention(16, 4, **options, device="meta", dtype=torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        ambient = LinearRoPEAttention(16, 4, **options)
    for made in (layer, ambient):
        assert {t.device.type for t in made.state_dict().values() if t.ndim} == {"meta"}
        assert made.rotary.theta.device.type == "cpu"


@pytest.mark.parametrize("name", ["elu+1", "softmax", "favor+"])
def test_an_ambient_device_changes_nothing_for_tensors_elsewhere(name: str) -> None:
    """As inside ``with torch.device(..)``, where every tensor made without a device lands on that one."""
    layer = LinearRoPEAttention(16, 4, feature_map=feature_maps.make(name, 4))
    x = torch.randn(2, 150, 16, requires_grad=True)
    for causal in (True, False):
        layer.causal = causal
        expected, state = layer(x, return_state=True)
        with torch.device("meta"):
            y, after = layer(x, return_state=True)
            assert layer.rotary.__class__(8).theta.device.type == "cpu"
            y.sum().backward()
            layer(x[:, :1], state=after)
        assert torch.equal(y, expected)
        assert torch.equal(after.sums.kv, state.sums.kv)


@pytest.mark.parametrize("options", [{}, {"num_value_heads": 1}], ids=["plain", "one value head"])
def test_one_of_everything_is_a_layer(options) -> None:
    layer = LinearRoPEAttention(1, 1, rotary=None, **options)
    assert layer(torch.randn(1, 3, 1)).shape == (1, 3, 1)


def test_length_0_and_batch_0_give_empty_outputs_and_zero_gradients() -> None:
    layer = make(out_norm=True, gate=True)
    for shape in ((2, 0, 16), (0, 5, 16)):
        y, state = layer(numbers(*shape), return_state=True)
        assert y.shape == shape
        assert state.position.tolist() == [shape[1]] * shape[0]
        y.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_repr_says_what_the_layer_is_in_a_line() -> None:
    line = repr(LinearRoPEAttention(16, 4, backend="eager", **ALL["all"])).split("\n")[1].strip()
    assert line == (
        "heads=4, kv_heads=2, head_dim=4, value_head_dim=6, feature_map=Hedgehog, rotary=selective "
        "interleaved, decay=learned [0.5, 0.9998], forget_gate (half-lives from 1 to 64), short_conv, qk_norm, "
        "out_norm, gate, backend=eager"
    )
    for options, parts in (
        ({"num_value_heads": 8}, ["heads=4, kv_heads=4, head_dim=4, value_heads=8", "q_proj", "o_proj"]),
        ({"rotary": {"partial_rotary_factor": 0.5, "base": 500.0}}, ["rotary=interleaved 1/2 base=500.0"]),
        ({"decay": "retnet"}, ["decay=[0.9688, 0.9844, 0.9922, 0.9961]"]),
        ({"decay": "learned", "device": "meta"}, ["decay"]),
        ({"feature_map": feature_maps.FavorPlus(4, seed=3)}, ["FavorPlus(4, num_features=8, seed=3)"]),
    ):
        assert all(part in repr(LinearRoPEAttention(16, 4, **options)) for part in parts)
    softmax = SoftmaxAttention(16, 4, num_kv_heads=2, causal=False)
    assert softmax.extra_repr() == "heads=4, kv_heads=2, head_dim=4, rotary=interleaved, causal=False"


def test_positions_on_a_grid_go_through_the_layer() -> None:
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    x, image = numbers(1, 9, 16), make(rotary={"axes": 2, "base": 100.0}, causal=False)
    out = image(x, positions=grid)
    assert_close(out, image(x, positions=grid + torch.tensor([5, 70])))  # relative on both axes
    assert not torch.allclose(out, image(x, positions=grid.flip(1)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rotary": {"rope_theta": 50.0}}, {"layout": "half", "base": 50.0}),
        ({"rotary": {"rope_theta": 50.0, "layout": "interleaved"}}, {"layout": "interleaved", "base": 50.0}),
        ({"rotary": {"axes": 2}}, {"axes": 2}),
        ({"rotary": {"rotary_dim": 2}}, {"rotary_dim": 2}),
        ({"feature_map": "hedgehog"}, {"dim": 8}),  # the size of the features
        ({"feature_map": {"name": "favor+", "num_features": 10}}, {"identity": Rotary(10).identity}),
        ({"feature_map": "hedgehog", "rope_order": "before"}, {"dim": 4}),
    ],
    ids=str,
)
def test_the_rotation_is_the_one_chosen(options, expected) -> None:
    rotary = LinearRoPEAttention(16, 4, **options).rotary
    assert {name: getattr(rotary, name) for name in expected} == expected


# ---- The norm in the normalizer's place.


@pytest.mark.parametrize("feature_map", ["elu+1", "hedgehog", "relu", "softmax"])
@torch.no_grad()
def test_a_norm_gives_what_it_gave_behind_the_normalizer_up_to_its_eps(feature_map: str) -> None:
    layer, x = make(feature_map=feature_map, out_norm=True, decay="spread"), numbers(2, 50, 16)
    q, k, v = (p(x).unflatten(-1, (4, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    how = {"feature_map": layer.feature_map, "rotary": layer.rotary, "decay": layer.decay}
    out = linear_rope_attention(q, k, v, **how)
    expected = layer.o_proj(F.rms_norm(out, (4,), layer.out_norm.weight, eps=1e-6).flatten(-2))
    # eps was added to squares of averages of values, most of which are above 1e-2.
    error = (layer(x) - expected).norm() / expected.norm()
    assert float(error) < 1e-3


def test_the_norm_takes_the_normalizer_s_place_where_the_numerator_stays_in_range(monkeypatch) -> None:
    seen = []

    def spy(*args, normalize: bool, **how):
        seen.append(normalize)
        return linear_rope_attention(*args, normalize=normalize, **how)

    monkeypatch.setattr("linrope.layer.attention.linear_rope_attention", spy)
    x = numbers(1, 5, 16)
    for options in ({}, {"out_norm": True}, {"out_norm": True, "feature_map": "exp"}):
        make(**options)(x)
    make(torch.float16, out_norm=True)(x.half())
    assert seen == [True, False, True, True]
