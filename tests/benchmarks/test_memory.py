"""benchmarks/memory.py: a row in pieces takes the memory of a piece, and more blocks take more only to train."""

import sys

import pytest

from benchmarks.memory import peak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_rows_in_pieces_and_blocks_without_gradients_take_no_more_memory() -> None:
    n = 16384
    found = {call: [peak(64, blocks, n, n, call) for blocks in (1, 3)] for call in ("training", "reading")}
    assert found["training"][1] > 2 * found["training"][0]
    assert found["reading"][1] < 1.5 * found["reading"][0]
    assert peak(64, 1, n, 1024, "training") < found["training"][0] / 4
