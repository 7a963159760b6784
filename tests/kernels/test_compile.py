"""Every kernel compiled ahead of time for GPUs that are not there: it fits, it does not spill unknowingly."""

from pathlib import Path
from typing import Any

from linrope_kernels import tiles
from linrope_kernels.report import SHARED_LIMIT

from tests.kernels.compiled import CAPABILITIES, run_compiled

# Bytes spilled per thread, at most, over the capabilities; elsewhere none but LITTLE. A spill goes to the
# first-level cache: it costs time, not correctness, and none of these was timed on a GPU yet.
LITTLE = 160  # what another version of ptxas moves to and fro
NONE = {
    *((kernel, 64, "bf16") for kernel in ("scan_fwd", "states", "states_bwd", "dq", "step_fwd")),
    *((kernel, 128, "bf16") for kernel in ("states", "states_bwd", "step_fwd")),
    ("step_fwd", 256, "bf16"),
}
CEILING = {
    # Ampere keeps both operands of a product in registers, Hopper's unit reads one from shared memory.
    ("scan_fwd", 128, "bf16"): 800,
    ("dv", 128, "bf16"): 300,
    # dk and dv in one pass: five products and two outputs are alive at once.
    ("dkv", 64, "bf16"): 800,
    # Every program needs all E values of g and v, and 32 pairs of S or T: 128 registers of 255 for those.
    ("dq", 128, "bf16"): 500,
    ("dk", 128, "bf16"): 1000,
    # 256 features: half of the register file is the state of 64 values. Rare; fewer columns would read more.
    ("scan_fwd", 256, "bf16"): 1800,
    ("states_bwd", 256, "bf16"): 300,
    ("dq", 256, "bf16"): 1100,
    ("dk", 256, "bf16"): 1200,
    ("dv", 256, "bf16"): 700,
    # float16 computes in tf32: operands of four bytes, through the units of Ampere.
    ("scan_fwd", 128, "fp16"): 2400,
    ("scan_fwd", 256, "fp16"): 4000,
    ("dq", 256, "fp16"): 1200,
    ("dkv", 64, "fp16"): 1000,
    ("dk", 256, "fp16"): 700,
    ("dv", 128, "fp16"): 400,
    # float32 has no matrix unit: products are multiply-adds from registers.
    ("scan_fwd", 256, "fp32"): 1300,
    ("dq", 256, "fp32"): 2500,
    ("dk", 256, "fp32"): 2200,
    ("dv", 256, "fp32"): 1600,
}
# Chunks of 32, or 32 values: tiles too small for wgmma's 64 rows. Wide heads trade it for fewer spills.
MMA_SYNC_ON_HOPPER = {("scan_fwd", 256), ("dv", 256)}


def described(entry: dict[str, Any]) -> tuple[str, int, str]:
    return entry["kernel"], entry["dim"], entry["dtype"]


def test_the_whole_table_compiles_fits_and_spills_no_more_than_known() -> None:
    """One test, since making the report takes minutes: several processes would each make their own."""
    everything = run_compiled(
        "-m", "linrope_kernels.report", "--json", "--capability", *map(str, CAPABILITIES)
    )
    for capability in CAPABILITIES:
        report = [entry for entry in everything if entry["capability"] == capability]
        check_that_nothing_is_left_out({described(entry) for entry in report})
        assert not [entry for entry in report if entry["shared"] > SHARED_LIMIT[capability]]
        assert not [entry for entry in report if entry["spills"] > ceiling(described(entry))]
    check_the_use_of_hopper_s_matrix_unit([entry for entry in everything if entry["capability"] == 90])


def check_that_nothing_is_left_out(compiled: set[tuple[str, int, str]]) -> None:
    names = {(name.removesuffix("_bwd"), dim) for name, dim, _ in compiled}
    assert names >= set(tiles.TABLE["bf16"])
    assert {(*name, dtype) for name in names for dtype in ("bf16", "fp16", "fp32")} <= compiled


def ceiling(name: tuple[str, int, str]) -> int:
    return 0 if name in NONE else CEILING.get(name, LITTLE)


def check_the_use_of_hopper_s_matrix_unit(report: list[dict[str, Any]]) -> None:
    for entry in report:
        name, dim, dtype = described(entry)
        if dtype != "bf16" or name == "step_fwd":
            continue
        assert entry["matrix"] > 0, entry
        assert (entry["mma_sync"] > 0) == ((name, dim) in MMA_SYNC_ON_HOPPER), entry


def test_what_the_launchers_start_compiles_too() -> None:
    script = Path(__file__).parent / "launch_without_gpu.py"
    started = run_compiled(str(script), str(CAPABILITIES[0]))
    assert {entry["kernel"] for entry in started} == {
        "table_fwd_kernel", "scan_fwd_kernel", "states_kernel", "prefix_kernel", "dq_kernel", "dkv_kernel",
        "step_fwd_kernel",
    }  # fmt: skip
    assert not [entry for entry in started if entry["shared"] > SHARED_LIMIT[80]]
