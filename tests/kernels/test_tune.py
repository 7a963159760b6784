"""The tuning script, with a clock that this test makes up: a GPU has its own."""

import pytest
import torch
from linrope_kernel_tools import tune
from linrope_kernels import tiles


@pytest.mark.parametrize("kernel", ["scan_fwd", "dq"])
def test_the_fastest_right_candidate_wins_and_the_table_stays(kernel, monkeypatch, capsys) -> None:
    good, bad = tiles.Tile(32, 32, 64, 4, 1), tiles.Tile(16, 32, 64, 4, 1)
    monkeypatch.setattr(tune, "candidates", lambda kernel, size: [bad, good])
    shipped = dict(tiles.TABLE["ieee"])
    seen = []

    def timer(run) -> float:
        seen.append(tiles.TABLE["ieee"][kernel, 64])
        return 2.0 if seen[-1] == shipped[kernel, 64] else 1.0

    device = str(torch.get_default_device())
    tune.tune([kernel], 64, "ieee", (1, 40, 1), device, timer)
    assert shipped == tiles.TABLE["ieee"]
    assert seen == [shipped[kernel, 64], bad, good]
    printed = capsys.readouterr().out
    assert f'("{kernel}", 64): Tile({good.chunk}, 32, 64, 4, 1),  # 1.000 ms' in printed


def test_a_candidate_that_gives_other_results_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = tune.passes(64, "ieee", 1, 40, 1, str(torch.get_default_device()))
    calls = []

    def wrong_later() -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return tuple(x * len(calls) for x in forward())

    monkeypatch.setattr(tune, "candidates", lambda kernel, size: [tiles.TABLE["ieee"]["scan_fwd", 64]])
    assert tune.best("scan_fwd", 64, "ieee", wrong_later, lambda run: 1.0) == []


@pytest.mark.parametrize("kernel", ["scan_fwd", "states", "dq", "dk", "dv"])
def test_candidates_cover_what_a_kernel_needs_whole(kernel: str) -> None:
    for tile in tune.candidates(kernel, 128):
        assert tile.pairs == tiles.UNSPLIT or kernel in ("dq", "dk")
        assert tile.values == tiles.UNSPLIT or kernel in ("scan_fwd", "states", "dv")
