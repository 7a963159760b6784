"""What the Triton kernels need here: a quick interpreter, NaN in fresh memory, short segments."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests of the backend triton: fresh memory holds NaN, so that what a kernel does not write shows."""
    given = getattr(request.node, "callspec", None)
    names = () if given is None else (getattr(x, "backend", x) for x in given.params.values())
    if not any(name == "triton" for name in names if isinstance(name, str)):
        yield
        return
    request.getfixturevalue("quick_interpreter")
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
