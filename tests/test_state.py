"""LinearAttentionState: its contract, its independence of every other tensor, and its file."""

import json
import pickle
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from linrope import LinearAttentionState, Rotary, linear_rope_attention, linear_rope_state
from tests.oracle import BACKENDS, FAST, NATIVE, random_state, randoms

B, G, H, D, E = 3, 2, 4, 4, 6
ROTARY = Rotary(D)
IDENTITY = "some map; some rotation"


def tokens(n: int, seed: int = 0, dtype: torch.dtype = torch.float32, b: int = B) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, n, H, D), (b, n, G, D), (b, n, G, E)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attend(inputs, state=None, **how) -> tuple[torch.Tensor, LinearAttentionState]:
    return linear_rope_attention(*inputs, state=state, return_state=True, **{"rotary": ROTARY, **how})


def some_state(n: int = 5, **how) -> LinearAttentionState:
    return attend(tokens(n), **how)[1]


def tensors(state: LinearAttentionState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return state.kv, state.z, state.position


def assert_same(a: LinearAttentionState, b: LinearAttentionState) -> None:
    for x, y in zip(tensors(a), tensors(b), strict=True):
        assert_close(x, y, atol=0, rtol=0)
    assert a.identity == b.identity


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_state_is_float32_or_wider_and_z_float64(dtype, wide, backend, causal, n) -> None:
    _, state = attend(tokens(n, dtype=dtype), backend=backend, causal=causal)
    assert (state.kv.shape, state.kv.dtype) == ((B, G, D, E), wide)
    assert (state.z.shape, state.z.dtype) == ((B, G, D), torch.float64)
    assert torch.equal(state.position, torch.full((B,), n))


def test_position_goes_on_from_the_state() -> None:
    state = some_state(5)
    for n in (3, 0, 1):
        expected = state.position + n
        _, state = attend(tokens(n), state)
        assert torch.equal(state.position, expected)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"positions": torch.tensor([4, 9, 7])}, [8, 8, 8]),
        ({"positions": torch.tensor([[0, 1, 2], [5, 6, 7], [9, 9, 9]], dtype=torch.int32)}, [3, 8, 10]),
        ({"positions": torch.tensor([1, 2, 3]), "key_positions": torch.tensor([4, 5, 6])}, [7, 7, 7]),
    ],
)
def test_position_follows_the_last_key_where_positions_are_given(how, expected) -> None:
    _, state = attend(tokens(3), **how)
    assert state.position.tolist() == expected
    _, after = attend(tokens(2), state)
    assert after.position.tolist() == [position + 2 for position in expected]


def test_position_counts_keys_where_queries_are_of_another_length() -> None:
    (q, *_), (_, k, v) = tokens(2), tokens(5)
    _, state = attend((q, k, v), causal=False)
    assert state.position.tolist() == [5] * B


def test_detach_keeps_the_numbers_and_cuts_the_graph() -> None:
    inputs = [x.requires_grad_() for x in tokens(4)]
    state = attend(inputs)[1]
    assert state.kv.requires_grad
    detached = state.detach()
    assert not any(x.requires_grad for x in tensors(detached))
    assert_same(detached, state)


def test_clone_keeps_the_graph() -> None:
    inputs = [x.requires_grad_() for x in tokens(4)]
    attend(inputs)[1].clone().kv.sum().backward()
    assert inputs[1].grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_converts_kv_alone(dtype: torch.dtype) -> None:
    state = some_state()
    moved = state.to("cpu", dtype)
    assert (moved.kv.dtype, moved.z.dtype, moved.position.dtype) == (dtype, torch.float64, torch.int64)
    assert_same(replace(moved, kv=moved.kv.float()), state)


