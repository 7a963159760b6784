"""What every map has to keep, and ``make``."""

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from linrope import Rotary, feature_maps, linear_rope_attention
from linrope.feature_maps import FeatureMap
from tests.feature_maps.table import LEARNED, MAPS, RANDOM, build, features
from tests.oracle import randoms

labels = pytest.mark.parametrize("label", MAPS)
names = pytest.mark.parametrize("name", feature_maps.NAMES)


def scrambled(fmap: FeatureMap) -> FeatureMap:
    """The same map, its learned weights no longer those that it starts with."""
    for number, weight in enumerate(fmap.parameters()):
        torch.nn.init.trunc_normal_(weight, generator=torch.Generator(weight.device).manual_seed(number))
    return fmap


def test_the_table_has_every_name() -> None:
    assert {name for name, _ in MAPS.values()} == set(feature_maps.NAMES)
    assert set(LEARNED) == feature_maps.PER_HEAD


@labels
@pytest.mark.parametrize("d", [4, 3])
def test_sizes(label: str, d: int) -> None:
    fmap, (q, k, _) = build(label, d), randoms(2, 5, 2, d)
    for x in features(fmap, q, k):
        assert x.shape == (2, 5, 2, fmap.feature_dim)
    assert fmap.head_dim == d
    own_size = fmap.elementwise is not None or label == "softmax"
    assert own_size or fmap.feature_dim % 2 == 0  # features pair up for rotation


@pytest.mark.parametrize("name", [*RANDOM, "softmax", "exp"])
@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4))
def test_features_of_far_inputs_are_finite_and_those_of_positive_maps_not_negative(
    name: str, x: list[float]
) -> None:
    fmap = build(name)
    for made in (fmap.queries(torch.tensor(x)), fmap.keys(torch.tensor(x))):
        phi, log_scale = made if fmap.log_scaled else (made, torch.zeros(()))
        assert bool(phi.isfinite().all() & log_scale.isfinite())
        assert not fmap.positive or bool((phi >= 0).all())


@labels
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_kernels_of_maps_marked_positive_are_not_negative(label: str, scale: float) -> None:
    fmap = scrambled(build(label)).double()
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
    fmap, (q, k, _) = build(label), randoms(2, 7, 2, 4)
    later = [x.clone() for x in (q, k)]
    for x in later:
        x[:, 4:] = 50.0
    pairs = zip(features(fmap, q, k), features(fmap, *later))
    for before, after in pairs:
        assert torch.equal(before[:, :4], after[:, :4])


@labels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_future_tokens_change_no_bit_of_earlier_outputs(label: str, dtype: torch.dtype) -> None:
    fmap, tensors = build(label), randoms(1, 80, 2, 4, dtype=dtype)
    how = {
        "feature_map": fmap,
        "rotary": Rotary(fmap.feature_dim),
        "normalize": fmap.positive,
        "backend": "eager",
    }
    with torch.no_grad():
        out = linear_rope_attention(*tensors, **how)
        for cut in (1, 40, 70):
            changed = [x.clone() for x in tensors]
            for x in changed:
                x[:, cut:] = 8.0
            assert torch.equal(linear_rope_attention(*changed, **how)[:, :cut], out[:, :cut])


@labels
def test_gradients_are_those_of_finite_differences(label: str) -> None:
    fmap, (q, k, _) = scrambled(build(label, 3)).double(), randoms(1, 2, 2, 3)
    leaves = [q.requires_grad_(), k.requires_grad_(), *fmap.parameters()]
    # the parameters are changed in place for the differences
    assert torch.autograd.gradcheck(lambda q, k, *_: features(fmap, q, k), leaves)


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


def test_identities_tell_maps_apart() -> None:
    maps = [build(label, d) for label in MAPS for d in (4, 6)]
    assert len({fmap.identity for fmap in maps}) == len(maps)
    assert [copy.deepcopy(fmap).identity for fmap in maps] == [fmap.identity for fmap in maps]


def test_make_passes_options_on() -> None:
    fmap = feature_maps.make("favor+", 8, num_features=6, seed=3)
    assert isinstance(fmap, feature_maps.FavorPlus)
    assert (fmap.feature_dim, fmap.seed) == (6, 3)


@names
def test_make_refuses_options_that_the_map_does_not_have(name: str) -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        feature_maps.make(name, 8, no_such_option=6)


def test_make_names_the_map_whose_option_is_missing_or_misspelt() -> None:
    with pytest.raises(
        TypeError, match=r"^feature_map='cosformer': .*'max_length'; its options: max_length$"
    ):
        feature_maps.make("cosformer", 4)
    with pytest.raises(TypeError, match=r"^feature_map='favor\+': .*'features'; its options: num_features, "):
        feature_maps.make("favor+", 4, features=8)
    with pytest.raises(TypeError, match=r"^head_dim='4': expected an integer$"):
        feature_maps.make("relu", "4")  # type: ignore[arg-type]


@pytest.mark.parametrize("near", feature_maps.NAMES)
def test_unknown_name_lists_the_known_ones_and_the_nearest(near: str) -> None:
    with pytest.raises(ValueError, match="feature_map=") as error:
        feature_maps.make(near + "_", 8)
    assert all(name in str(error.value) for name in feature_maps.NAMES)
    assert f"did you mean {near!r}?" in str(error.value)


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


@labels
def test_heads_of_one_number(label: str) -> None:
    name, options = MAPS[label]
    options = options | ({"nu": 1} if name == "dpfp" else {})
    fmap, x = feature_maps.make(name, 1, **options), torch.ones(1, 1, 2, 1)
    for y in features(fmap, x, x):
        assert y.shape == (1, 1, 2, fmap.feature_dim)
        assert_close(y, y.nan_to_num())


@pytest.mark.parametrize(
    ("name", "ours"),
    [("performer", "favor+"), ("Performer", "favor+"), ("elu", "elu+1"), ("based", "taylor2")],
)
def test_what_others_call_a_map_leads_to_its_name(name: str, ours: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"did you mean '{ours}'?")):
        feature_maps.make(name, 4)
