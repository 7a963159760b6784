"""What belongs to packed sequences, among them empty ones and ones of a single token."""

import pytest
import torch
from torch.testing import assert_close

from linrope.recurrence import packing

BOUNDS = torch.tensor([0, 1, 1, 4])  # one token, none, three
X = torch.tensor([[5, 1, 2, 3]])
OF_SEQUENCES = torch.tensor([10, 20, 30])


def test_one_value_for_all_sequences_or_one_for_each_reaches_every_token() -> None:
    assert packing.per_token(OF_SEQUENCES[:1], 4, BOUNDS).tolist() == [[10, 10, 10, 10]]
    assert packing.per_token(OF_SEQUENCES, 4, BOUNDS).tolist() == [[10, 30, 30, 30]]
    assert packing.per_token(OF_SEQUENCES, 4, None).tolist() == [[10], [20], [30]]


def test_sequences_of_one_token_end_with_it_and_empty_ones_take_the_other_value() -> None:
    assert packing.at_last(X, OF_SEQUENCES, BOUNDS).tolist() == [5, 20, 3]
    assert packing.at_last(X, OF_SEQUENCES[:1], None).tolist() == [3]
    assert packing.at_last(X[:, :0], OF_SEQUENCES, BOUNDS * 0).tolist() == [10, 20, 30]


def test_what_comes_before_a_token_is_of_its_own_sequence() -> None:
    assert packing.previous(X, OF_SEQUENCES, BOUNDS).tolist() == [[10, 30, 1, 2]]
    assert packing.previous(X, OF_SEQUENCES[:1], None).tolist() == [[10, 5, 1, 2]]
    assert packing.at_first(OF_SEQUENCES, 4, BOUNDS).tolist() == [[10, 30, 0, 0]]
    assert packing.sums_so_far(X, BOUNDS).tolist() == [[5, 1, 3, 6]]


def test_a_sum_takes_in_the_tokens_of_its_own_sequence_alone() -> None:
    x = torch.tensor([[torch.nan, 1, 2, 3, torch.inf]])
    assert packing.sums_of_sequences(x, BOUNDS).nan_to_num(-1).tolist() == [-1, 0, 6]
    assert packing.sums_of_sequences(x, torch.tensor([1, 3])).tolist() == [3]
    assert packing.sums_of_sequences(x[:, 1:4], None).tolist() == [6]


def test_bounds_rise_within_the_tokens_whatever_they_were() -> None:
    assert packing.rising_bounds(torch.tensor([-3, 2, 1, 9]), 4).tolist() == [0, 2, 2, 4]
    assert packing.rising_bounds(None, 4) is None


def test_tokens_beyond_the_last_bound_belong_to_the_last_sequence() -> None:
    assert packing.owners(BOUNDS, 6).tolist() == [0, 2, 2, 2, 2, 2]
    assert packing.owners(torch.tensor([0, 3]), 5).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("gated", [False, True], ids=["no gates", "gates"])
def test_an_exported_graph_has_the_same_running_maximum(gated: bool) -> None:
    scale, first = 3 * torch.randn(2, 13, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    log_decay = -torch.rand(1, 13, 4, dtype=torch.float64) if gated else None
    expected = packing.running_maximum(scale, log_decay, first, None)
    assert_close(packing._maximum_by_table(scale, log_decay, first), expected, rtol=1e-12, atol=1e-12)
