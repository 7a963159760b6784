"""The short convolution: against conv1d, cut anywhere, with hidden tokens, packed."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.layer.short_convolution import ShortConvolution
from tests.layer.cases import numbers

C = 6


def make(taps: int = 4) -> ShortConvolution:
    convolution = ShortConvolution(C, taps, dtype=torch.float64)
    with torch.no_grad():
        convolution.weight.copy_(numbers(C, 1, taps))
    return convolution


def test_it_starts_as_the_identity_with_gradients_for_all_taps() -> None:
    convolution, x = ShortConvolution(C, 4), numbers(2, 5, C).float()
    y, last = convolution(x)
    assert torch.equal(y, x)
    assert torch.equal(last, x[:, 2:])
    (y * numbers(2, 5, C, seed=2)).sum().backward()
    assert bool(convolution.weight.grad.all())


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_it_is_torch_s_causal_conv1d(taps: int, n: int) -> None:
    convolution, x = make(taps), numbers(2, n, C)
    padded = F.pad(x.mT, (taps - 1, 0))
    expected = F.conv1d(padded, convolution.weight, groups=C).mT if n else x
    y, last = convolution(x)
    assert_close(y, expected)
    assert torch.equal(last, padded.mT[:, n:])


@pytest.mark.parametrize("cut", range(10))
def test_cut_anywhere_it_goes_on_from_its_last_inputs(cut: int) -> None:
    convolution, x = make(), numbers(2, 9, C)
    head, middle = convolution(x[:, :cut])
    tail, last = convolution(x[:, cut:], middle)
    whole, expected = convolution(x)
    assert torch.equal(torch.cat((head, tail), 1), whole)
    assert torch.equal(last, expected)
    assert last._base is None  # or the whole sequence stays in memory


MASKS = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 0, 0, 0, 0],
    "inside": [1, 0, 0, 0, 0, 1, 0, 1, 1],
    "few": [0, 0, 1, 0, 0, 0, 0, 0, 0],
    "none": [0] * 9,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_hidden_tokens_are_skipped_wherever_they_stand_and_whatever_they_hold(mask, cut: int) -> None:
    convolution, shown = make(), torch.tensor(mask).bool()
    both = torch.stack((shown, torch.ones(9, dtype=torch.bool)))
    x = numbers(2, 9, C)
    x[0, ~shown] = torch.nan
    x.requires_grad_()
    head, middle = convolution(x[:, :cut], None, both[:, :cut])
    tail, last = convolution(x[:, cut:], middle, both[:, cut:])
    y = torch.cat((head, tail), 1)
    for row in range(2):
        alone, alone_last = convolution(x[row : row + 1, both[row]])
        assert torch.equal(y[row : row + 1, both[row]], alone)
        assert torch.equal(last[row : row + 1], alone_last)
    assert bool(y.isfinite().all())
    (y * both[..., None]).sum().backward()
    assert bool(convolution.weight.grad.isfinite().all())
    assert not x.grad[0, ~shown].any()


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 4, 9], [0, 1, 2, 8, 9], [0, 0, 9, 9], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_do_not_see_each_other(cuts: list[int], masked: bool) -> None:
    n, convolution, bounds = cuts[-1], make(), torch.tensor(cuts)
    x, before = numbers(1, n, C), numbers(len(cuts) - 1, 3, C, seed=2)
    mask = torch.tensor([[1, 0, 1, 1, 1, 0, 1, 1, 0] if masked else [1] * 9]).bool()[:, :n]
    y, last = convolution(x, before, mask if masked else None, bounds)
    assert y.shape == x.shape
    for i, (a, b) in enumerate(pairwise(cuts)):
        shown = mask[0, a:b]
        alone, alone_last = convolution(x[:, a:b][:, shown], before[i : i + 1])
        assert torch.equal(y[:, a:b][:, shown], alone)
        assert torch.equal(last[i : i + 1], alone_last)


def test_gradients_pass_through_masks_packing_and_what_came_before() -> None:
    convolution, x, before = make(), numbers(1, 7, C).requires_grad_(), numbers(2, 3, C).requires_grad_()
    mask, bounds = torch.tensor([[1, 0, 1, 1, 0, 1, 1]]).bool(), torch.tensor([0, 3, 7])
    assert torch.autograd.gradcheck(lambda x, before: convolution(x, before, mask, bounds), (x, before))
    assert torch.autograd.gradcheck(lambda x, before: convolution(x, before), (x, before[:1]))


@pytest.mark.parametrize("taps", [1, 0, True, 2.0])
def test_a_number_of_taps_that_is_none_is_refused(taps: object) -> None:
    with pytest.raises(
        ValueError, match=r"^short_conv=.*: expected the number of taps, 2 .. 65536, or None$"
    ):
        ShortConvolution(C, taps)


def test_half_precision_keeps_its_dtype() -> None:
    convolution, x = make().bfloat16(), numbers(1, 5, C).bfloat16()
    y, last = convolution(x)
    assert y.dtype == last.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert make().float()(x)[0].dtype == torch.bfloat16
