"""LinearRoPEAttention keeps its guarantees whatever its options: pieces, padding, packing, states, compilers."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linrope import LinearRoPEAttention, linear_rope_attention
from linrope.layer.state import LayerState
from tests.layer.cases import ALL, GATED, assert_same_state, every_gated, inputs, make, needs_native, numbers


@pytest.mark.parametrize("name", [name for name in ALL if name != "bidirectional"])
@pytest.mark.parametrize("cuts", [range(10), (0, 1, 1, 3, 9)], ids=str)
def test_a_sequence_cut_anywhere_is_one_call(name: str, cuts) -> None:
    layer = make(**ALL[name])
    x = inputs(layer)
    expected, last = layer(x, return_state=True)
    pieces, state = [], None
    for a, b in pairwise(cuts):
        y, state = layer(x[:, a:b], state=state, return_state=True)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), expected)
    assert_same_state(state, last)


@every_gated
def test_the_state_is_made_only_if_asked_for_and_changes_nothing(options) -> None:
    layer, x = make(**options), numbers(2, 9, 16)
    y, _ = layer(x, return_state=True)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)
    assert torch.equal(layer(x), y)


PADDING = [0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 0, 1, 1, 0, 1], [1] * 9


@every_gated
def test_padding_changes_neither_outputs_nor_states(options) -> None:
    layer, x, mask = make(**options), numbers(4, 9, 16), torch.tensor(PADDING).bool()
    how = {"key_mask": mask, "positions": (mask.long().cumsum(1) - 1).clamp(min=0)}
    x[~mask] = 99.0
    y, state = layer(x, **how, return_state=True)
    head, middle = layer(x[:, :5], **{name: t[:, :5] for name, t in how.items()}, return_state=True)
    how = {name: t[:, 5:] for name, t in how.items()}
    tail, end = layer(x[:, 5:], **how, state=middle, return_state=True)
    for row in range(4):
        alone, last = layer(x[row : row + 1, mask[row]], return_state=True)
        for got, after in ((y, state), (torch.cat((head, tail), 1), end)):
            assert_close(got[row : row + 1, mask[row]], alone)
            assert_same_state(last, after, slice(row, row + 1))


@every_gated
def test_packed_sequences_are_those_alone_and_go_on_apart(options) -> None:
    layer, x, cuts = make(**options), numbers(1, 12, 16), [0, 3, 3, 8, 12]
    packed, states = layer(x, cu_seqlens=torch.tensor(cuts), return_state=True)
    more = numbers(1, 4, 16, seed=2)
    after = layer(more, cu_seqlens=torch.arange(5), state=states)
    for i, (a, b) in enumerate(pairwise(cuts)):
        alone = layer(torch.cat((x[:, a:b], more[:, i : i + 1]), 1))
        assert_close(packed[:, a:b], alone[:, :-1])
        assert_close(after[:, i : i + 1], alone[:, -1:])


@every_gated
@torch.no_grad()
def test_beams_saved_states_and_copies_go_on_alike(options, tmp_path) -> None:
    layer, x = make(**options), numbers(3, 6, 16)
    _, state = layer(x, return_state=True)
    beams, token = torch.tensor([2, 0, 0, 1]), numbers(4, 1, 16, seed=2)
    expected = layer(torch.cat((x[beams], token), 1))[:, -1:]
    reordered = state.reorder(beams)
    reordered.save(tmp_path / "state")
    loaded, copied = LayerState.load(tmp_path / "state"), copy.deepcopy(reordered)
    for other in (reordered, loaded, copied, LayerState.cat([reordered])):
        assert_close(layer(token, state=other), expected)


@every_gated
@torch.no_grad()
def test_a_donated_state_is_written_in_place(options) -> None:
    layer, x = make(**options), numbers(2, 8, 16)
    _, state = layer(x[:, :5], return_state=True)
    memory = state.tensors()
    expected, last = layer(x, return_state=True)
    for i in range(5, 8):
        y, state = layer(x[:, i : i + 1], state=state.donate(), return_state=True)
        assert_close(y, expected[:, i : i + 1])
        assert all(state.tensors()[name] is tensor for name, tensor in memory.items())
    assert_same_state(state, last)


@every_gated
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
    assert not others.sums.kv.any()
    assert others.conv is None or not others.conv.any()


def test_a_pool_is_refused_in_a_call_with_gradients() -> None:
    layer = make(short_conv=4)
    _, pool = layer(numbers(3, 0, 16), return_state=True)
    with pytest.raises(RuntimeError, match=r"state: got rows of a pool in a call with gradients"):
        layer(numbers(1, 1, 16), state=pool.detach().at(torch.tensor([1])))


@every_gated
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
    ("name", "more"),
    [
        ("all", 9),
        pytest.param("gated delta rule", 9, marks=pytest.mark.long),
        pytest.param("exponential", 9, marks=pytest.mark.long),
    ],
)
def test_compiled_in_one_graph_the_layer_computes_the_same(name: str, more: int) -> None:
    """A graph for gradients; then one without, for another length, that goes on from the state if there is a mask."""
    torch._dynamo.reset()  # the code of all layers is one to it, and its variants are counted
    layer, state, masked = make(**GATED[name]), None, name != "exponential"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for n, grad in ((5, True), (more, False)):
        x, mask = numbers(2, n, 16), numbers(2, n) > -1 if masked else None
        with torch.set_grad_enabled(grad):
            (y, last), (got, other) = (
                run(x, key_mask=mask, state=state, return_state=True) for run in (layer, compiled)
            )
        assert_close(got, y)
        assert_close((other.sums.kv, other.conv), (last.sums.kv, last.conv))
        state = last.detach() if masked else None


@torch.no_grad()
def test_long_rows_in_bfloat16_have_the_angles_and_decays_of_float32() -> None:
    layer = make(torch.bfloat16, rotary="selective", forget_gate=True)
    x = inputs(layer, 1, 4000)
    _, state = layer(x, return_state=True)
    steps = layer.angle_steps(x)
    assert steps.dtype == layer.forget_gate(x).dtype == torch.float32
    exact = steps.double().sum(1) / (2 * torch.pi)
    turned = state.sums.angle.double() / 2.0**64
    assert float(((turned - exact + 0.5) % 1 - 0.5).abs().max()) < 1e-9  # turns


def test_selective_rotation_starts_as_the_fixed_one_bit_for_bit() -> None:
    torch.manual_seed(0)
    x, fixed = numbers(2, 9, 16), LinearRoPEAttention(16, 4).double()
    for bound in ("multiply", "add"):
        selective = LinearRoPEAttention(16, 4, rotary={"name": "selective", "bound": bound}).double()
        selective.load_state_dict(fixed.state_dict(), strict=False)
        for positions in (None, torch.arange(9) * 3):
            assert torch.equal(selective(x, positions=positions), fixed(x, positions=positions))


@needs_native
@pytest.mark.parametrize("name", ["block", "mamba-2", "one key head", "all"])
def test_in_float32_on_the_fused_kernels_the_layer_is_the_one_in_float64(name: str) -> None:
    exact, x = make(**GATED[name]), numbers(2, 70, 16)
    layer, losses, gradients = copy.deepcopy(exact).float(), [], []
    for module, given in ((exact, x.requires_grad_()), (layer, x.detach().float().requires_grad_())):
        loss = (module(given).double() * numbers(2, 70, 16, seed=2)).sum()
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, [given, *module.parameters()]))
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-3)
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        assert float((got.double() - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-6


@needs_native
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


def test_without_its_output_norm_a_layer_normalizes() -> None:
    layer, x = LinearRoPEAttention(16, 2, out_norm=True), torch.randn(1, 9, 16)
    plain = LinearRoPEAttention(16, 2)
    plain.load_state_dict(layer.state_dict(), strict=False)
    layer.out_norm = None
    torch.testing.assert_close(layer(x), plain(x))
