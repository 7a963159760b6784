"""The libraries for ARM and for Windows: cross-compiled, and run without PyTorch where a machine has QEMU or Wine."""

import math
from pathlib import Path

import pytest

from linrope.backends import library, native
from tests.kernels.cpu import other_machines
from tests.kernels.cpu.other_machines import build

NEEDED = [
    "aoti_torch_get_sizes",
    "aoti_torch__reinterpret_tensor",
    "torch_parallel_for",
    "torch_library_impl",
]


def test_the_library_asks_for_the_functions_that_its_header_lists() -> None:
    found = other_machines.pytorch_functions()
    assert set(NEEDED) < set(found)
    if native.why_not() is None:
        assert library.pytorch_functions() == found


@pytest.mark.long
@pytest.mark.skipif(build.find_zig() is None, reason="needs ziglang")
@pytest.mark.parametrize("target", ["Linux aarch64", "Windows x86_64"])
def test_on_other_machines_the_kernels_compute_the_same(target: str, tmp_path: Path) -> None:
    if other_machines.runner(target) is None or native.why_not() is not None:
        pytest.skip("needs QEMU and ARM's C library" if target == "Linux aarch64" else "needs Wine")
    here = other_machines.run(library.LIBRARY, build.this_platform(), tmp_path / "here")
    there = other_machines.run(build.build(tmp_path / "lib", target=target), target, tmp_path / "there")
    assert here is not None
    assert there is not None
    assert "baseline" in there[1]
    for name, results in there[1].items():
        expected = here[1][name]
        assert len(expected) > 1000
        largest: dict[str, float] = {}
        for key, x in expected:
            assert math.isfinite(x), key
            largest[key.split()[0]] = max(largest.get(key.split()[0], 0.0), abs(x))
        for (key, x), (other, y) in zip(expected, results, strict=True):
            assert key == other
            assert abs(x - y) <= 2e-5 * largest[key.split()[0]], (name, key, x, y)
