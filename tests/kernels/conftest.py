"""Fresh memory holds NaN, and segments are short.

The kernels are imported late: Triton decides when it is imported whether it interprets them.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _quick(quick_interpreter: None) -> None:
    pass


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory holds NaN: what a kernel does not write shows."""
    from linrope_kernels import INTERPRETED

    if not INTERPRETED:
        torch.full((2**28,), float("nan"))  # freed at once, and given out again in pieces
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments of 64 tokens and more, as on a GPU that one sequence does not fill."""
    from linrope_kernels import tiles

    monkeypatch.setattr(tiles, "SHORTEST_SEGMENT", 64)
    monkeypatch.setattr(tiles, "SEGMENT_MULTIPLE", 64)
    monkeypatch.setattr(tiles, "most_segments", lambda *_: 3)
