"""Tests that only a GPU can run: compiled kernels, real sizes, races. ``make gpu-run`` runs them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import Rotary, linear_rope_attention
from tests.support.oracle import assert_same, both_directions, everything, random_state

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TIMES = {torch.float32: 16, torch.bfloat16: 4, torch.float16: 4}  # of u M, in the numerics contract
NORM = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # of a window of tokens
every_dtype = pytest.mark.parametrize("dtype", UNIT, ids=lambda dtype: str(dtype).removeprefix("torch."))


def fresh(b: int, n: int, h: int, d: int, *, g: int, e: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random q, k, v, other ones in every run."""
    return tuple(torch.randn(b, n, heads, size).to(dtype) for heads, size in ((h, d), (g, d), (g, e)))


def sizes(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, causal: bool, mask: Tensor) -> Tensor:
    """M_i = sum_j |R phi(q_i)|^T |R psi(k_j)| |v_j| / den_i, in float64, over the keys of the mask (b, n)."""
    n, r = q.shape[1], q.shape[2] // k.shape[2]
    phi, psi = (torch.where(x > 0, x + 1, x.exp()) for x in (q.double(), k.double()))
    psi, v = (x.repeat_interleave(r, 2) for x in (psi, v.double()))
    phi_hat, psi_hat = (rotary(x, torch.arange(n)).abs() for x in (phi, psi))
    sees = torch.ones(n, n, dtype=torch.float64)
    sees = (sees.tril() if causal else sees) * mask[:, None]
    den = torch.einsum("bnhf,bmhf,bnm->bnh", phi, psi, sees)
    return torch.einsum("bnhf,bmhf,bnm,bmhe->bnhe", phi_hat, psi_hat, sees, v.abs()) / den[..., None]


