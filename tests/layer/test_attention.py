"""LinearRoPEAttention: projections around the operation, and its options."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linrope import LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "grouped": {"num_kv_heads": 2},
    "one kv head": {"num_kv_heads": 1},
    "head dims": {"head_dim": 6, "value_head_dim": 10},
    "norm": {"out_norm": True},
    "gate": {"gate": True, "bias": True},
    "bidirectional": {"causal": False},
    "half layout": {"rotary": "half"},
    "Rotary": {"rotary": Rotary(4, base=100.0, rotary_dim=2)},
    "no rotary": {"rotary": None},
    "softmax": {"feature_map": "softmax"},
    "favor+": {"feature_map": "favor+"},
    "map object": {"feature_map": feature_maps.FavorPlus(4, num_features=12, seed=0)},
    "signed": {"feature_map": "silu", "normalize": False, "out_norm": True},
    "reference": {"backend": "reference"},
    "map as dict": {"feature_map": {"name": "dpfp", "nu": 2}},
    "learned map": {"feature_map": "hedgehog", "num_kv_heads": 2},
    "paired learned map": {"feature_map": {"name": "paired", "inner": "t2r"}, "num_kv_heads": 2},
    "decay": {"decay": "retnet", "num_kv_heads": 2},
    "decay as numbers": {"decay": [0.5, 0.6, 0.9, 1.0]},
    "before": {"rope_order": "before", "feature_map": {"name": "dpfp", "nu": 1}},
    "rotary as dict": {"rotary": {"layout": "half", "base": 100.0}},
    "rope_parameters": {"rotary": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "xpos": {"rotary": {"xpos": 30.0}},
    "all": {"num_kv_heads": 2, "value_head_dim": 6, "out_norm": True, "gate": True, "bias": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def make(**options) -> LinearRoPEAttention:
    torch.manual_seed(0)
    layer = LinearRoPEAttention(16, 4, **options)
    with torch.no_grad():
        for parameter in layer.parameters():  # or a norm of ones could be left out unnoticed
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(layer: LinearRoPEAttention, x: torch.Tensor, context: torch.Tensor, **how) -> torch.Tensor:
    def project(name: str, tensor: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.get_parameter(f"{name}.weight"), getattr(layer, name).bias
        return tensor @ weight.T + (0 if bias is None else bias)

    (b, n, _), m = x.shape, context.shape[1]
    out = linear_rope_attention(
        project("q_proj", x).view(b, n, layer.num_heads, layer.head_dim),
        project("k_proj", context).view(b, m, layer.num_kv_heads, layer.head_dim),
        project("v_proj", context).view(b, m, layer.num_kv_heads, layer.value_head_dim),
        feature_map=layer.feature_map,
        rotary=layer.rotary,
        causal=layer.causal,
        normalize=layer.normalize and layer.out_norm is None,  # which the norm cancels
        decay=layer.decay,
        rope_order=layer.rope_order,
        **how,
    )
    if layer.out_norm is not None:
        rms = (out.square().mean(-1, keepdim=True) + layer.out_norm.eps).sqrt()
        out = out / rms * layer.get_parameter("out_norm.weight")
    out = out.reshape(b, n, -1)
    if layer.g_proj is not None:
        gate = project("g_proj", x)
        out = out * gate * gate.sigmoid()
    return project("o_proj", out)


@every_option
def test_layer_is_its_projections_around_the_operation(options) -> None:
    layer, x = make(**options), numbers(2, 7, 16)
    assert_close(layer(x), by_hand(layer, x, x))


def test_out_norm_gives_every_head_a_mean_square_of_1() -> None:
    layer = LinearRoPEAttention(16, 4, out_norm=True)
    layer.o_proj = nn.Identity()
    square = layer(numbers(2, 5, 16)).view(2, 5, 4, 4).square().mean(-1)
    assert_close(square, torch.ones(2, 5, 4), atol=1e-3, rtol=0)  # eps is 1e-6 of a square that is ~ 0.01


@pytest.mark.parametrize("length", [3, 7, 12])
def test_cross_attention_takes_keys_and_values_from_the_context(length: int) -> None:
    layer, x, context = (
        make(causal=False, num_kv_heads=2, gate=True),
        numbers(2, 7, 16),
        numbers(2, length, 16),
    )
    assert_close(layer(x, context), by_hand(layer, x, context))
    how = {"positions": torch.arange(7) + 5, "key_positions": torch.arange(length) * 2}
    out = layer(x, context, positions=how["positions"], context_positions=how["key_positions"])
    assert_close(out, by_hand(layer, x, context, **how))


def test_layer_passes_positions_and_mask_on() -> None:
    layer, x = make(), numbers(2, 5, 16)
    how = {"positions": torch.tensor([9, 1, 5, 5, 2]), "key_mask": numbers(2, 5) > 0}
    assert_close(layer(x, **how), by_hand(layer, x, x, **how))


def test_masked_tokens_have_no_influence_on_the_others() -> None:
    layer, x = make(), numbers(2, 6, 16)
    mask = torch.tensor([True, False, True, True, False, True]).expand(2, 6)
    y = x.clone()
    y[:, ~mask[0]] = 99.0
    assert torch.equal(layer(x, key_mask=mask)[:, mask[0]], layer(y, key_mask=mask)[:, mask[0]])


@every_option
def test_prefill_and_decoding_give_what_one_call_gives(options) -> None:
    if not options.get("causal", True):
        return
    layer, x = make(**options), numbers(2, 9, 16)
    expected, expected_state = layer(x, return_state=True)
    out, state = layer(x[:, :5], return_state=True)
    pieces = [out]
    for i in range(5, 9):
        out, state = layer(x[:, i : i + 1], state=state, return_state=True)
        pieces.append(out)
    assert_close(torch.cat(pieces, 1), expected)
    assert_close(state.kv, expected_state.kv)
    assert_close(state.z.float(), expected_state.z.float())  # sums of float32 features
    assert torch.equal(state.position, expected_state.position)
    assert state.identity == expected_state.identity


def test_state_of_another_layer_kind_is_refused() -> None:
    x = numbers(2, 3, 16)
    _, state = make(rotary="half")(x, return_state=True)
    with pytest.raises(ValueError, match=r"state: made with .*half.*expected .*interleaved"):
        make()(x, state=state)


@every_option
def test_gradients_reach_every_parameter_and_both_inputs(options) -> None:
    layer = make(**options)
    x, context = numbers(2, 6, 16).requires_grad_(), numbers(2, 6, 16, seed=2).requires_grad_()
    (layer(x, context) * numbers(2, 6, 16, seed=3)).sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for name, grad in {**grads, "x": x.grad, "context": context.grad}.items():
        assert grad is not None, name
        assert bool(grad.isfinite().all()), name
        assert bool(grad.any()), name


@every_option
def test_state_dict_carries_the_layer_over(options) -> None:
    # favor+ by name: another projection, until the state dict brings the first one's
    layer, twin = make(**options), LinearRoPEAttention(16, 4, **copy.deepcopy(options))
    x = numbers(2, 5, 16)
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


def test_parameters_have_the_names_and_shapes_that_adapters_expect() -> None:
    layer = LinearRoPEAttention(
        16, 4, num_kv_heads=2, head_dim=6, value_head_dim=10, out_norm=True, gate=True, bias=True
    )
    assert {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} == {
        "q_proj.weight": (24, 16), "q_proj.bias": (24,),
        "k_proj.weight": (12, 16), "k_proj.bias": (12,),
        "v_proj.weight": (20, 16), "v_proj.bias": (20,),
        "o_proj.weight": (16, 40), "o_proj.bias": (16,),
        "g_proj.weight": (40, 16), "g_proj.bias": (40,),
        "out_norm.weight": (10,),
    }  # fmt: skip


def test_plain_layer_has_the_four_projections_and_nothing_else() -> None:
    names = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
    assert list(LinearRoPEAttention(16, 4).state_dict()) == names


def test_rotary_by_name_has_the_size_of_the_features() -> None:
    layer = LinearRoPEAttention(16, 4, feature_map=feature_maps.make("favor+", 4, num_features=10))
    assert layer.rotary is not None
    assert layer.rotary.identity == Rotary(10).identity
    assert layer(numbers(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.parametrize("options", [{}, {"out_norm": True, "gate": True, "feature_map": "favor+"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_module_runs_in_other_precisions_with_a_wide_state(dtype: torch.dtype, options) -> None:
    layer, x = make(**options), numbers(2, 7, 16)
    expected = layer.double()(x.double())
    layer = layer.to(dtype)
    x = x.to(dtype).requires_grad_()
    y, state = layer(x, return_state=True)
    assert y.dtype == dtype
    assert state.kv.dtype == torch.promote_types(dtype, torch.float32)
    assert state.z.dtype == torch.float64
    # A chain of rounded projections: a few units in the last place of the largest output.
    assert float((y - expected).detach().abs().max()) < 8 * torch.finfo(dtype).eps * float(
        expected.detach().abs().max()
    )
    y.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    piece, state = layer(x.detach()[:, :1], state=state.detach(), return_state=True)
    assert piece.dtype == dtype


@pytest.mark.parametrize("options", [{}, {"out_norm": True, "gate": True, "feature_map": "favor+"}])
def test_layer_runs_under_autocast_and_in_inference_mode(options) -> None:
    layer, x = make(**options), numbers(2, 7, 16)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x, return_state=True)
    assert state.kv.dtype == torch.float32
    # bfloat16 projections on either side
    assert float((y - expected).detach().abs().max()) < 8 * 2**-8 * float(expected.detach().abs().max())
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)


def test_device_and_dtype_are_those_asked_for() -> None:
    options = {"out_norm": True, "gate": True, "bias": True, "feature_map": "favor+"}
    layer = LinearRoPEAttention(16, 4, **options, device="meta", dtype=torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert {t.device.type for t in layer.state_dict().values() if t.ndim} == {"meta"}


def test_one_of_everything_is_a_layer() -> None:
    layer = LinearRoPEAttention(1, 1, rotary=None)
    assert layer(torch.randn(1, 3, 1)).shape == (1, 3, 1)


def test_length_0_and_batch_0_give_empty_outputs_and_zero_gradients() -> None:
    layer = make(out_norm=True, gate=True)
    for shape in ((2, 0, 16), (0, 5, 16)):
        y, state = layer(numbers(*shape), return_state=True)
        assert y.shape == shape
        assert state.position.tolist() == [shape[1]] * shape[0]
        y.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_repr_names_the_projections_and_the_map() -> None:
    shown = repr(LinearRoPEAttention(16, 4, feature_map=feature_maps.FavorPlus(4, seed=3)))
    for part in ("q_proj", "o_proj", "FavorPlus(4, num_features=8, seed=3)"):
        assert part in shown


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
        assert torch.equal(after.kv, state.kv)


def test_a_layer_is_made_on_the_ambient_device() -> None:
    with torch.device("meta"):
        layer = LinearRoPEAttention(16, 4, feature_map=feature_maps.make("favor+", 4))
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    assert layer.rotary.theta.device.type == "cpu"


def test_retnet_decay_is_the_paper_s() -> None:
    decay = LinearRoPEAttention(16, 4, decay="retnet").decay
    assert decay.tolist() == [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256]


def test_casting_the_layer_leaves_its_decay_exact() -> None:
    layer = LinearRoPEAttention(16, 4, decay=[0.1, 0.2, 0.3, 1 - 2.0**-40])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert layer.to(dtype).decay.tolist() == [0.1, 0.2, 0.3, 1 - 2.0**-40]


def test_packed_sequences_and_grids_go_through_the_layer() -> None:
    layer, x = make(out_norm=True), numbers(1, 9, 16)
    packed, state = layer(x, cu_seqlens=torch.tensor([0, 4, 4, 9]), return_state=True)
    assert_close(packed, torch.cat((layer(x[:, :4]), layer(x[:, 4:])), 1))
    assert state.position.tolist() == [4, 0, 5]
    grid = torch.tensor([[y, z] for y in range(3) for z in range(3)])
    image = make(rotary={"axes": 2, "base": 100.0}, causal=False)
    out = image(x, positions=grid)
    assert_close(out, image(x, positions=grid + torch.tensor([5, 70])))  # relative on both axes
    assert not torch.allclose(out, image(x, positions=grid.flip(1)))


def test_a_dict_chooses_the_rotation() -> None:
    assert LinearRoPEAttention(16, 4, rotary={"rope_theta": 50.0}).rotary.layout == "half"
    assert (
        LinearRoPEAttention(16, 4, rotary={"rope_theta": 50.0, "layout": "interleaved"}).rotary.base == 50.0
    )
    assert LinearRoPEAttention(16, 4, rotary={"axes": 2}).rotary.axes == 2
    assert LinearRoPEAttention(16, 4, rotary={"rotary_dim": 2}).rotary.rotary_dim == 2
    hedgehog = LinearRoPEAttention(16, 4, feature_map="hedgehog", rope_order="before")
    assert hedgehog.rotary.dim == 4
    assert LinearRoPEAttention(16, 4, feature_map="hedgehog").rotary.dim == 8


def test_before_makes_scores_depend_on_absolute_positions() -> None:
    """What is lost: with eq. 19's order the same layer does not care where a sequence lies."""
    x, near, far = numbers(1, 9, 16), torch.arange(9), torch.arange(9) + 100
    after, before = make(), make(rope_order="before")
    assert_close(after(x, positions=far), after(x, positions=near))
    assert not torch.allclose(before(x, positions=far), before(x, positions=near), atol=1e-3)