def test_to_moves_every_tensor() -> None:
    assert {x.device.type for x in tensors(some_state().to("meta"))} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_to_refuses_other_types(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"dtype: got {dtype}, expected float32 or float64"):
        some_state().to(dtype=dtype)


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 0], [2], [0, 0, 1, 1, 2, 2], []])
def test_reorder_is_as_if_the_sequences_had_been_fed_in_that_order(index: list[int]) -> None:
    order = torch.tensor(index, dtype=torch.int64)
    history, now = tokens(5), tokens(2, seed=1, b=len(index))
    reordered = attend(history)[1].reorder(order)
    out, state = attend(now, reordered)
    again = attend([x[order] for x in history])[1]
    expected, expected_state = attend(now, again)
    assert torch.equal(out, expected)
    assert_same(state, expected_state)


@pytest.mark.parametrize(
    "index", [torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2), torch.zeros(3, dtype=torch.bool)]
)
def test_reorder_refuses_what_is_no_vector_of_integers(index: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"index: got torch\.\w+ \(.*\), expected integers of shape \(b,\)"):
        some_state().reorder(index)


def test_reorder_refuses_an_index_past_the_batch() -> None:
    with pytest.raises(IndexError):
        some_state().reorder(torch.tensor([B]))


@pytest.mark.parametrize(
    "copied",
    [
        LinearAttentionState.detach,
        LinearAttentionState.clone,
        LinearAttentionState.to,
        lambda state: state.to("cpu", state.kv.dtype),
        lambda state: state.reorder(torch.arange(B)),
    ],
)
def test_copies_share_no_memory_with_the_state(copied) -> None:
    state = some_state()
    kept = pickle.loads(pickle.dumps(state))
    for x in tensors(copied(state)):
        x.fill_(77)
    assert_same(state, kept)


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_neither_changes_nor_shares_the_state_it_is_given(backend, causal, n, grad) -> None:
    given = some_state()
    inputs = [x.requires_grad_(grad) for x in tokens(n, seed=1)]
    kept = pickle.loads(pickle.dumps(given))
    _, state = attend(inputs, given, backend=backend, causal=causal)
    assert_same(given, kept)
    returned = pickle.loads(pickle.dumps(state.detach()))
    with torch.no_grad():
        for x in (*tensors(given), *inputs):
            x.fill_(77)
        assert_same(state.detach(), returned)
        for x in tensors(state):
            x.fill_(55)
    assert all(bool((x == 77).all()) for x in tensors(given))


@torch.no_grad()
def test_a_state_goes_in_and_out_of_an_exported_program() -> None:
    class Step(torch.nn.Module):
        def forward(self, q, k, v, state):
            return linear_rope_attention(q, k, v, rotary=Rotary(4), state=state, return_state=True)

    q, k, v = randoms(2, 5, 2, 4)
    _, state = linear_rope_attention(q, k, v, rotary=Rotary(4), return_state=True)
    out, after = torch.export.export(Step(), (q, k, v, state)).module()(q, k, v, state)
    expected, expected_state = Step()(q, k, v, state)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(after.kv, expected_state.kv)
    assert torch.equal(after.position, expected_state.position)


def test_state_is_a_pytree() -> None:
    state = some_state()
    leaves, spec = pytree.tree_flatten({"layer": state})
    assert all(x is y for x, y in zip(leaves, tensors(state), strict=True))
    assert_same(pytree.tree_unflatten(leaves, spec)["layer"], state)
    doubled = pytree.tree_map(lambda x: 2 * x, state)
    assert isinstance(doubled, LinearAttentionState)
    assert torch.equal(doubled.kv, 2 * state.kv)
    assert doubled.identity == state.identity
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load_keep_every_bit(dtype: torch.dtype, tmp_path) -> None:
    state = some_state().to(dtype=dtype)
    state.save(tmp_path / "new folder" / "state.safetensors")
    loaded = LinearAttentionState.load(str(tmp_path / "new folder" / "state.safetensors"))
    assert_same(loaded, state)
    assert torch.equal(attend(tokens(3, 1), loaded)[0], attend(tokens(3, 1), state)[0])


