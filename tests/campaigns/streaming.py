"""States of very long streams: positions up to 2^31 - 1, and a thousand million tokens, without drift.

``python -m tests.campaigns.streaming --pieces 2000 --tokens 1000000000``
"""

from typing import Any

import torch

from linrope import Rotary, feature_maps, linear_rope_attention, linear_rope_state
from linrope.backends import native
from linrope.conformance.bounds import BOUNDS, error_in_bounds
from linrope.feature_maps import FeatureMap
from linrope.rotation.rotary import MAX_POSITION
from tests.campaigns.command import numbers
from tests.support.contract import refused
from tests.support.equation import Equation
from tests.support.oracle import DATA

OPTIONS: dict[str, dict[str, Any]] = {  # what a stream's calls have in common
    "plain": {},
    "decay": {"decay": torch.tensor([0.9, 1 - 2.0**-24], dtype=torch.float64)},
    "gates and steps": {"gated": True, "steps": True},
    "running maximum": {"feature_map": "softmax", "gated": True},
    "the delta rule": {
        "erases": True,
        "feature_map": "unit",
        "normalize": False,
        "gated": True,
        "steps": True,
    },
    "all": {"decay": torch.tensor([0.999, 1 - 2.0**-16], dtype=torch.float64), "gated": True, "steps": True},
}


def stream(name: str, backend: str, pieces: int, seed: int = 0) -> float:
    """The largest error of any output, in units of the bound, from position 0 to 2^31 - 1 with gaps between.

    A stream is cut into pieces of one to forty tokens, each with the state of the one before; the
    equation goes along in float64.
    """
    options = dict(OPTIONS[name])
    gated, steps, erases = (options.pop(x, False) for x in ("gated", "steps", "erases"))
    d, g, e = 8, 2, 4
    how: dict[str, Any] = {
        "feature_map": feature_maps.make(options.pop("feature_map", "elu+1"), d), "rotary": Rotary(d),
        "causal": True,
        "normalize": True, "eps": 1e-6, "eps_mode": "clamp", "rope_order": "after", **options,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    state = exact = sizes = None
    end, worst = 0, 0.0
    fmap: FeatureMap = how["feature_map"]
    gap = (MAX_POSITION - 45 * pieces) // max(1, pieces - 1)
    for piece in range(pieces):
        n = int(torch.randint(1, 41, (), generator=generator)) if piece % 3 else 1
        q, k = (torch.randn(1, n, heads, d, generator=generator) for heads in (2 * g, g))
        v = torch.randn(1, n, g, e, generator=generator)
        own = dict(how)
        if piece % 4 == 0:  # the others go on from the state
            end += gap
            own["positions"] = end + torch.arange(n)
        if piece == pieces - 1:
            end = MAX_POSITION + 1 - n
            own["positions"] = end + torch.arange(n)
        if erases:  # at most as much as a contraction allows
            squared = fmap.keys(k).square().sum(-1)
            own["erase"] = 2 * torch.rand(1, n, g, generator=generator) / squared
        if gated:
            own["log_decay"] = -torch.rand(1, n, g, generator=generator) * 10.0 ** -(piece % 5)
        if steps:
            own["write"] = torch.randn(1, n, g, generator=generator)
            own["angle_steps"] = 6 * torch.rand(1, n, g, d // 2, generator=generator) - 3
        wide = own | {x: own[x].double() for x in DATA if x in own}
        with torch.no_grad():
            equation = Equation(sizes)
            oracle, exact = equation(q.double(), k.double(), v.double(), state=exact, **wide)
            given = state.donate() if state is not None and n == 1 else state
            out, state = linear_rope_attention(
                q, k, v, state=given, return_state=True, backend=backend, **own
            )
        sizes = equation.sizes
        assert torch.equal(state.position, exact.position), f"{name}: position {state.position}"
        assert state.angle is None or torch.equal(state.angle, exact.angle.expand_as(state.angle)), (
            f"{name}: angle"
        )
        worst = max(worst, error_in_bounds(out, oracle, sizes.out))
        end += n
    return worst


def count(tokens: int, backend: str, piece: int = 10**6) -> tuple[float, float]:
    """Errors of z (relative) and kv (in units of its bound) after so many tokens, a piece at a time.

    All pieces have the same keys and values, so that the sums are known: z is so many times one piece's,
    and a pair's kv is a geometric series of turns by one piece's length.
    """
    d = 4
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(1, piece, 1, d, generator=generator), torch.randn(1, piece, 1, 1, generator=generator)
    rotary, pieces = Rotary(d), max(1, tokens // piece)
    once = linear_rope_state(k.double(), v.double(), rotary=rotary, backend="eager")
    state = None
    for _ in range(pieces):
        state = linear_rope_state(k, v, rotary=rotary, state=state, backend=backend)
    assert state is not None
    assert state.position.tolist() == [pieces * piece]
    turn = rotary.angles(torch.arange(pieces) * piece)[:, 0]  # (pieces, pairs)
    series = torch.polar(torch.ones_like(turn), turn).sum(0)
    pairs = torch.view_as_complex(once.kv[0, 0, :, 0].view(-1, 2).contiguous()) * series
    exact = torch.view_as_real(pairs).flatten()
    size = pieces * linear_rope_state(k.double(), v.double().abs(), backend="eager").kv[0, 0, :, 0]
    z_error = float(((state.z - pieces * once.z).abs() / (pieces * once.z)).max())
    kv_error = (state.kv[0, 0, :, 0].double() - exact).abs() / (BOUNDS[torch.float32] * size)
    return z_error, float(kv_error.max())


def run(pieces: int, tokens: int) -> None:
    backends = ("eager",) if native.why_not() else ("native", "eager")
    for backend in backends:
        for name, options in OPTIONS.items():
            if "erases" in options and "erase" in refused(backend):
                continue
            worst = stream(name, backend, pieces)
            print(
                f"{backend}, {name}: {pieces} pieces up to position 2^31 - 1, error {worst:.3f} of the bound",
                flush=True,
            )
            assert worst <= 1
    z, kv = count(tokens, backends[0], min(10**6, tokens))
    print(f"{backends[0]}: {tokens} tokens: z is off by {z:.1e}, kv by {kv:.1e} of its bound", flush=True)
    assert z <= 1e-6
    assert kv <= 1


if __name__ == "__main__":
    run(**numbers(__doc__, pieces=2000, tokens=10**9))
