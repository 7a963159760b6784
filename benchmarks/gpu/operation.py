"""The operation alone: its share of the copy bandwidth, gates, long and packed sequences, steps, softmax attention.

Every case is compared with float64 before it is timed. Softmax attention rotates q and k inside the timed region with
plain PyTorch operations, as its users do. "bare" means without rotation.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bench.cases import AttentionCase
from benchmarks.gpu.machine import (
    L2_CACHE,
    MODES,
    TOLERANCE,
    WINDOW,
    Machine,
    Row,
    Shape,
    compare,
    each,
    finite,
    whole,
)
from linrope import LinearAttentionState, linear_rope_attention

DIMS = (64, 128, 256)  # sizes of a head
SOFTMAX = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
MOST_LAYERS = 128  # in a decoding step, whose states together exceed the L2 cache, as in a model


def case_of(on: Machine, shape: Shape, gates: bool = False) -> AttentionCase:
    b, n, h, d = shape
    return AttentionCase(n, b, h, d, on.device, on.dtype, gates=gates, backend=on.backend)


def check(case: AttentionCase, attend: Callable[[], Tensor]) -> Row:
    """Compares the last head's output and gradients with "eager" in float64, whose first tokens "reference" gives.

    "bound" is the output's error in units of the numerics contract's bound. AssertionError: an error is too large, or a
    number of any head is not finite.
    """
    case.g_out.new_full((4 * case.g_out.numel(),), math.nan)  # freed at once: fresh memory holds NaN
    results = attend(), *case.training(attend)
    finite(*results)
    actual = [x.detach()[-1:, :, -1:].double() for x in results]
    wide = [x.detach()[-1:, :, -1:].double().requires_grad_() for x in case.leaves]
    linear = partial(linear_rope_attention, backend="eager")  # in time linear in n
    options = {"log_decay": wide[3]} if case.log_decay is not None else {}
    out = linear(*wide[:3], rotary=case.rotary, **options)
    g_out = case.g_out[-1:, :, -1:].double()
    exact = [x.detach() for x in (out, *torch.autograd.grad(out, wide, g_out))]
    with torch.no_grad():
        start = {name: x[:, :WINDOW] for name, x in zip(("q", "k", "v", "log_decay"), wide)}
        exact[0][:, :WINDOW] = linear_rope_attention(**start, rotary=case.rotary, backend="reference")
        # M_i = sum_j |R phi(q_i)|^T |R psi(k_j)| |v_j| / den_i
        positions = torch.arange(case.n, device=case.device)
        q, k, v = wide[:3]
        phi_hat, psi_hat = (case.rotary(F.elu(x) + 1, positions).abs() for x in (q, k))
        magnitude = linear(phi_hat, psi_hat, v.abs(), feature_map=None, normalize=False, **options)
        magnitude /= linear(q, k, torch.ones_like(v[..., :1]), normalize=False, **options)
    error = (actual[0] - exact[0]).abs() / magnitude.clamp(min=1e-30)  # 0 where the one value seen is 0
    bound = float(error.max()) / TOLERANCE[case.dtype]
    assert bound <= 1, f"out is off: {bound:.3g} times the bound"
    names = ("out", "dq", "dk", "dv", "dlog_decay")
    tensors = zip(names, actual, exact)
    return {"bound": bound} | {name: compare(name, x, y, TOLERANCE[case.dtype]) for name, x, y in tensors}


def measured(
    on: Machine, case: AttentionCase, attend: Callable[[], Tensor], modes: tuple[str, ...] = MODES
) -> Row:
    """Times of both modes, launched and in a CUDA graph; with an empty L2 cache if the inputs would fit into it."""
    small, row = sum(x.nbytes for x in case.inputs) < L2_CACHE, Row()
    for mode in modes:
        row |= on.both_times(mode, partial(getattr(case, mode), attend), small)
    return row


def extra_memory(case: AttentionCase, attend: Callable[[], Tensor]) -> float:
    """A training step's memory beyond inputs, out and gradients, as a share of these."""
    torch.cuda.reset_peak_memory_stats()
    before, out = torch.cuda.memory_allocated(), attend()
    results = out, *torch.autograd.grad(out, case.leaves, case.g_out)
    extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)
    return extra / sum(x.nbytes for x in (*results, *case.leaves, case.g_out))


def linrope_row(on: Machine, shape: Shape, gates: bool = False) -> Row:
    case = case_of(on, shape, gates)
    row = {"errors": check(case, case.linrope), **measured(on, case, case.linrope)}
    return row | ({"extra_memory": extra_memory(case, case.linrope)} if on.on_gpu else {})


def rows_of(on: Machine, shapes: list[Shape], gates: bool = False) -> Iterator[Row]:
    yield from each(shapes, partial(linrope_row, on, gates=gates))


def gates(on: Machine) -> Iterator[Row]:
    """Forget gates per head, by size of the head."""
    for d in DIMS:
        full = [(8, 2048, 16, d), (1, 65_536, 8, d)]
        yield from rows_of(on, on.sizes(full, [(1, 40, 1, d)]), gates=True)


def bandwidth(on: Machine) -> Iterator[Row]:
    sizes = ((8, 2048, 16), (4, 8192, 16), (1, 8192, 96), (1, 65_536, 8), (2, 131_072, 16))
    for d in DIMS[:2]:
        yield from rows_of(on, on.sizes([(*size, d) for size in sizes], [(1, 70, 2, d)]))


def long(on: Machine) -> Iterator[Row]:
    """Long sequences of few heads, which are cut into segments."""
    for d in DIMS[:2]:
        full = [(1, n, 8, d) for n in (131_072, 1_048_576)]
        yield from rows_of(on, on.sizes(full, [(1, 600 if d == 64 else 40, 1, d)]))


