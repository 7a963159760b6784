"""Compiles what calls of linrope start, from their own arguments, for a GPU that is not there.

PyTorch's tensors, strides and numbers pass through Triton's own specialization, forward and backward, and
only the launch is left out.
"""

import json
import sys

import torch
from linrope_kernels import tiles

from linrope import Rotary, linear_rope_attention, linear_rope_state
from linrope.backends import triton as backend
from linrope.feature_maps import UnitMap
from linrope.ops import convolve_parts, forget_and_write_gates, gated_norm
from tests.kernels.without_gpu import recorded, registers_and_spills


def attend(
    n: int = 130, d: int = 64, e: int = 64, h: int = 4, g: int = 4, b: int = 2, dtype=torch.bfloat16, **how
) -> None:
    """Forward and, unless it decodes, backward."""
    q, k, v = (torch.zeros(b, n, heads, size, dtype=dtype) for heads, size in ((h, d), (g, d), (g, e)))
    if how.pop("transposed", False):
        q, k, v = (x.movedim(3, 0).contiguous().movedim(0, 3) for x in (q, k, v))
    how = {"rotary": Rotary(d), "backend": "triton", "return_state": True} | how
    if n > 1:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, state = linear_rope_attention(q, k, v, **how)
    if n > 1:
        torch.autograd.grad(out, (q, k, v), torch.ones(1, dtype=dtype).expand_as(out))
    else:
        linear_rope_attention(q, k, v, state=state.donate(), **how)
        linear_rope_attention(q, k, v, state=state.at(torch.tensor([1, 0])), **how)


def main() -> None:
    backend.why_not = backend.why_not_call = backend.why_not_on = lambda *_, **__: None
    with recorded(int(sys.argv[1])) as launches:
        for name in sys.argv[2:]:
            FORMS[name]()
    for x in launches:
        line = {"kernel": x.kernel.__name__, "shared": x.compiled.metadata.shared}
        print(json.dumps(line | {"spills": registers_and_spills(x.compiled.asm["cubin"])[1]}))


def few_forms() -> None:
    """One at least for each kernel."""
    attend(key_mask=torch.zeros(2, 130, dtype=torch.bool))
    attend(n=1, g=2, angle_steps=torch.zeros(2, 1, 2, 32), log_decay=torch.zeros(2, 1, 1), eps_mode="add")
    attend(b=1, causal=False, cu_seqlens=torch.tensor([0, 30, 130]))


def other_forms() -> None:
    attend(causal=False, positions=torch.arange(130), key_positions=torch.arange(130) * 3)
    attend(b=1, g=2, decay=torch.full((2,), 0.9), cu_seqlens=torch.tensor([0, 30, 130], dtype=torch.int32))
    attend(g=1, rotary=Rotary(64, layout="half", rotary_dim=24))
    attend(transposed=True, rotary=None, normalize=False, feature_map="silu")
    attend(n=16, dtype=torch.float16, rotary=Rotary.whole_model(4, 64))
    attend(n=1, g=2, key_mask=torch.zeros(2, 1, dtype=torch.bool))
    attend(n=1, decay=torch.full((4,), 0.9))
    attend(log_decay=torch.zeros(1, 130, 4, requires_grad=True), angle_steps=torch.zeros(2, 130, 1, 32))
    attend(
        log_decay=torch.zeros(2, 130, 4, requires_grad=True), write=torch.zeros(2, 130, 4, requires_grad=True)
    )
    attend(rotary=Rotary.axial(64, 3), positions=torch.zeros(130, 3, dtype=torch.int64))
    linear_rope_state(
        *torch.zeros(2, 2, 130, 4, 64, dtype=torch.bfloat16), rotary=Rotary(64), backend="triton"
    )
    tiles.most_segments = lambda *_: 3
    tiles.SHORTEST_SEGMENT = 64
    attend(e=40, g=2, rotary=Rotary(64, layout="half"))


def wide_heads() -> None:
    attend(d=256, e=256)
    attend(d=128, decay=torch.full((4,), 0.9))
    attend(d=96, e=40, g=2, rotary=Rotary(96, layout="half"))


def delta_rule(n: int = 130, d: int = 64, h: int = 4, b: int = 2, units: int | None = 32, **how) -> None:
    """The delta rule, forward and backward, or one step. units: 0 for a decay per head, None for none."""
    g, numbers = how.get("g", h), {}
    more = {"write": (), "erase": ()} | ({} if units is None else {"log_decay": (units,) if units else ()})
    for name, last in more.items():
        numbers[name] = torch.zeros(b, n, g, *last, requires_grad=n > 1)
    attend(n, d, h=h, b=b, **{"feature_map": "unit", "normalize": False, "g": g} | numbers | how)


