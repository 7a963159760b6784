"""States that calls write to: given away for one step, or rows of a pool, as serving holds them."""

import pytest
import torch

from linrope import LinearAttentionState, Rotary, linear_rope_attention, linear_rope_state
from tests.support.oracle import BACKENDS, FAST, NATIVE, both_directions, every_kernel, randoms
from tests.support.states import ROTARY, D, E, G, H, assert_same, attend, some_state, tokens


@pytest.mark.parametrize("n", [0, 1, 7])
@both_directions
@every_kernel
@torch.no_grad()
def test_a_state_is_written_to_by_one_token_that_it_was_given_away_to_and_by_no_other_call(
    backend: str, causal: bool, n: int
) -> None:
    q, k, v = randoms(2, 7, 2, 8, dtype=torch.float32)
    how = {"rotary": Rotary(8), "causal": causal, "backend": backend}
    state = linear_rope_state(k, v, rotary=Rotary(8))
    kept, inputs = state.clone(), [x[:, :n] for x in (q, k, v)]
    expected, last = linear_rope_attention(*inputs, state=state, return_state=True, **how)
    assert_same(state, kept)
    out, after = linear_rope_attention(*inputs, state=state.donate(), return_state=True, **how)
    assert (after.kv.data_ptr() == state.kv.data_ptr()) == (n == 1)
    other = kept.clone()
    assert torch.equal(linear_rope_attention(*inputs, state=other.donate(), **how), expected)
    assert torch.equal(out, expected)
    for given in (state, other):
        assert_same(given, last if n == 1 else kept)


# A pool of states, as serving holds them


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
def test_sequences_in_a_pool_join_leave_and_fork_as_if_each_were_alone(backend: str, gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    how = {"rotary": ROTARY, "backend": backend}

    def draw(n: int) -> dict[str, torch.Tensor]:
        shapes = {"q": (1, n, H, D), "k": (1, n, G, D), "v": (1, n, G, E)}
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if gated:
            made["log_decay"] = -torch.rand(1, n, G, generator=generator)
            made["angle_steps"] = torch.randn(1, n, G, D // 2, generator=generator)
        return made

    def run(inputs: dict[str, torch.Tensor], **more) -> tuple[torch.Tensor, LinearAttentionState]:
        return linear_rope_attention(**inputs, return_state=True, **how, **more)

    def join(parts: list[dict[str, torch.Tensor]], dim: int) -> dict[str, torch.Tensor]:
        return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}

    empty = {name: x.expand(6, 0, *x.shape[2:]) for name, x in draw(0).items()}
    pool = run(empty)[1]
    fresh, memory = pool.rows().clone(), pool.kv.data_ptr()
    prompts = [draw(n) for n in (5, 0, 70)]
    alone = [run(prompt) for prompt in prompts]
    with torch.no_grad():
        slots = torch.tensor([4, 0, 1])
        bounds = torch.tensor([0, 5, 5, 75])
        out, after = run(join(prompts, 1), state=pool.at(slots), cu_seqlens=bounds)
        # "eager" pads short sequences by their average length, and sums of other shapes round otherwise.
        rounding = 1e-5 if backend == "eager" else 0
        torch.testing.assert_close(out, torch.cat([x for x, _ in alone], 1), rtol=rounding, atol=rounding)
        assert after.slots is not None
        assert torch.equal(pool.position, torch.tensor([0, 70, 0, 0, 5, 0]))
        states = {slot: pool.at(torch.tensor([slot])).rows() for slot in slots.tolist()}
        for members in ([4, 1], [1, 4, 0], [0], [4, 1, 5]):
            if 5 in members:  # a fork: 5 goes on from where 1 is
                for name, x in pool.tensors().items():
                    x[5] = x[1]
                    assert x.data_ptr() == getattr(pool, name).data_ptr()
                states[5] = states[1].clone()
            tokens = [draw(1) for _ in members]
            out = linear_rope_attention(**join(tokens, 0), state=pool.at(torch.tensor(members)), **how)
            for i, (slot, token) in enumerate(zip(members, tokens, strict=True)):
                expected, states[slot] = run(token, state=states[slot])
                assert torch.equal(out[i : i + 1], expected)
                assert_same(pool.at(torch.tensor([slot])).rows(), states[slot])
    assert pool.kv.data_ptr() == memory
    assert_same(pool.at(torch.tensor([2, 3])).rows(), fresh.reorder(torch.tensor([2, 3])))


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [([0, 3], ValueError, r"slots: got \[0, 3\], expected different rows 0 .. 2"),
     ([1, 1], ValueError, r"slots: got \[1, 1\], expected different rows 0 .. 2"),
     ([[0], [1]], ValueError, r"slots: got shape \(2, 1\), expected \(b,\)"),
     ([0.0, 1.0], TypeError, r"slots: got torch.float32, expected a torch.Tensor of int64"),
     ([2], ValueError, r"state: got kv of shape \(1, 2, 4, 6\), expected")],
)  # fmt: skip
def test_the_rows_of_a_pool_are_refused_where_they_cannot_be_written(slots, error, message) -> None:
    with pytest.raises(error, match=message):
        attend(tokens(1, b=2), some_state().at(torch.tensor(slots)))


@every_kernel
@torch.no_grad()
def test_slots_of_any_stride_select_their_rows(backend: str) -> None:
    pool = linear_rope_state(torch.zeros(8, 0, 2, 4), torch.zeros(8, 0, 2, 4))
    q, k, v = randoms(2, 1, 2, 4, dtype=torch.float32)
    linear_rope_attention(q, k, v, state=pool.at(torch.tensor([6, 5, 1, 5])[::2]), backend=backend)
    assert pool.kv.flatten(1).any(1).nonzero().flatten().tolist() == [1, 6]


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_no_tokens_leave_a_fading_state_as_it_was(backend: str) -> None:
    k, v, decay = torch.zeros(3, 0, 2, 4), torch.zeros(3, 0, 2, 6), torch.tensor([0.5, 0.9])
    empty = linear_rope_state(k, v, decay=decay, backend=backend)
    assert empty.position.tolist() == [0, 0, 0]
    _, k, v = randoms(3, 5, 2, 4, e=6, dtype=torch.float32)
    state = linear_rope_state(k, v, decay=decay, backend=backend)
    after = linear_rope_state(k[:, :0], v[:, :0], decay=decay, state=state, backend=backend)
    assert_same(after, state)
