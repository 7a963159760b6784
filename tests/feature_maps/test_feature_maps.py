"""What every map has to keep, and ``make``."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linrope import feature_maps
from linrope.feature_maps import FeatureMap
from tests.support.examples import load
from tests.support.maps import LEARNED, MAPS, RANDOM, build, features
from tests.support.oracle import randoms

labels = pytest.mark.parametrize("label", MAPS)


def scrambled(fmap: FeatureMap) -> FeatureMap:
    """The same map, its learned weights no longer those that it starts with."""
    for number, weight in enumerate(fmap.parameters()):
        torch.nn.init.trunc_normal_(weight, generator=torch.Generator(weight.device).manual_seed(number))
    return fmap


def test_the_table_has_every_name() -> None:
    assert {name for name, _ in MAPS.values()} == set(feature_maps.NAMES)
    assert set(LEARNED) == feature_maps.PER_HEAD


@labels
def test_sizes(label: str) -> None:
    for d in (4, 3, 1):
        fmap, (q, k, _) = build(label, d), randoms(2, 5, 2, d)
        for x in features(fmap, q, k):
            assert x.shape == (2, 5, 2, fmap.feature_dim)
            assert bool(x.isfinite().all())
        assert fmap.head_dim == d
        own_size = fmap.elementwise is not None or label.split()[0] in ("softmax", "unit")
        assert own_size or fmap.feature_dim % 2 == 0  # features pair up for rotation


@labels
def test_keys_of_maps_not_marked_long_keep_the_state_of_the_delta_rule_bounded(label: str) -> None:
    """Which requires b |psi(k)|^2 <= 2. Maps with a log_scale are refused by themselves."""
    fmap, (_, k, _) = scrambled(build(label)).double(), randoms(9, 50, 2, 4, scale=4)
    if not (fmap.log_scaled or fmap.long_keys):
        assert float(features(fmap, k, k)[1].detach().square().sum(-1).max()) <= 2


@pytest.mark.parametrize("name", [*RANDOM, "softmax", "exp"])
@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4))
def test_features_of_far_inputs_are_finite_and_those_of_positive_maps_not_negative(name: str, x) -> None:
    fmap = build(name)
    for made in (fmap.queries(torch.tensor(x)), fmap.keys(torch.tensor(x))):
        phi, log_scale = made if fmap.log_scaled else (made, torch.zeros(()))
        assert bool(phi.isfinite().all() & log_scale.isfinite())
        assert not fmap.positive or bool((phi >= 0).all())


@labels
def test_kernels_of_maps_marked_positive_are_not_negative(label: str) -> None:
    fmap = scrambled(build(label)).double()
    for scale in (0.1, 1.0, 4.0):
        q, k, _ = randoms(1, 100, 2, 4, scale=scale)
        phi, psi = features(fmap, q, k)
        kernel = torch.einsum("bnhf,bmhf->bhnm", phi, psi)
        rounding = 1e-15 * torch.einsum("bnhf,bmhf->bhnm", phi.abs(), psi.abs())
        if fmap.positive:
            assert bool((kernel >= -rounding).all())
        elif scale == 4:  # the others have a negative one somewhere
            assert float(kernel.min()) < -0.01


@labels
def test_a_token_s_features_are_its_own(label: str) -> None:
    """A map that looks along the sequence leaks the future."""
    fmap = build(label)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k, _ = randoms(2, 7, 2, 4, dtype=dtype)
        before = features(fmap, q, k)
        q[:, 4:] = k[:, 4:] = 50.0
        for x, y in zip(before, features(fmap, q, k)):
            assert torch.equal(x[:, :4], y[:, :4])


@labels
def test_gradients_are_those_of_finite_differences(label: str) -> None:
    fmap, (q, k, _) = scrambled(build(label, 3)).double(), randoms(1, 2, 2, 3)
    leaves = [q.requires_grad_(), k.requires_grad_(), *fmap.parameters()]
    # the parameters are changed in place for the differences
    assert torch.autograd.gradcheck(lambda q, k, *_: features(fmap, q, k), leaves, fast_mode=True)


@pytest.mark.parametrize("label", [label for label in MAPS if label not in feature_maps.ELEMENTWISE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_are_computed_in_float32(label: str, dtype: torch.dtype) -> None:
    fmap, (q, k, _) = build(label), randoms(1, 5, 2, 4, dtype=dtype)
    narrow = features(fmap, q, k)
    with torch.autocast(q.device.type, torch.bfloat16):
        inside = features(fmap, q.float(), k.float())
    for x, y, z in zip(narrow, inside, features(fmap, q.float(), k.float())):
        assert x.dtype == torch.float32
        assert torch.equal(x, z)
        assert torch.equal(y, z)


@labels
def test_weights_and_projections_travel_through_the_state_dict(label: str) -> None:
    name, options = MAPS[label]
    other = options | ({"seed": 1} if "seed" in options else {})
    saved, loaded = scrambled(build(label)), feature_maps.make(name, 4, **other)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.identity == saved.identity
    q, k, _ = randoms(1, 5, 2, 4)
    for x, y in zip(features(saved, q, k), features(loaded, q, k)):
        assert torch.equal(x, y)


OTHER_OPTIONS = [
    ("favor+", {"seed": 0, "kernel_epsilon": 0.125}),
    *((name, {"num_heads": 2, "num_kv_heads": 1}) for name in LEARNED),
]  # fmt: skip


def test_identities_tell_maps_apart() -> None:
    maps = [build(label, d) for label in MAPS for d in (4, 6)]
    maps += [feature_maps.make(name, 4, **options) for name, options in OTHER_OPTIONS]
    assert len({fmap.identity for fmap in maps}) == len(maps)
    assert [copy.deepcopy(fmap).identity for fmap in maps] == [fmap.identity for fmap in maps]


NO_NUMBERS = (-1.0, math.inf, math.nan)
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *((name, {"no_such_option": 6}, TypeError, "no_such_option") for name in feature_maps.NAMES),
    ("favor+", {"features": 8}, TypeError, r"^feature_map='favor\+': .*'features'; its options: num_features, "),
    *((theirs, {}, ValueError, re.escape(f"did you mean '{ours}'?")) for theirs, ours in
      (("performer", "favor+"), ("Performer", "favor+"), ("elu", "elu+1"), ("based", "taylor2"))),
    *(("favor+", {"kernel_epsilon": x}, ValueError, f"kernel_epsilon={x}: expected") for x in NO_NUMBERS),
    *((name, {"num_features": x}, ValueError, f"num_features={x}: expected a positive number")
      for name in ("favor+",) for x in (0, -2)),
    *((name, {"num_features": x}, ValueError, f"num_features={x}: expected a positive even number")
      for name in ("t2r",) for x in (0, -2, 7)),
    *((name, heads, ValueError, "num_heads=.*, num_kv_heads=.*: expected") for name in LEARNED for heads in
      ({"num_heads": 0}, {"num_heads": 2, "num_kv_heads": 0}, {"num_kv_heads": 2})),
    ("paired", {"layout": "halves"}, ValueError, "layout='halves': expected one of interleaved, half"),
    ("paired", {"inner": "elu"}, ValueError, "feature_map='elu': expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "error", "message"), REFUSED, ids=[f"{name}: {message}" for name, *_, message in REFUSED]
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(name: str, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        feature_maps.make(name, 4, **options)


@pytest.mark.parametrize("near", feature_maps.NAMES)
def test_unknown_name_lists_the_known_ones_and_the_nearest(near: str) -> None:
    with pytest.raises(ValueError, match="feature_map=") as error:
        feature_maps.make(near + "_", 8)
    assert all(name in str(error.value) for name in feature_maps.NAMES)
    assert f"did you mean {near!r}?" in str(error.value)


@pytest.mark.parametrize(("name", "example"), feature_maps._EXAMPLES.items())
def test_a_map_that_is_an_example_is_named_with_its_file(name: str, example: str) -> None:
    with pytest.raises(
        ValueError, match=f"feature_map='{re.escape(name)}': .*historical_maps.py has {example}$"
    ):
        feature_maps.make(name, 8)
    assert hasattr(load("historical_maps"), example)


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match="'@@@'") as error:
        feature_maps.make("@@@", 8)
    assert "did you mean" not in str(error.value)


@labels
@pytest.mark.parametrize("head_dim", [0, -2, 2.5, "4", True])
def test_head_dim_must_be_a_positive_integer(label: str, head_dim: object) -> None:
    error = ValueError if type(head_dim) is int else TypeError
    with pytest.raises(error, match=f"^head_dim={head_dim!r}: expected a"):
        build(label, head_dim)  # type: ignore[arg-type]