def packed(on: Machine) -> Iterator[Row]:
    """Many short sequences in one call, beside the same sequences padded to the longest."""
    yield from each([on.sizes((4096, 256, 16, 64), (5, 20, 2, 64))], partial(packed_row, on))


def packed_row(on: Machine, shape: Shape) -> Row:
    number, longest, h, d = shape
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest + 1, (number,), generator=generator).to(on.device)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    mask = torch.arange(longest, device=on.device) < lengths[:, None]
    padded = case_of(on, (number, longest, h, d))
    case = case_of(on, (1, int(cu_seqlens[-1]), h, d))
    case.inputs = tuple(x.detach()[mask][None].requires_grad_() for x in padded.inputs)
    case.g_out = padded.g_out[mask][None]
    padded.g_out = padded.g_out * mask[..., None, None]  # what is padding has no gradient
    attend = partial(case.linrope, cu_seqlens=cu_seqlens)
    attend_padded = partial(padded.linrope, key_mask=mask)
    ours = attend(), *case.training(attend)
    theirs = attend_padded(), *padded.training(attend_padded)
    names = zip(("out", "dq", "dk", "dv"), ours, theirs)
    errors = {name: whole(name, x[0], y[mask], 2 * TOLERANCE[on.dtype]) for name, x, y in names}
    wide = [x.detach()[:, :, -1:].double() for x in case.inputs]
    out = linear_rope_attention(*wide, rotary=case.rotary, cu_seqlens=cu_seqlens, backend="eager")
    errors["out in float64"] = whole("out", ours[0][:, :, -1:], out, TOLERANCE[on.dtype])
    row = {"tokens": case.n, "errors": errors, "functions": {}}
    for name, one, call in (("packed", case, attend), ("padded", padded, attend_padded)):
        row["functions"][name] = measured(on, one, call)
    return row


# Softmax attention


def softmax_row(on: Machine, shape: Shape, backends: tuple[str, ...] | None = None) -> Row:
    """Times of linrope and of the available backends; only the forward pass of one half as fast as an earlier one."""
    row = linrope_row(on, shape) | {"functions": {}, "not_run": {}}
    backends, case = backends or (SOFTMAX if on.on_gpu else ("MATH",)), case_of(on, shape)

    def bare() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in case.inputs)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    for name in backends:
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                case.check_softmax()
                row["functions"][name] = measured(on, case, case.softmax, ("forward",))
                times = [x["forward"]["median_ms"] for key, x in row["functions"].items() if key in backends]
                if times[-1] <= 2 * min(times):
                    row["functions"][name] |= measured(on, case, case.softmax, ("training",))
                    row["functions"][f"{name} bare"] = measured(on, case, bare)
        except (RuntimeError, AssertionError) as error:  # no kernel for these inputs, no memory, ..
            row["not_run"][name] = repr(error)[:200]
    return row


def softmax(on: Machine) -> Iterator[Row]:
    full = [(8, n, 16, 64) for n in (256, 512, 1024, 2048, 4096)]
    yield from each(on.sizes(full, [(1, 32, 2, 64)]), partial(softmax_row, on))


# Decoding steps


def decode(on: Machine) -> Iterator[Row]:
    full = [(heads // 16, 1, 16, d) for d in (64, 128) for heads in (128, 512, 1024, 4096)]
    yield from each(on.sizes(full, [(1, 1, 2, 64), (1, 1, 2, 128)]), partial(decode_row, on))


def decode_row(on: Machine, shape: Shape) -> Row:
    return step_row(on, case_of(on, shape))


@torch.no_grad()
def step_row(on: Machine, case: AttentionCase) -> Row:
    """A step of many layers, whose states together exceed the L2 cache, as in a model. case: of one token."""
    wide: Row = {name: x.double() if isinstance(x, Tensor) else x for name, x in case.options.items()}
    step = partial(linear_rope_attention, *case.inputs, **case.options, return_state=True)
    _, first = step()
    kv, z = torch.randn_like(first.kv), first.z
    if case.options["normalize"]:
        z = 1000 + torch.rand_like(z)
    state = LinearAttentionState(kv, z, first.position + 1000, first.identity)
    layers = [state.clone() for _ in range(on.sizes(min(MOST_LAYERS, int(256e6 / kv.nbytes) + 1), 2))]
    wide |= {"backend": "reference", "return_state": True, "state": state.to(dtype=torch.float64)}
    exact, end = linear_rope_attention(*(x.double() for x in case.inputs), **wide)
    out, after = step(state=layers[0].donate())
    assert after.kv is layers[0].kv, "the state is not updated in place"
    compare("out", out, exact, TOLERANCE[on.dtype])
    compare("kv", after.kv, end.kv, 1e-5)
    if case.options["normalize"]:
        compare("z", after.z, end.z, 1e-6)

    def run() -> list[Tensor]:
        return [step(state=layer.donate())[0] for layer in layers]

    row: Row = {"layers": len(layers), "launched": on.timed(run)}
    replay = on.captured(run)
    exact, _ = step(state=layers[-1].clone().donate())
    assert torch.equal(replay()[-1], exact), "the CUDA graph gives another output"
    row["graph"] = on.timed(replay)
    return row | {"share of a copy": share_of_copy(on, row["graph"], len(layers) * kv.nbytes)}


def share_of_copy(on: Machine, times: Row, size: int) -> float:
    """How near a call that reads and writes states of that many bytes comes to the rate of a copy."""
    return float(2e3 * size / times["median_ms"] / on.copy_rate()["rate"])