@both_directions
@pytest.mark.parametrize(
    ("n", "d", "e", "h", "g"),
    [(1, 64, 64, 2, 2), (63, 16, 16, 2, 1), (65, 48, 64, 2, 2), (200, 64, 32, 4, 2), (1000, 64, 64, 2, 2),
     (1000, 96, 96, 2, 2), (1000, 128, 128, 2, 1), (1000, 192, 64, 2, 2), (700, 256, 256, 2, 2)],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("masked", [False, True])
@every_dtype
def test_outputs_and_gradients_are_the_oracle_s(dtype, masked, layout, n, d, e, h, g, causal) -> None:
    q, k, v = fresh(2, n, h, d, g=g, e=e, dtype=dtype)
    how: dict[str, Any] = {"rotary": Rotary(d, layout=layout), "causal": causal}
    mask = torch.ones(2, n, dtype=torch.bool)
    if masked:  # but the first, which every query sees
        how["key_mask"] = mask = (torch.rand(2, n) > 0.3) | (torch.arange(n) == 0)
    actual = everything(q, k, v, backend="triton", **how)
    oracle = everything(q.double(), k.double(), v.double(), backend="reference", **how)
    narrow = everything(q, k, v, backend="reference", **how)
    bound = TIMES[dtype] * UNIT[dtype] * sizes(q, k, v, how["rotary"], causal, mask)
    assert ((actual["out"].double() - oracle["out"]).abs() <= bound).all()
    for name in (name for name in oracle if name.startswith("d")):
        error, other = ((x[name].double() - oracle[name]).abs().max() for x in (actual, narrow))
        assert error <= 3 * other + 1e-5 * oracle[name].abs().max(), name


@pytest.mark.parametrize("b", [1, 256])  # in segments, and in one
@pytest.mark.parametrize("d", [64, 128])
@every_dtype
def test_long_sequences(dtype: torch.dtype, d: int, b: int) -> None:
    n = 65_536 if b == 1 else 2_000
    q, k, v = fresh(b, n, 2, d, g=1, e=d, dtype=dtype)
    how: dict[str, Any] = {"rotary": Rotary(d)}
    state, last = random_state(k, v, how), torch.tensor([b - 1])

    def of_the_last_sequence(*args: Any, **how: Any) -> Any:  # the loss is of it alone, as in the oracle
        out, end = linear_rope_attention(*args, **how)
        return out[-1:], end.reorder(last)

    actual = everything(q, k, v, state, call=of_the_last_sequence, backend="triton", **how)
    oracle = everything(*(x[-1:].double() for x in (q, k, v)), state.reorder(last), backend="eager", **how)
    for name, expected in oracle.items():
        # Late outputs and gradients are far smaller than early ones: each window by its own size.
        windows = zip(actual[name][-1:].double().split(512, 1), expected.double().split(512, 1))
        for x, y in windows if expected.shape[1] == n else [(actual[name][-1:].double(), expected)]:
            assert (x - y).norm() <= NORM[dtype] * y.norm(), name


@pytest.mark.parametrize("gates_per_unit", [False, True], ids=["per head", "per unit"])
@pytest.mark.parametrize(
    ("n", "d", "e", "h", "g"),
    [(1, 64, 64, 2, 2), (65, 48, 64, 2, 2), (1000, 64, 32, 4, 2), (1000, 192, 128, 2, 2), (700, 256, 256, 2, 2),
     (20_000, 128, 128, 2, 2)],
)  # fmt: skip
@every_dtype
def test_the_delta_rule_is_the_oracle_s(dtype, n, d, e, h, g, gates_per_unit) -> None:
    q, k, v = fresh(2, n, h, d, g=g, e=e, dtype=dtype)
    k[:, ::2] = k[:, :1].clone()  # half of the keys are equal
    gates = torch.randn(2, n, g, d // 2) if gates_per_unit else torch.randn(2, n, g)
    numbers = {"log_decay": -gates.exp() / 20, "erase": 2 * torch.rand(2, n, g), "write": torch.rand(2, n, g)}
    how: dict[str, Any] = {"rotary": Rotary(d), "feature_map": "unit", "normalize": False}
    actual = everything(q, k, v, backend="triton", **how, **numbers)
    wide = {name: x.double() for name, x in numbers.items()}
    oracle = everything(q.double(), k.double(), v.double(), backend="eager", **how, **wide)
    for name, expected in oracle.items():
        for x, y in zip(actual[name].double().split(512, 1), expected.split(512, 1), strict=True):
            assert (x - y).norm() <= NORM[dtype] * y.norm(), name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, PyTorch warns
@every_dtype
def test_packed_sequences_with_decay_never_ask_the_device(dtype: torch.dtype) -> None:
    lengths = torch.tensor([1, 700, 0, 3000, 64, 5000, 2], device="cpu")
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int().cuda()
    n = int(lengths.sum())
    q, k, v = fresh(1, n, 4, 64, g=2, e=64, dtype=dtype)
    decay = torch.tensor([0.9, 0.9999])
    how: dict[str, Any] = {"rotary": Rotary(64), "decay": decay, "cu_seqlens": cu_seqlens}
    how["rotary"].turns_per_position(q.device)  # the one copy from the host, once per Rotary and device
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.set_sync_debug_mode("error")
    out = linear_rope_attention(*leaves, backend="triton", **how)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.cuda.set_sync_debug_mode("default")
    wide = [x.detach().double().requires_grad_() for x in leaves]
    oracle = linear_rope_attention(*wide, backend="eager", **how)
    expected = torch.autograd.grad(oracle, wide, torch.ones_like(oracle))
    for actual, x in zip((out, *grads), (oracle, *expected), strict=True):
        for part, y in zip(actual.double().split(512, 1), x.split(512, 1), strict=True):
            assert (part - y).norm() <= NORM[dtype] * y.norm()


def test_a_tensor_of_more_than_two_to_the_31_elements() -> None:
    h, d = 16, 64
    n = 2**31 // (h * d) + 200
    q, k, v = (torch.randn(1, n, h, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    how: dict[str, Any] = {"rotary": Rotary(d)}
    out = linear_rope_attention(q, k, v, backend="triton", **how)
    g_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), g_out)
    last = slice(h - 1, h)
    leaves = [x.detach()[:, :, last].float().requires_grad_() for x in (q, k, v)]
    results, g_last = [x.detach()[:, :, last].float() for x in (out, *grads)], g_out[:, :, last].float()
    del q, k, v, out, grads, g_out  # 34 GB, and other processes use this GPU
    torch.cuda.empty_cache()
    expected = linear_rope_attention(*leaves, backend="eager", **how)
    expected_grads = torch.autograd.grad(expected, leaves, g_last)
    for actual, x in zip(results, (expected, *expected_grads), strict=True):
        for rows in (slice(0, 500), slice(n - 500, n)):
            error = (actual[:, rows] - x[:, rows]).abs().max()
            assert error <= 0.02 * x[:, rows].abs().max()


def test_seventy_thousand_heads() -> None:
    q, k, v = fresh(7000, 70, 10, 16, g=10, e=16, dtype=torch.float32)
    how: dict[str, Any] = {"rotary": Rotary(16)}
    actual = everything(q, k, v, backend="triton", **how)
    oracle = everything(*(x[-3:].double() for x in (q, k, v)), backend="reference", **how)
    torch.testing.assert_close(actual["out"][-3:].double(), oracle["out"], rtol=0, atol=1e-5)
    torch.testing.assert_close(actual["kv"][-3:].double(), oracle["kv"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
@every_dtype
def test_a_hundred_repetitions_give_the_same_bits(dtype: torch.dtype, d: int, gated: bool) -> None:
    q, k, v = fresh(2, 1500, 6, d, g=2, e=d, dtype=dtype)
    how: dict[str, Any] = {"rotary": Rotary(d), "backend": "triton"}
    if gated:
        how |= {"log_decay": -torch.rand(2, 1500, 2), "key_mask": torch.rand(2, 1500) > 0.3}
    first = everything(q, k, v, **how)
    for _ in range(99):
        for name, x in everything(q, k, v, **how).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("d", [64, 128])
def test_a_decoding_step_in_a_cuda_graph(d: int) -> None:
    b, h, steps = 4, 8, 20
    q, k, v = fresh(b, steps, h, d, g=4, e=d, dtype=torch.bfloat16)
    how: dict[str, Any] = {"rotary": Rotary(d), "backend": "triton"}
    expected, last = linear_rope_attention(
        *(x.double() for x in (q, k, v)), rotary=Rotary(d), backend="reference", return_state=True
    )
    step = [x[:, :1].clone() for x in (q, k, v)]
    _, start = linear_rope_attention(*(x[:, :0] for x in (q, k, v)), return_state=True, **how)
    with torch.no_grad():
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            linear_rope_attention(*step, state=start.clone().donate(), return_state=True, **how)
        torch.cuda.current_stream().wait_stream(warm)
        state, graph = start.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = linear_rope_attention(*step, state=state.donate(), return_state=True, **how)
        state.kv.copy_(start.kv), state.z.copy_(start.z), state.position.copy_(start.position)
        for t in range(steps):
            for static, x in zip(step, (q, k, v), strict=True):
                static.copy_(x[:, t : t + 1])
            graph.replay()
            error = (out.double() - expected[:, t : t + 1]).abs().max()
            assert error <= 0.02 * expected[:, t].abs().max()
    assert state.position.tolist() == [steps] * b
    torch.testing.assert_close(state.z, last.z, rtol=1e-6, atol=0)


def test_inductor_compiles_around_it() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_rope_attention(q * 2, k, v, rotary=Rotary(64), backend="triton").relu()

    q, k, v = fresh(2, 300, 2, 64, g=2, e=64, dtype=torch.float32)
    q.requires_grad_()
    grads = [torch.autograd.grad(f(q, k, v).sum(), q)[0] for f in (run, torch.compile(run, fullgraph=True))]
    torch.testing.assert_close(*grads)


def test_auto_takes_these_kernels() -> None:
    q, k, v = fresh(1, 100, 2, 64, g=2, e=64, dtype=torch.bfloat16)
    expected = linear_rope_attention(q, k, v, backend="triton")
    assert torch.equal(linear_rope_attention(q, k, v), expected)
    linear_rope_attention(q.double(), k.double(), v.double())  # eager takes what they cannot


@both_directions
def test_eager_runs_on_a_gpu_too(causal: bool) -> None:
    q, k, v = fresh(2, 700, 4, 16, g=2, e=8, dtype=torch.float64)
    how: dict[str, Any] = {"rotary": Rotary(16), "causal": causal}
    state = random_state(k, v, how)
    actual = everything(q, k, v, state, backend="eager", **how)
    assert_same(actual, everything(q, k, v, state, backend="reference", **how), 1e-10)
