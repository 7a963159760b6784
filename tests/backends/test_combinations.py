"""Backends x maps x rotations x kinds of calls against the equation: output, last state, all gradients.

``python -m tests.backends.test_combinations`` prints what works in which backend.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from linrope import LinearAttentionState, Rotary, feature_maps
from tests.backends.contract import TABLE, Contract
from tests.backends.contract import check as compare
from tests.feature_maps.table import MAPS
from tests.support.oracle import random_state, randoms

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

D, G = 4, 2

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROTATIONS: dict[str, Any] = {
    "none": lambda f: None,
    "interleaved": Rotary,
    "half": lambda f: Rotary(f, layout="half"),
    "partial": lambda f: Rotary(f, layout="half", rotary_dim=2),
    "theta per head": lambda f: Rotary(f, theta=torch.arange(1.0, G * f // 2 + 1).view(G, -1) / 7),
    "axial": lambda f: Rotary.axial(f, 2),
    "yarn, attention factor": lambda f: Rotary(f, scaling=YARN),
    "xpos": lambda f: Rotary(f, xpos=20.0),
    "before the map": Rotary,
}
PACKED = [0, 3, 3, 40, 70]
CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "packed": {"cu_seqlens": PACKED},
    "packed, bidirectional": {"cu_seqlens": PACKED, "causal": False, "written": True},
    "masked": {"masked": True},
    "decayed": {"decay": True},
    "grouped": {"h": 2 * G},
    "stateful": {"stateful": True},
    "one token": {"n": 1, "stateful": True, "h": 2 * G},
    "one token, decayed": {"n": 1, "stateful": True, "decay": True},
    "gated": {"gated": True},
    "gated, decayed, grouped, masked": {"gated": True, "written": True, "decay": True, "h": 2 * G, "masked": True},
    "gated, packed, stateful": {"gated": True, "cu_seqlens": PACKED, "stateful": True},
    "steps": {"steps": True},
    "steps for all heads, bidirectional": {"steps": "shared", "causal": False, "masked": True},
    "gated, steps, stateful, grouped": {
        "gated": "shared", "written": "shared", "steps": True, "h": 2 * G, "stateful": True
    },
    "one token, gated, steps": {
        "n": 1, "gated": True, "written": True, "steps": True, "stateful": True, "h": 2 * G
    },
    "eps added": {"eps_mode": "add", "gated": True, "stateful": True},
    "all at once, gated": {
        "cu_seqlens": PACKED, "masked": True, "decay": True, "h": 2 * G, "stateful": True, "gated": True, "steps": True
    },
    "all at once": {"cu_seqlens": PACKED, "masked": True, "decay": True, "h": 2 * G, "stateful": True},
}  # fmt: skip


def problem(
    name: str, rotation: str, call: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], LinearAttentionState | None, dict[str, Any]]:
    """q, k, v, a state and the other arguments of linear_rope_attention."""
    options = CALLS[call]
    n, h, packed = options.get("n", 70), options.get("h", G), options.get("cu_seqlens")
    b = 1 if packed is not None else 2
    label, choices = MAPS[name]
    if "num_heads" in choices:
        choices = choices | {"num_heads": h, "num_kv_heads": G}
    fmap = feature_maps.make(label, D, **choices)
    q, k, v = randoms(b, n, h, D, g=G, e=3, dtype=dtype)
    order = "before" if rotation == "before the map" else "after"
    how: dict[str, Any] = {
        "feature_map": fmap,
        "normalize": fmap.positive,
        "rotary": ROTATIONS[rotation](D if order == "before" else fmap.feature_dim),
        "rope_order": order,
        "causal": options.get("causal", True),
        # A small normalizer magnifies what float32 has rounded off the features.
        "eps": 1e-4 if dtype == torch.float64 else 1.0,
    }
    generator, device = torch.Generator().manual_seed(1), torch.get_default_device()
    if packed is not None:
        how["cu_seqlens"] = torch.tensor(packed, dtype=torch.int32)
    if "masked" in options:
        how["key_mask"] = (torch.rand(b, n, generator=generator, device="cpu") > 0.3).to(device)
    if rotation == "axial":
        how["positions"] = torch.randint(0, 50, (n, 2), generator=generator, device="cpu").to(device)
    state = random_state(k, v, how, h=h) if "stateful" in options else None
    rotary = how["rotary"]

    def heads(option: str) -> int:
        return 1 if options[option] == "shared" else G

    if "gated" in options:  # strong, weak and none
        gates = -torch.rand(b, n, heads("gated"), generator=generator, device="cpu").double() * 2
        gates[:, 5::11], gates[:, 7::13], gates[:, 20:22] = -20, 0, -1e4
        how["log_decay"] = gates.to(device, dtype)
    if "written" in options:
        own = torch.Generator().manual_seed(2)
        how["write"] = torch.randn(b, n, heads("written"), generator=own, device="cpu").to(device, dtype)
    if "steps" in options and takes_steps(rotation):
        shape = heads("steps"), (fmap.feature_dim if rotary is None else rotary.rotary_dim) // 2
        steps = 3 * torch.randn(b, n, *shape, generator=generator, device="cpu").double()
        how["angle_steps"] = steps.to(device, dtype)
        if state is not None:
            angle = torch.randint(-(2**62), 2**62, (len(state.kv), *shape), generator=generator)
            state = replace(state, angle=angle)
    how["eps_mode"] = options.get("eps_mode", "clamp")
    if "decay" in options:
        how["decay"] = torch.tensor([0.5, 0.97], dtype=torch.float64)
    return [q, k, v], state, how


def takes_steps(rotation: str) -> bool:
    """Whether steps of the data can turn features beside it."""
    return rotation not in ("xpos", "before the map")


def why_not(contract: Contract, name: str, rotation: str, call: str) -> str | None:
    """None where it works and is the equation; else the reason that the library gives."""
    try:
        (q, k, v), state, how = problem(name, rotation, call, contract.dtype)
        compare(contract, q, k, v, state, combined=True, **how)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def refused(contract: Contract, name: str, rotation: str, call: str) -> str | None:
    """What the reason must say; None: it must work."""
    options = CALLS[call]
    if rotation == "axial" and ("decay" in options or "cosformer" in name):
        return "got a rotation with axes=2"
    if rotation == "xpos" and options.get("causal") is False:
        return "got xpos=20.0, expected causal=True"
    if rotation == "xpos" and contract.backend in ("native", "triton"):
        return "use backend='eager'"
    return None


PRODUCT = [(rotation, call) for rotation in ROTATIONS for call in CALLS]
# Maps that are not elementwise reach the kernels as features: for the slow interpreter two stand for all.
INTERPRETED = ("elu+1", "relu", "relu2", "exp", "silu", "identity", "favor+", "taylor2")
# What comes together in no other test of tests/backends; make test-long has the rest.
TOGETHER = {
    "before the map": "gated, decayed, grouped, masked", "axial": "steps for all heads, bidirectional",
    "theta per head": "all at once", "partial": "one token, gated, steps", "none": "all at once, gated",
    "yarn, attention factor": "packed, bidirectional",
}  # fmt: skip


def cases(contract: Contract, name: str) -> list[tuple[str, str]]:
    """(rotation, call): of elu+1 all, of other maps every third call, each with another rotation."""
    if contract.backend == "triton":
        return list(TOGETHER.items()) if name == "elu+1" else [("half", "all at once")]
    if name == "elu+1":
        return PRODUCT
    rotations, start = list(ROTATIONS), list(MAPS).index(name)  # the next map has the next rotation
    chosen = list(CALLS)[start % 3 :: 3]
    return [(rotations[(start + i) % len(rotations)], call) for i, call in enumerate(chosen)]


CONTRACTS = [contract for contract in TABLE if contract.combined and not contract.rounding]


def each(*backends: str) -> list[Any]:
    """(contract, name of a map) to run; tests/backends/test_equation.py has eight maps on each backend."""
    rows = []
    for contract in CONTRACTS:
        for name in INTERPRETED if contract.name == "triton" else MAPS:
            slow = contract.name in ("reference", "triton") and name != "elu+1"
            marks = [*contract.marks, *([pytest.mark.long] if slow else [])]
            if contract.name in backends:
                rows.append(pytest.param(contract, name, id=f"{contract.name}-{name}", marks=marks))
    return rows


def check(contract: Contract, name: str, cases: list[tuple[str, str]]) -> None:
    for rotation, call in cases:
        reason, expected = why_not(contract, name, rotation, call), refused(contract, name, rotation, call)
        assert (reason is None) == (expected is None), f"{rotation}, {call}: {reason}"
        assert expected is None or expected in str(reason)


@pytest.mark.parametrize(("contract", "name"), each("reference", "eager", "native", "triton"))
def test_every_backend_is_the_equation(contract: Contract, name: str) -> None:
    check(contract, name, cases(contract, name))


ALL = [x for x in each("eager", "native", "triton") if x.values[0].name != "triton" or x.values[1] == "elu+1"]


@pytest.mark.long
@pytest.mark.parametrize(("contract", "name"), ALL)
def test_every_backend_is_the_equation_whatever_comes_together(contract: Contract, name: str) -> None:
    check(contract, name, PRODUCT)


def main() -> None:
    """Tables of what works: kinds of calls by rotations, then maps."""
    for contract in CONTRACTS:
        print(f"\n{contract.name}, elu+1: 1 where output, state and gradients are the equation's")
        print(" " * 24 + "  ".join(ROTATIONS))
        for call in CALLS:
            works = [why_not(contract, "elu+1", rotation, call) is None for rotation in ROTATIONS]
            row = "  ".join(f"{int(work):^{len(name)}}" for name, work in zip(ROTATIONS, works, strict=True))
            print(f"{call:<24}{row}", flush=True)
        works = [name for name in MAPS if why_not(contract, name, "half", "all at once") is None]
        print(f"maps that work with 'half', all at once: {len(works)} of {len(MAPS)}")


if __name__ == "__main__":
    main()