def delta_forms() -> None:
    delta_rule(g=2, key_mask=torch.zeros(2, 130, dtype=torch.bool), angle_steps=torch.zeros(2, 130, 2, 32))
    delta_rule(
        b=1, units=0, cu_seqlens=torch.tensor([0, 30, 130]), rotary=Rotary(64, layout="half", rotary_dim=24)
    )
    delta_rule(units=None, rotary=None, feature_map=UnitMap(64, "silu"), e=40)
    delta_rule(
        erase=None,
        write=None,
        units=48,
        rotary=Rotary(64, rotary_dim=32),
        feature_map="elu+1",
        normalize=True,
    )
    delta_rule(dtype=torch.float32, units=0, d=40)
    for units in (0, 32):
        delta_rule(n=1, units=units)
        q, k, v = torch.zeros(3, 1, 130, 4, 64, dtype=torch.bfloat16, requires_grad=True)
        numbers = torch.zeros(1, 130, 4)
        log = torch.zeros(1, 130, 4, units, requires_grad=True) if units else numbers
        how = {
            "erase": numbers,
            "feature_map": "unit",
            "rotary": Rotary(64),
            "backend": "triton",
            "log_decay": log,
        }
        state = linear_rope_state(k, v, **how)
        _, state = linear_rope_attention(q, k, v, **how, normalize=False, state=state, return_state=True)
        torch.autograd.grad(state.kv.sum(), (k, v))


def norm(
    h: int = 16, e: int = 128, g: int = 16, over: str = "head", order: str = "after", dtype=torch.bfloat16
) -> None:
    """With a gate and a skip connection, forward and backward."""
    out, gate, v = (torch.zeros(2, 70, *shape, dtype=dtype) for shape in ((h, e), (h * e,), (g, e)))
    weight, skip = torch.zeros(h * e if over == "all" else e, requires_grad=True), torch.zeros(h)
    how = {"over": over, "gate_order": order, "skip_order": order, "backend": "triton"}
    y = gated_norm(out, weight, gate=gate, v=v, skip=skip, **how)
    y.backward(torch.ones(1, dtype=dtype).expand_as(y))


def norms() -> None:
    norm()
    norm(g=4, order="before", over="all", dtype=torch.float16)
    norm(h=128, g=128, over="all", order="before")  # too many values for a tile
    norm(h=5, g=5, e=20, over="all", dtype=torch.float32)
    for e in (2048, 2**14):  # the norm before a model's layer, over its whole width
        x, weight = torch.zeros(1, 70, 1, e, dtype=torch.bfloat16, requires_grad=True), torch.zeros(e)
        gated_norm(x, weight, backend="triton").sum().backward()
        gated_norm(x, gate=torch.zeros(1, 70, e), backend="triton").sum().backward()


def convolution() -> None:
    """q, k and v of many channels."""
    convolve(8, 1024, (1024, 1024, 2048))


def packed_convolution() -> None:
    """q, k and v of few channels, packed and continued."""
    convolve(1, 1000, (64, 64, 128), bounds=torch.tensor([0, 300, 1000], dtype=torch.int32))


def convolve(b: int, n: int, sizes: tuple[int, ...], bounds: torch.Tensor | None = None) -> None:
    parts = [torch.zeros(b, n, size, dtype=torch.bfloat16).requires_grad_() for size in sizes]
    weight, bias = torch.zeros(sum(sizes), 4, requires_grad=True), torch.zeros(sum(sizes), requires_grad=True)
    before = None if bounds is None else torch.zeros(len(bounds) - 1, 3, sum(sizes), dtype=torch.bfloat16)
    ys = convolve_parts(parts, weight, bias, before=before, cu_seqlens=bounds, silu=True, backend="triton")
    torch.autograd.grad(ys, [*parts, weight, bias], [torch.zeros_like(y) for y in ys])


def gates(heads: int = 16, dtype=torch.bfloat16) -> None:
    x, weight = torch.zeros(2, 70, 100, dtype=dtype), torch.zeros(heads, 100, dtype=dtype, requires_grad=True)
    log_decay, write = forget_and_write_gates(x, weight, torch.zeros(heads), backend="triton")
    torch.autograd.grad((log_decay, write), weight, (torch.zeros_like(write), torch.zeros_like(write)))


def many_gates() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        gates(64, dtype)
        gates(128, dtype)


FORMS = {"few": few_forms, "other": other_forms, "wide": wide_heads, "norms": norms}


def layer() -> None:
    """Starts every kernel that the default block's layer launches."""
    gates()
    norm()
    convolution()
    more = {name: torch.zeros(2, 130, 4, requires_grad=True) for name in ("log_decay", "write")}
    attend(e=128, normalize=False, **more)


FORMS |= {"delta": delta_forms, "layer": layer, "gates": gates, "many gates": many_gates}
FORMS |= {"convolution": convolution, "packed convolution": packed_convolution}

if __name__ == "__main__":  # it replaces parts of Triton and of linrope
    main()