def test_save_takes_views_and_tensors_that_require_grad(tmp_path) -> None:
    inputs = [x.requires_grad_() for x in tokens(3)]
    state = attend(inputs)[1]
    view = replace(state, kv=state.kv.mT.contiguous().mT)
    view.save(tmp_path / "state")
    assert_same(LinearAttentionState.load(tmp_path / "state"), state.detach())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv": torch.zeros(B, G, D, E).bfloat16()}, TypeError, "state.kv: got torch.bfloat16"),
        ({"z": torch.zeros(B, G, D).half()}, TypeError, "state.z: got torch.float16, expected float32"),
        ({"position": torch.zeros(B).int()}, TypeError, "state.position: got torch.int32, expected int64"),
        ({"kv": torch.zeros(B, G, D)}, ValueError, r"kv \(3, 2, 4\), .* expected \(b, g, f, e\)"),
        ({"z": torch.zeros(B, G, D + 1)}, ValueError, r"z \(3, 2, 5\)"),
        ({"position": torch.zeros(B + 1).long()}, ValueError, r"position \(4,\)"),
    ],
)
def test_construction_refuses_other_types_and_shapes(change, error, message) -> None:
    with pytest.raises(error, match=message):
        replace(some_state(), **change)


@pytest.mark.parametrize(
    "how",
    [
        {"feature_map": "exp"},
        {"feature_map": None},
        {"rotary": None},
        {"rotary": Rotary(D, base=500.0)},
        {"rotary": Rotary(D, layout="half")},
        {"rotary": Rotary(D, rotary_dim=2)},
    ],
    ids=str,
)
def test_a_call_refuses_the_state_of_another_map_or_rotation(how) -> None:
    with pytest.raises(ValueError, match=r"state: made with .*; expected .*, as this"):
        attend(tokens(2), some_state(), **how)


def plain(**change) -> dict[str, torch.Tensor]:
    kv, z = torch.ones(B, G, D, E), torch.ones(B, G, D, dtype=torch.float64)
    return {"kv": kv, "z": z, "position": torch.zeros(B).long(), **change}


META = {"format": "linrope.LinearAttentionState", "version": "1", "identity": IDENTITY}


def written(path, content=None, **metadata) -> None:
    """A well-formed safetensors file, of whatever content."""
    kept = {name: value for name, value in {**META, **metadata}.items() if value is not None}
    save_file(plain() if content is None else content, path, metadata=kept)


def cut(path, size: int) -> None:
    written(path)
    path.write_bytes(path.read_bytes()[:size])


def lengthened(path) -> None:
    written(path)
    path.write_bytes(path.read_bytes() + b"\0" * 8)


def overlapping(path) -> None:
    where = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": META, "kv": where, "z": where, "position": where}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


DAMAGED = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a state\n" * 9),
    "header too long": lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
    "cut in the header": lambda path: cut(path, 40),
    "cut in the data": lambda path: cut(path, -1),
    "extra bytes": lengthened,
    "overlapping": overlapping,
    "pickle": lambda path: path.write_bytes(pickle.dumps({"kv": 1})),
    "torch.save": lambda path: torch.save(plain(), path),
    "other keys": lambda path: written(path, {**plain(), "more": torch.ones(1)}),
    "missing key": lambda path: written(path, {"kv": torch.ones(1), "z": torch.ones(1)}),
    "shapes": lambda path: written(path, plain(z=torch.ones(B, G, D + 1))),
    "half precision": lambda path: written(path, plain(kv=torch.ones(B, G, D, E).bfloat16())),
    "integer sums": lambda path: written(path, plain(z=torch.ones(B, G, D).long())),
    "another format": lambda path: written(path, format="other"),
    "no format": lambda path: written(path, format=None),
    "newer": lambda path: written(path, version="2"),
    "no version": lambda path: written(path, version=None),
    "no identity": lambda path: written(path, identity=None),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_load_refuses_damaged_and_foreign_files_and_names_them(damage, tmp_path) -> None:
    path = tmp_path / "broken.safetensors"
    damage(path)
    with pytest.raises(ValueError, match=r"broken\.safetensors: "):
        LinearAttentionState.load(path)


