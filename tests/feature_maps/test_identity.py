"""What tells two maps apart: settings, and the contents of weights and projections."""

import copy
import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import feature_maps
from linrope.feature_maps import FeatureMap
from linrope.recurrence.identities import same_identity
from tests.support.maps import LEARNED, RANDOM, plain

names = pytest.mark.parametrize("name", [*RANDOM, *LEARNED])


def make(name: str) -> FeatureMap:
    return feature_maps.make(name, 4, **({"seed": 1} if name in RANDOM else {}))


def first(fmap: FeatureMap) -> Tensor:
    return next(iter([*fmap.parameters(), *fmap.buffers()]))


@torch.no_grad()
def change_one_bit(fmap: FeatureMap) -> None:
    number = first(fmap).view(-1)[:1]
    number.copy_(torch.nextafter(number, torch.full_like(number, 9)))


@torch.no_grad()
def round_to_bfloat16(fmap: FeatureMap) -> None:
    fmap.to(torch.bfloat16).float()


def load_others(fmap: FeatureMap) -> None:
    tensors = {name: x if "extra_state" in name else x + 1 for name, x in fmap.state_dict().items()}
    fmap.load_state_dict(tensors)


def replace_the_data(fmap: FeatureMap) -> None:
    first(fmap).data = torch.full_like(first(fmap), 0.5)


CHANGES = (change_one_bit, round_to_bfloat16, torch.nn.Module.double, load_others, replace_the_data)


@names
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_contents_changes_the_identity(name: str, change: Callable) -> None:
    fmap = make(name)
    for x in [*fmap.parameters(), *fmap.buffers()]:
        torch.nn.init.uniform_(x, 0.1, 0.9)  # numbers that bfloat16 does not have
    before = fmap.identity
    change(fmap)
    assert fmap.identity != before


@names
def test_equal_contents_have_equal_identities(name: str) -> None:
    fmap, other = make(name), make(name)
    other.load_state_dict(fmap.state_dict())
    assert other.identity == fmap.identity
    twin = copy.deepcopy(fmap)
    assert twin.identity == fmap.identity
    change_one_bit(twin)  # and does not show the identity of before
    assert twin.identity != fmap.identity == other.identity
    assert pickle.loads(pickle.dumps(fmap)).identity == fmap.identity
    change_one_bit(other)
    assert other.identity != fmap.identity
    other.load_state_dict(fmap.state_dict())
    assert other.identity == fmap.identity


@names
@torch.no_grad()
def test_contents_are_read_after_a_change_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmap, reads = make(name), []
    blake2b = hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda **how: reads.append(1) or blake2b(**how))
    for _ in range(3):
        fmap.identity  # noqa: B018
    assert len(reads) == 1
    change_one_bit(fmap)
    for _ in range(3):
        fmap.identity  # noqa: B018
    assert len(reads) == 2


@names
def test_inference_tensors_are_read_each_time(name: str) -> None:
    with torch.inference_mode():
        fmap = make(name)
        before = fmap.identity
        change_one_bit(fmap)
        assert fmap.identity != before


@names
def test_where_no_bytes_can_be_read_a_question_mark_matches_any_digest(name: str) -> None:
    fmap = make(name)
    known = fmap.identity
    inside = torch.compile(lambda: fmap.identity, backend="eager", fullgraph=True)()
    virtual = copy.deepcopy(fmap).to("meta").identity
    assert inside == virtual == known.partition("#")[0] + "#?"
    assert same_identity(inside, known)
    assert same_identity(known, virtual)
    assert torch.compile(same_identity, backend="eager", fullgraph=True)(inside, known)


OF_NUMBERS = [
    ("favor+", {"kernel_epsilon": 0.013}),
]


@pytest.mark.parametrize(("name", "options"), OF_NUMBERS)
def test_maps_with_numbers_as_options_compile_whole(name: str, options: dict[str, Any]) -> None:
    fmap, x = feature_maps.make(name, 4, seed=0, **options), torch.randn(3, 4)
    call = torch.compile(lambda: (fmap.keys(x), fmap.identity), backend="eager", fullgraph=True)
    features, identity = call()
    assert same_identity(identity, fmap.identity)
    assert_close(plain(features), plain(fmap.keys(x)))


def test_a_question_mark_matches_nothing_but_digests() -> None:
    one, other = "T2R(4)#0123456789abcdef; Rotary(4)", "T2R(4)#?; Rotary(4)"
    assert same_identity(one, one)
    assert same_identity(other, other)
    assert not same_identity(one, "T2R(4)#0123456789abcdee; Rotary(4)")
    for different in ("T2R(8)#?; Rotary(4)", "T2R(4)#?; Rotary(8)", "T2R(4); Rotary(4)", "T2R(4)#?", "?"):
        assert not same_identity(one, different)
        assert not same_identity(different, one)
        assert not same_identity(other, different)


def test_a_paired_map_s_identity_has_the_digest_of_the_inner_one_and_maps_without_tensors_have_none() -> None:
    assert feature_maps.make("taylor2", 4).identity == "Taylor2(4)"
    fmap = feature_maps.make("paired", 4, inner="favor+", seed=1)
    inner = feature_maps.make("favor+", 4, seed=1)
    assert fmap.identity == f"PairedMap({inner.identity}, interleaved)"
    assert same_identity(fmap.identity, copy.deepcopy(fmap).to("meta").identity)


@names
def test_an_empty_map_off_the_meta_device_is_refused_until_it_is_filled(name: str) -> None:
    fmap = make(name)
    before = fmap.identity
    with torch.device("meta"):
        empty = make(name)
    empty.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"empty since the map left the meta device; .*reset_parameters"):
        empty.identity  # noqa: B018
    empty.load_state_dict(fmap.state_dict())
    assert empty.identity == before
    with torch.device("meta"):
        empty = make(name)
    empty.to_empty(device="cpu").reset_parameters()
    assert name == "t2r" or empty.identity == before  # t2r's weights are drawn anew


def test_two_classes_of_one_name_have_two_identities() -> None:
    classes = [
        type("Own", (feature_maps.FeatureMap,), {"__module__": module}) for module in ("first", "second")
    ]
    assert [fmap().identity for fmap in classes] == ["first.Own()", "second.Own()"]
