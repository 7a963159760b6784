"""The command ``linrope bench``, whose code is in benchmarks/ of a checkout and not in the wheel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import linrope


def bench_of(tree: Path) -> Callable[..., int]:
    """The command of the checkout whose root this is; in an installed wheel, one that says where to find it."""
    if not (tree / "benchmarks" / "bench").is_dir():
        return _absent
    from benchmarks.bench.command import bench

    return bench


def _absent() -> int:
    """Measure throughput and memory against softmax attention: in a checkout of linrope's repository alone."""
    raise ValueError(
        "bench: the benchmarks are not in the wheel; expected linrope installed from a checkout of its repository, or "
        "from an unpacked source distribution: pip install -e '.[cli]'"
    )


# Takes any options, so that the one error comes whatever they are.
ABSENT: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
bench = bench_of(Path(linrope.__file__).parents[1])
SETTINGS = ABSENT if bench is _absent else {}