def test_load_says_which_version_it_got_and_which_it_reads(tmp_path) -> None:
    written(tmp_path / "state", version="2")
    with pytest.raises(ValueError, match="version '2', expected '1'"):
        LinearAttentionState.load(tmp_path / "state")


@pytest.mark.parametrize("name", ["missing", "."])
def test_load_of_a_missing_file_says_so(name: str, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        LinearAttentionState.load(tmp_path / name)


class Opened:
    """Unpickling one would run code."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def test_load_never_runs_a_pickle(tmp_path) -> None:
    (tmp_path / "state").write_bytes(pickle.dumps(Opened()))
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        LinearAttentionState.load(tmp_path / "state")


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    path, old = tmp_path / "state", some_state()
    old.save(path)

    def interrupted(tensors, temporary, metadata) -> None:
        with open(temporary, "wb") as file:
            file.write(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr("linrope.files.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        some_state(9).save(path)
    assert_same(LinearAttentionState.load(path), old)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("decay", [None, torch.tensor([0.5, 0.9])])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_donated_state_is_written_in_place_by_a_decoding_step(backend: str, decay) -> None:
    q, k, v = randoms(2, 6, 4, 8, g=2, dtype=torch.float32)
    how = {"rotary": Rotary(8), "backend": backend, "return_state": True, "decay": decay}
    expected, last = linear_rope_attention(q, k, v, **how)
    _, state = linear_rope_attention(*(x[:, :3] for x in (q, k, v)), **how)
    memory = [x.data_ptr() for x in (state.kv, state.z, state.position)]
    for i in range(3, 6):
        step = [x[:, i : i + 1] for x in (q, k, v)]
        out, state = linear_rope_attention(*step, state=state.donate(), **how)
        assert [x.data_ptr() for x in (state.kv, state.z, state.position)] == memory
        assert not state.donated
        torch.testing.assert_close(out, expected[:, i : i + 1])
    torch.testing.assert_close(state.kv, last.kv)
    torch.testing.assert_close(state.z, last.z, rtol=1e-6, atol=0)
    assert torch.equal(state.position, last.position)


@pytest.mark.parametrize("backend", ["reference", "eager", "triton"])
def test_other_calls_leave_a_donated_state_alone(backend: str) -> None:
    q, k, v = randoms(2, 3, 2, 8, dtype=torch.float32)
    _, state = linear_rope_attention(q, k, v, return_state=True)
    before = state.clone()
    calls = [([x[:, :1].clone().requires_grad_() for x in (q, k, v)], {})]  # autograd needs the old numbers
    calls += [((q, k, v), {}), ((q, k, v), {"causal": False}), ([x[:, :0] for x in (q, k, v)], {})]
    for inputs, how in calls:
        out, after = linear_rope_attention(
            *inputs, state=state.donate(), return_state=True, backend=backend, **how
        )
        assert after.kv.data_ptr() != state.kv.data_ptr()
        for x, y in ((state.kv, before.kv), (state.z, before.z), (state.position, before.position)):
            assert torch.equal(x, y)
        if inputs[0].requires_grad:
            out.sum().backward()


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
@torch.no_grad()
def test_a_state_is_written_to_by_one_token_that_it_was_given_away_to_and_by_no_other_call(
    backend: str, causal: bool, n: int
) -> None:
    q, k, v = randoms(2, n, 2, 8, dtype=torch.float32)
    how = {"rotary": Rotary(8), "causal": causal, "backend": backend}
    state = linear_rope_state(k, v, rotary=Rotary(8))
    kept = state.clone()
    out = linear_rope_attention(q, k, v, state=state, **how)
    expected, last = linear_rope_attention(q, k, v, state=state, return_state=True, **how)
    assert torch.equal(out, expected)
    assert_same(state, kept)
    assert torch.equal(linear_rope_attention(q, k, v, state=state.donate(), **how), expected)
    assert_same(state, last if n == 1 else kept)


def test_a_donated_state_that_needs_gradients_is_left_alone() -> None:
    q, k, v = randoms(1, 1, 2, 8, dtype=torch.float32)
    state = random_state(k, v, {})
    kv = state.kv.detach().clone()
    out, _ = linear_rope_attention(q, k, v, state=state.donate(), return_state=True)
    out.sum().backward()
    assert torch.equal(state.kv, kv)
    assert state.kv.grad is not None


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


def test_the_rows_of_a_pool_are_refused_where_they_cannot_be_written() -> None:
    pool = some_state().detach()
    q, k, v = tokens(1, b=2)
    with pytest.raises(ValueError, match=r"slots: got \[0, 3\], expected different rows 0 .. 2"):
        pool.at(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"slots: got \[1, 1\], expected different rows 0 .. 2"):
        pool.at(torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"slots: got torch.float32 \(2,\), expected integers"):
        pool.at(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"state: got kv of shape \(1, 2, 4, 6\), expected"):
        attend((q, k, v), pool.at(torch.tensor([2])))
    with pytest.raises(RuntimeError, match="rows of a pool in a call with gradients"):
        attend((q, k.requires_grad_(), v), pool.at(torch.tensor([0, 1])))


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_no_tokens_leave_a_fading_state_as_it_was(backend: str) -> None:
    k, v, decay = torch.zeros(3, 0, 2, 4), torch.zeros(3, 0, 2, 6), torch.tensor([0.5, 0.9])
    empty = linear_rope_state(k, v, decay=decay, backend=backend)
    assert empty.position.tolist() == [0, 0, 0]
    _, k, v = randoms(3, 5, 2, 4, e=6, dtype=torch.float32)
    state = linear_rope_state(k, v, decay=decay, backend=backend)
    after = linear_rope_state(k[:, :0], v[:, :0], decay=decay, state=state, backend=backend)
    assert_same(after, state)


def test_states_join_in_one_batch_and_go_on_as_if_each_were_alone() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 6, 2, 4)
    how = {"rotary": Rotary(4), "return_state": True}
    starts = [[x[i : i + 1, : 3 + i] for x in (q, k, v)] for i in range(3)]
    alone = [linear_rope_attention(*start, **how)[1] for start in starts]
    both = LinearAttentionState.cat([alone[0], LinearAttentionState.cat(alone[1:])])
    assert both.position.tolist() == [3, 4, 5]
    out, after = linear_rope_attention(q[:, -1:], k[:, -1:], v[:, -1:], state=both, **how)
    for i, state in enumerate(alone):
        one, last = linear_rope_attention(*(x[i : i + 1, -1:] for x in (q, k, v)), state=state, **how)
        assert torch.equal(out[i : i + 1], one)
        assert torch.equal(after.kv[i : i + 1], last.kv)


def test_states_that_differ_do_not_join() -> None:
    k = v = torch.randn(1, 3, 2, 4)
    state = linear_rope_state(k, v)
    for other, cause in (
        (linear_rope_state(k, v, feature_map="relu"), "states: got one of"),
        (state.to(dtype=torch.float64), "expected the same but for the batch"),
        (linear_rope_state(k[:, :, :1], v[:, :, :1]), "expected the same but for the batch"),
        (linear_rope_state(k, v, angle_steps=torch.zeros(1, 3, 2, 2)), "states: got"),
    ):
        with pytest.raises(ValueError, match=cause):
            LinearAttentionState.cat([state, other])
    with pytest.raises(ValueError, match="states: got none"):
        LinearAttentionState.cat([])


def test_a_repr_is_short() -> None:
    state = some_state()
    assert len(repr(state)) < 120
    assert state.identity not in repr(state)
    assert f"position [{state.position[0]}" in repr(state)
