"""The trapezoidal rule against a plain loop over tokens: pieces, masks, packing, gradients, precision, decoding."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import Rotary, feature_maps
from linrope.layer.trapezoid import trapezoidal_attention
from tests.layer.cases import assert_same_state, needs_native, numbers
from tests.support.trapezoid_loop import trapezoidal_loop

N, G, D, E = 12, 2, 4, 3


def tokens(b: int = 2, n: int = N, h: int = G, *, gates: bool = True, pairs: int = 0) -> dict[str, Tensor]:
    """The tensors of a call, by name."""
    found = {"q": numbers(b, n, h, D), "k": numbers(b, n, G, D, seed=2), "v": numbers(b, n, G, E, seed=3)}
    found["share"] = numbers(b, n, G, seed=4).sigmoid()
    if gates:
        found["write"] = numbers(b, n, G, seed=5).exp()
        found["log_decay"] = -numbers(b, n, G, seed=6).exp() / 3
    if pairs:
        found["angle_steps"] = numbers(b, n, G, pairs, seed=7)
    return found


# The tensors of ``tokens``, the options of the call, and the positions.
CALLS = {
    "plain": ({"gates": False}, {}, None),
    "gates": ({}, {}, None),
    "two queries per key": ({"h": 4}, {}, None),
    "rotation": ({}, {"rotary": Rotary(D)}, None),
    "partial rotation": ({}, {"rotary": Rotary(D, rotary_dim=2, layout="half")}, None),
    "rotation per head": ({}, {"rotary": Rotary.whole_model(G, D)}, None),
    "steps": ({"pairs": 1}, {}, None),
    "steps on a rotation": ({"pairs": 2, "h": 4}, {"rotary": Rotary(D, layout="half")}, None),
    "fixed decay": ({}, {"decay": torch.tensor([0.9, 0.5]).double()}, None),
    "positions with gaps": (
        {"pairs": 2},
        {"rotary": Rotary(D), "decay": torch.tensor([0.9, 0.99]).double()},
        torch.tensor([3, 4, 4, 9, 10, 11, 30, 31, 31, 32, 40, 41]),
    ),
    "feature map": ({"h": 4}, {"rotary": Rotary(D), "feature_map": "elu+1"}, None),
    "learned map": ({}, {"rotary": Rotary(2 * D), "feature_map": feature_maps.make("hedgehog", D).double()}, None),
}  # fmt: skip
every_call = pytest.mark.parametrize(("shape", "options", "positions"), CALLS.values(), ids=CALLS)


def by_loop(given: dict, options: dict, positions: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """The outputs by the plain loop, of the tokens that the mask shows."""
    fmap, rotary = options.get("feature_map"), options.get("rotary")
    fmap = feature_maps.make(fmap, D) if isinstance(fmap, str) else fmap
    b, n, h, _ = given["q"].shape
    places = (torch.arange(n) if positions is None else positions).double().expand(b, n)
    outs = torch.zeros(b, n, h, E, dtype=torch.float64)
    for row in range(b):
        shown = torch.ones(n, dtype=torch.bool) if mask is None else mask[row]
        p, own = places[row, shown], {name: x[row, shown] for name, x in given.items()}
        q, k, v, share = (own[name] for name in ("q", "k", "v", "share"))
        if fmap is not None:
            q, k = fmap.queries(q[None])[0], fmap.keys(k[None])[0]
        angles = own.get("angle_steps", p.new_zeros(len(p), G, 1)).cumsum(0)
        if rotary is not None:
            angles = angles + p[:, None, None] * rotary.frequencies[0].expand(G, -1)
        log_decay = own.get("log_decay", torch.zeros_like(share))
        if "decay" in options:
            log_decay = log_decay + torch.cat((p[:1], p.diff()))[:, None] * options["decay"].log()
        write = own.get("write", torch.ones_like(share))
        layout = "interleaved" if rotary is None else rotary.layout
        out = trapezoidal_loop(q, k, v, share, write, log_decay, angles, layout)
        outs = outs.index_put((torch.tensor(row), shown), out)
    return outs


def cut(given: dict[str, Tensor], a: int, b: int) -> dict[str, Tensor]:
    return {name: x[:, a:b] for name, x in given.items()}


def in_pieces(given: dict, options: dict, cuts, positions: Tensor | None = None, mask: Tensor | None = None):
    """The outputs and the last state of calls that hand on their states."""
    outs, state = [], None
    for a, b in pairwise(cuts):
        places = None if positions is None else positions[..., a:b]
        shown = None if mask is None else mask[:, a:b]
        out, state = trapezoidal_attention(
            **cut(given, a, b), **options, positions=places, key_mask=shown, state=state, return_state=True
        )
        outs.append(out)
    return torch.cat(outs, 1), state


@every_call
@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("cuts", [(0, N), range(N + 1), (0, 5, N), (0, 1, 1, 7, N), (0, 0, N)], ids=str)
def test_outputs_are_those_of_the_loop_cut_anywhere(shape, options, positions, cuts, backend: str) -> None:
    given, options = tokens(**shape), {**options, "backend": backend}
    out, state = in_pieces(given, options, cuts, positions)
    assert_close(out, by_loop(given, options, positions), rtol=1e-11, atol=1e-11)
    assert_same_state(state, in_pieces(given, options, (0, N), positions)[1])


MASKS = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
    "inside": [1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1],
    "all": [0] * N,
}


@every_call
@pytest.mark.parametrize("side", MASKS)
def test_hidden_tokens_are_skipped_whatever_they_hold(shape, options, positions, side: str) -> None:
    """Without positions of the caller's, hidden tokens count as places."""
    given = tokens(**shape)
    mask = torch.tensor([MASKS[side], [1] * N]).bool()
    expected = by_loop(given, options, positions, mask)
    for name in ("k", "v", "share", "write", "log_decay", "angle_steps"):
        if name in given:
            given[name][~mask] = torch.nan
    for cuts in ((0, N), (0, 4, N), range(N + 1)):
        out, _ = in_pieces(given, options, cuts, positions, mask)
        assert_close(out[mask], expected[mask], rtol=1e-11, atol=1e-11)
        assert bool(out.isfinite().all())


