"""Runs the compiled kernel of masked_rows.py in the emulator: PYTHONPATH=.:kernels python emulated.py"""

import importlib.util
from pathlib import Path

import triton

from tests.kernels.ptx.launcher import install

if __name__ == "__main__":  # install() replaces parts of Triton
    spec = importlib.util.spec_from_file_location("masked_rows", Path(__file__).with_name("masked_rows.py"))
    assert spec is not None
    assert spec.loader is not None
    masked_rows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(masked_rows)
    install(80)
    x, mask, y, out = masked_rows.inputs()
    masked_rows.masked_product[(1,)](x, mask, y, out, masked_rows.ROWS, masked_rows.COLUMNS)
    print(f"Triton {triton.__version__}")
    print(f"masked_rows: {out[0, 1].item():.0f}, expected {x.float().sum(0)[0].item():.0f}")
