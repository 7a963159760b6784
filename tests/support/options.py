"""The options of linear_rope_attention: a few values of each, and draws in which every two values come together."""

import random
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, feature_maps
from linrope.feature_maps import FeatureMap
from tests.support.maps import MAPS
from tests.support.oracle import DATA, random_mask, random_state, randoms

D, E = 4, 3  # of a head, of its values
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def theta_per_head(f: int, g: int) -> Tensor:
    return torch.arange(1.0, g * f // 2 + 1).view(g, -1) / 7


ROTATIONS: dict[str, Any] = {  # made from the number of features and of the heads of the state
    "none": lambda f, g: None,
    "interleaved": lambda f, g: Rotary(f),
    "half": lambda f, g: Rotary(f, layout="half"),
    "partial": lambda f, g: Rotary(f, rotary_dim=2),
    "partial, half": lambda f, g: Rotary(f, layout="half", rotary_dim=2),
    "theta per head": lambda f, g: Rotary(f, theta=theta_per_head(f, g)),
    "two axes": lambda f, g: Rotary.axial(f, 2),
    "yarn": lambda f, g: Rotary(f, scaling=YARN),  # with an attention factor
    "xpos": lambda f, g: Rotary(f, xpos=20.0),
    "before the map": lambda f, g: Rotary(f),
    "before the map, theta per head": lambda f, g: Rotary(f, theta=theta_per_head(f, g)),
}
# Maps that reach a backend in different ways: by name, by name with a running maximum, as features.
OF_EACH_KIND = (
    "elu+1",
    "relu",
    "relu2",
    "silu",
    "identity",
    "exp",
    "favor+",
    "softmax",
    "taylor2",
    "unit silu",
    "features",
)
SHAPES = ("none", "per head", "for all heads", "for all rows")  # of what each token has
# Each option, under the name of its argument, and its values. All values of the others fit the first one.
OPTIONS: dict[str, Mapping[str, Any] | Sequence[str]] = {
    "heads": {  # of q, k and v
        "alike": (2, 2, 2), "grouped": (4, 2, 2), "one of keys": (3, 1, 1), "more of values": (2, 2, 4),
        "values alone": (1, 1, 3),
    },
    "tokens": {  # of q and of k
        "two chunks": (70, 70), "one": (1, 1), "none": (0, 0), "many chunks": (197, 197), "few keys": (70, 5),
        "few queries": (5, 70), "no keys": (5, 0), "no queries": (0, 5), "four": (4, 4),
    },
    "feature_map": OF_EACH_KIND,
    "rotary": ROTATIONS,  # and rope_order
    "causal": {"causal": True, "bidirectional": False},
    "normalize": {"no": False, "yes": True},
    "decay": ("none", "per head"),
    "log_decay": (*SHAPES, "strong", "per unit", "per unit for all"),
    "angle_steps": SHAPES,
    "write": SHAPES,
    "erase": SHAPES,
    "positions": ("none", "rising", "of each row", "up to the last", "transposed"),
    "key_positions": ("none", "of each row", "of all rows"),
    "key_mask": ("none", "some"),
    "cu_seqlens": {"none": None, "packed": (0, 0.1, 0.1, 0.7, 1)},
    "state": ("some", "none"),
    "eps": {"small": 1e-4, "large": 30.0},
    "eps_mode": {"clamp": "clamp", "add": "add"},
}  # fmt: skip
Row = dict[str, str]  # a value of each option
FIRST: Row = {option: next(iter(values)) for option, values in OPTIONS.items()}


def fits(row: Row) -> bool:
    """Whether linear_rope_attention takes these values together; tests/operation/test_checks.py has its refusals."""
    row = FIRST | row
    rotary, given = row["rotary"], {option for option in row if row[option] != "none"}
    n, m = OPTIONS["tokens"][row["tokens"]]
    by_position, before = "decay" in given or rotary == "xpos", rotary.startswith("before")
    return not any((
        row["causal"] == "bidirectional" and ({"decay", "log_decay"} & given or rotary == "xpos"),
        row["tokens"] == "one" and "state" not in given,  # then gradients that are 0 are all rounding
        n != m and (row["causal"] == "causal" or {"cu_seqlens", "angle_steps"} & given),
        (rotary == "xpos" or before) and "angle_steps" in given,
        rotary == "two axes" and "decay" in given,
        "key_positions" in given and (by_position or "log_decay" in given),
        # Before the map, angles are formed in the dtype of q and k, in which large ones have few digits.
        (by_position or before) and row["positions"] not in ("none", "rising"),
        row["normalize"] == "yes" and not is_positive(row["feature_map"]),
        # Their normalizer may be 0, and the rotated numerator's rounding is then divided by eps.
        row["normalize"] == "yes" and row["feature_map"] in ("relu", "relu2") and row["eps"] == "small",
        "erase" in given and (row["normalize"] == "yes" or row["causal"] == "bidirectional" or rotary == "xpos"),
        "erase" in given and (is_scaled(row["feature_map"]) or is_elementwise(row["feature_map"])),
        before and row["log_decay"].startswith("per unit"),
    ))  # fmt: skip


@cache
def made_once(label: str) -> FeatureMap:
    """A map to look at; the next random numbers are those that come without it."""
    with torch.random.fork_rng(devices=[]):
        return make_map(label, D, 2, 2)


def is_positive(label: str) -> bool:
    return label == "features" or made_once(label).positive


def is_scaled(label: str) -> bool:
    return label != "features" and made_once(label).log_scaled


def is_elementwise(label: str) -> bool:
    return label != "features" and made_once(label).elementwise is not None


def make_map(label: str, d: int, h: int, g: int) -> FeatureMap:
    name, choices = MAPS[label]
    if "num_heads" in choices:
        choices = choices | {"num_heads": h, "num_kv_heads": g}
    if "max_length" in choices:
        choices = choices | {"max_length": 400}
    return feature_maps.make(name, d, **choices)


def draw(seed: int, options: Mapping[str, Sequence[str]] | None = None, *, together: int = 2) -> list[Row]:
    """Rows in which all values of every two options come together, if they fit; together=1: every value occurs.

    options: those to draw from, if not from all of OPTIONS.
    """
    chosen = OPTIONS | (options or {})
    return list(_draw(seed, tuple((option, tuple(values)) for option, values in chosen.items()), together))


@cache  # several backends have the same rows
def _draw(seed: int, chosen: tuple[tuple[str, tuple[str, ...]], ...], together: int) -> list[Row]:
    options = dict(chosen)
    chance, rows = random.Random(seed), []
    missing = dict.fromkeys(  # in an order that does not depend on the process, as a set's does
        frozenset(pairs)
        for some in combinations(options, together)
        for pairs in _products(some, options)
        if fits(dict(pairs))
    )
    while missing:
        row = dict(chance.choice([*missing]))
        for option in chance.sample([*options], len(options)):
            if option not in row:
                values = [
                    x for x in chance.sample(options[option], len(options[option])) if fits(row | {option: x})
                ]
                row[option] = max(values, key=lambda x: _new(row, (option, x), missing, together))
        for x in combinations(row.items(), together):
            missing.pop(frozenset(x), None)
        rows.append({option: row[option] for option in OPTIONS})
    return rows


def _products(
    some: Sequence[str], options: Mapping[str, Sequence[str]]
) -> Iterator[tuple[tuple[str, str], ...]]:
    if not some:
        yield ()
        return
    for value in options[some[0]]:
        for rest in _products(some[1:], options):
            yield ((some[0], value), *rest)


def _new(
    row: Row, pair: tuple[str, str], missing: Container[frozenset[tuple[str, str]]], together: int
) -> int:
    """How many of the combinations that are still missing the pair adds to the row."""
    return sum(frozenset((*rest, pair)) in missing for rest in combinations(row.items(), together - 1))


def problem(
    row: Row, dtype: torch.dtype, *, d: int = D, e: int = E
) -> tuple[list[Tensor], LinearAttentionState | None, dict[str, Any]]:
    """q, k, v, a state and the other arguments of linear_rope_attention."""
    values = {
        option: OPTIONS[option][row[option]] for option in OPTIONS if isinstance(OPTIONS[option], Mapping)
    }
    (h, keys, g), (n, m), rotary = values["heads"], values["tokens"], row["rotary"]
    packed = values["cu_seqlens"]
    b = 2 if packed is None else 1
    q, k, v = randoms(b, n, h, d, g=keys, m=m, e=e, dtype=dtype)
    if h == keys:
        v = randoms(b, m, g, e, dtype=dtype, seed=1)[2]
    fmap = None if row["feature_map"] == "features" else make_map(row["feature_map"], d, h, keys)
    if (
        fmap is not None and fmap.long_keys and row["erase"] != "none"
    ):  # such maps are refused, their features are not
        q, k = (x.detach().to(dtype) for x in fmap(q, k))
        d, fmap = fmap.feature_dim, None
    if fmap is None and values["normalize"]:
        q, k = q.abs(), k.abs()
    order = "before" if rotary.startswith("before") else "after"
    f = d if fmap is None or order == "before" else fmap.feature_dim
    how = {name: values[name] for name in ("causal", "normalize", "eps", "eps_mode")}
    how |= {"feature_map": fmap, "rotary": ROTATIONS[rotary](f, g), "rope_order": order}
    how |= positions(row, b, n, m)
    if packed is not None:
        how["cu_seqlens"] = torch.tensor([round(share * n) for share in packed], dtype=torch.int32)
    if row["key_mask"] == "some":
        how["key_mask"] = random_mask(b, m).to(q.device)
    if row["decay"] != "none":
        how["decay"] = torch.linspace(0.5, 0.97, g, dtype=torch.float64)
    psi = k.double() if fmap is None else _keys(fmap, k.double())
    pairs = f // 2 if how["rotary"] is None else how["rotary"].rotary_dim // 2
    how |= of_tokens(row, b, m, g, f, pairs, dtype)
    if "erase" in how and psi.numel():  # less than 2 / |psi|^2, above which the recurrence would grow
        how["erase"] = how["erase"] / psi.detach().square().sum(-1).max().to(dtype)
    state = random_state(k, v, how, h=h) if row["state"] == "some" else None
    if state is not None and "angle_steps" in how:
        shape = len(state.kv), *how["angle_steps"].shape[2:]
        angle = torch.randint(-(2**62), 2**62, shape, generator=generator(5), device="cpu")
        state = replace(state, angle=angle.to(q.device))
    chosen = {option for option, value in row.items() if value != "none"} - {"heads", "tokens", "state"}
    assert chosen <= how.keys(), "options that no argument was made for"
    return [q, k, v], state, how


def _keys(fmap: FeatureMap, k: Tensor) -> Tensor:
    psi = fmap.keys(k)
    return psi[0] if fmap.log_scaled else psi


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_tokens(row: Row, b: int, m: int, g: int, f: int, pairs: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """log_decay, angle_steps, write and erase, each for all rows, all heads, or for each of them."""
    turning = pairs if row["rotary"] != "none" or row["angle_steps"] != "none" else 0

    def numbers(option: str, *more: int) -> Tensor:
        for_all_rows, for_all_heads = (
            ("for all rows", "per unit for all"),
            ("for all heads", "per unit for all"),
        )
        shape = 1 if row[option] in for_all_rows else b, m, 1 if row[option] in for_all_heads else g
        seed = DATA.index(option)
        return torch.randn(*shape, *more, generator=generator(seed), dtype=torch.float64, device="cpu")

    made = {}
    if row["log_decay"] != "none":
        by_unit = row["log_decay"].startswith("per unit")
        made["log_decay"] = -0.2 * numbers("log_decay", *([f - turning] if by_unit else [])).abs()
        if by_unit:
            made["log_decay"][..., ::2] *= 25  # from open gates to the strongest of KDA
            made["log_decay"][:, 5::13, :, ::3], made["log_decay"][:, 7::23] = -1e4, -1e-6
        if row["log_decay"] == "strong":  # beside others that hardly decay
            gates = made["log_decay"].mul_(4)
            gates[:, 3::17], gates[:, 7::23], gates[:, 11::29], gates[:, 12::29] = -20, 0, -1e4, -1e-3
    if row["angle_steps"] != "none":
        made["angle_steps"] = 2 * numbers("angle_steps", pairs)
    if row["write"] != "none":
        made["write"] = numbers("write")
    if row["erase"] != "none":
        made["erase"] = 1.5 * numbers("erase").sigmoid()
    return {name: x.to(torch.get_default_device(), dtype) for name, x in made.items()}


def positions(row: Row, b: int, n: int, m: int) -> dict[str, Tensor]:
    """The positions that the caller gives, those of two axes included."""
    axes = (2,) if row["rotary"] == "two axes" else ()
    kind, kind_of_keys, made = row["positions"], row["key_positions"], {}
    if kind == "none" and axes:
        kind = "of each row"
    if kind_of_keys == "none" and axes and n != m:
        kind_of_keys = "of all rows"
    if kind == "rising":
        made["positions"] = 20 + torch.randint(0, 4, (b, n, *axes), generator=generator(3)).cumsum(1)
    elif kind == "up to the last":
        made["positions"] = (torch.arange(n) + 2**31 - n)[(..., *[None] * len(axes))].expand(n, *axes)
    elif kind != "none":
        made["positions"] = torch.randint(0, 2**31 - 1, (b, n, *axes), generator=generator(4))
        if kind == "transposed":
            made["positions"] = made["positions"].mT.contiguous().mT
    if kind_of_keys != "none":
        rows = () if kind_of_keys == "of all rows" else (b,)
        made["key_positions"] = torch.randint(0, 1000, (*rows, m, *axes), generator=generator(6))
    return {name: x.to(torch.get_default_device()) for name, x in made.items()}