@every_call
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_are_those_alone_and_go_on_apart(shape, options, positions, masked: bool) -> None:
    given, bounds = tokens(b=1, **shape), [0, 4, 4, 9, N]
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1]]).bool() if masked else None
    how = {**options, "cu_seqlens": torch.tensor(bounds), "positions": positions, "key_mask": mask}
    packed, states = trapezoidal_attention(**given, **how, return_state=True)
    after = tokens(b=1, n=4, **shape)
    more = trapezoidal_attention(**after, **options, cu_seqlens=torch.arange(5), state=states)
    for i, (a, b) in enumerate(pairwise(bounds)):
        alone, state = in_pieces(given, options, (a, b), positions, mask)
        assert_close(packed[:, a:b], alone)
        assert_same_state(state, states, slice(i, i + 1))
        assert_close(
            more[:, i : i + 1], trapezoidal_attention(**cut(after, i, i + 1), **options, state=state)
        )


@every_call
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_the_loop_also_through_states(shape, options, positions, masked: bool) -> None:
    given, mask = tokens(**shape), None
    if masked:
        mask = torch.tensor([MASKS["inside"], MASKS["right"]]).bool()
        for name in given.keys() - {"q"}:
            given[name][~mask] = torch.nan
    given = {name: x.requires_grad_() for name, x in given.items()}
    weight = numbers(2, N, given["q"].shape[2], E, seed=9) * (1 if mask is None else mask[..., None, None])
    expected = torch.autograd.grad(
        (by_loop(given, options, positions, mask) * weight).sum(), list(given.values())
    )
    for cuts in ((0, N), (0, 1, 5, N)):
        out, _ = in_pieces(given, options, cuts, positions, mask)
        found = torch.autograd.grad((out * weight).sum(), list(given.values()))
        assert_close(dict(zip(given, found)), dict(zip(given, expected)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_token_changes_no_bit_of_an_earlier_output(dtype: torch.dtype) -> None:
    given = {name: x.to(dtype) for name, x in tokens(n=40, pairs=2).items()}
    before = trapezoidal_attention(**given, rotary=Rotary(D))
    for changed in (7.0, torch.nan):
        other = {name: x.clone() for name, x in given.items()}
        for name, x in other.items():
            x[:, 25:] = -0.5 if name == "log_decay" else changed
        assert torch.equal(trapezoidal_attention(**other, rotary=Rotary(D))[:, :25], before[:, :25])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_stay_within_the_bound_of_the_numerics_contract(dtype: torch.dtype) -> None:
    """16 u M in float32 and 4 u M in half precision, with M the sum of absolute values."""
    given = tokens(n=300, pairs=2)
    given = {name: x.to(dtype) if name in "qkv" else x.float() for name, x in given.items()}
    exact = {name: x.double() for name, x in given.items()}
    out = trapezoidal_attention(**given)
    assert out.dtype == dtype
    expected = trapezoidal_attention(**exact, backend="reference")
    sizes = {name: x.abs() for name, x in exact.items() if name not in ("log_decay", "angle_steps")}
    for name in ("q", "k"):  # a pair's length is the most that a rotation leaves in either of its numbers
        sizes[name] = exact[name].unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    size = trapezoidal_attention(**sizes, log_decay=exact["log_decay"], backend="reference")
    unit = torch.finfo(dtype).eps / 2
    worst = float(((out.double() - expected).abs() / size).max()) / unit
    assert worst < (16 if dtype == torch.float32 else 4), worst


@needs_native
@torch.no_grad()
def test_a_long_decoding_loop_in_one_memory_is_the_loop() -> None:
    given, options = tokens(n=60, pairs=2), {"rotary": Rotary(D)}
    expected = by_loop(given, options, None)
    short = {name: x.float() for name, x in given.items()}
    _, state = trapezoidal_attention(**cut(short, 0, 5), **options, return_state=True)
    memory = state.tensors()
    for i in range(5, 60):
        state = state.donate()
        out, state = trapezoidal_attention(**cut(short, i, i + 1), **options, state=state, return_state=True)
        assert_close(out, expected[:, i : i + 1].float(), rtol=1e-4, atol=1e-4)
        assert all(state.tensors()[name] is x for name, x in memory.items())


def test_factors_of_another_shape_are_refused_by_name() -> None:
    given = tokens()
    for name in ("share", "write"):
        with pytest.raises(ValueError, match=rf"^{name}: got shape \(2, 12, 1\), expected \(b, n, g\)"):
            trapezoidal_attention(**{**given, name: given[name][..., :1]})


def test_rows_of_a_pool_are_refused_with_gradients_before_anything_is_written() -> None:
    given = tokens(b=1, n=1)
    _, pool = trapezoidal_attention(**tokens(b=3, n=4), return_state=True)
    before = {name: x.clone() for name, x in pool.tensors().items()}
    given["v"].requires_grad_()  # v enters the sums with the next token only
    with pytest.raises(RuntimeError, match="state: got rows of a pool in a call with gradients"):
        trapezoidal_attention(**given, state=pool.at(torch.tensor([1])))
    assert all(torch.equal(pool.tensors()[name], x) for name, x in before.items())
