"""Every kernel compiled ahead of time for GPUs that are not there: it fits, it does not spill unknowingly."""

from pathlib import Path
from typing import Any

import pytest
import triton
from linrope_kernels import tiles

from tests.kernels.compiled import CAPABILITIES, run_compiled
from tests.kernels.without_gpu import SHARED_LIMIT

# Bytes spilled per thread, at most; elsewhere none but LITTLE. A spill goes to the first-level cache: it
# costs time; kernels/README.md has the one tile that a compiler made wrong.
LITTLE = 128
CEILING = {
    ("scan_fwd", 128, "bf16"): 900,
    ("dq", 128, "bf16"): 290,  # 284
    ("dkv", 64, "bf16"): 540,
    ("dk", 128, "bf16"): 250,  # 248, 240 with 3.6
    ("dv", 128, "bf16"): 440,  # 432
    # 256 features: half of the register file is the state of 64 values. Rare; fewer columns would read more.
    ("scan_fwd", 256, "bf16"): 2200,  # 2100
    ("states_bwd", 256, "bf16"): 300,
    ("dq", 256, "bf16"): 1200,
    ("dk", 256, "bf16"): 1400,  # 1340 with 3.6
    ("dv", 256, "bf16"): 800,  # 752 with 3.6
    ("scan_fwd", 256, "fp16"): 17500,  # 17320: ptxas gives up and leaves it 32 registers. Right, and slow
}
CEILING |= {("delta_fwd", 256, "bf16"): 720}  # 716 by unit, 640
CEILING |= {("delta_dqk", size, "bf16"): 1840 for size in (64, 128, 256)}  # 1832
CEILING |= {("delta_dqk by unit", size, "bf16"): 1950 for size in (64, 128, 256)}  # 1940
# float16 computes in tf32 by Ampere's units, and float32 by multiply-adds from registers. float32: up to
# 1580 bytes (dq) at 64, 1276 (dq) at 128, 3640 (scan) at 256; float16 1148 (scan) at 128, 4452 (dq) at 256.
WIDE_CEILING = {64: 2100, 128: 1300, 256: 4500}
# On other GPUs than Hopper, in bfloat16. Ampere's and consumer Blackwell's units keep operands in registers.
ELSEWHERE = {
    ("scan_fwd", 64): 630,  # 520 on 8.0, 624 on 12.0
    ("scan_fwd", 128): 390,  # 384 on 12.0
    ("scan_fwd", 256): 26500,  # 25990 on 12.0: as above
    ("states", 128): 400,  # 396, 356 on 12.0
    ("states_bwd", 128): 430,  # 348 on 8.0, 424 on 12.0
    ("states", 256): 600,
    ("states_bwd", 256): 600,
    ("dq", 64): 400,  # 168, 392 on 12.0
    ("dq", 128): 480,  # 476 on 10.0
    ("dq", 256): 21000,  # 20846 on 8.0, 7128 on 12.0
    ("dk", 64): 1200,  # 1104 on 8.0; not compiled again for 12.0
    ("dk", 128): 630,  # 464 on 8.0, 624 on 12.0
    ("dk", 256): 2500,
    ("dv", 128): 440,  # 248 on 8.0, 196 on 12.0
    ("dv", 256): 1500,
}
# With decay on Hopper: the tile of factors is made where it is used, and once more where it is used again.
DECAY_CEILING = dict.fromkeys(("scan_fwd", "states", "states_bwd", "dk", "dv"), LITTLE)
DECAY_CEILING |= {"dq": 400, "step_fwd": 0}  # 392 of dq
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
if VERSION >= (3, 8):
    CEILING |= {("scan_fwd", 128, "bf16"): 1540, ("dv", 128, "bf16"): 700, ("dv", 256, "bf16"): 1260}


def described(entry: dict[str, Any]) -> tuple[str, int, str]:
    return entry["kernel"], entry["dim"], entry["dtype"]


def report(*arguments: str) -> list[dict[str, Any]]:
    return run_compiled("-m", "tests.kernels.without_gpu", "--dim", *arguments)


@pytest.mark.long
def test_kernels_of_64_features_compile_fit_and_spill_no_more_than_known_on_every_gpu() -> None:
    """One test, since making the report takes a minute: several processes would each make their own."""
    found = report("64", "--dtype", "bf16", "--capability", *map(str, CAPABILITIES))
    assert {entry["capability"] for entry in found} == set(CAPABILITIES)
    check(found)


@pytest.mark.ptx
def test_the_whole_table_compiles_fits_and_spills_no_more_than_known() -> None:
    sizes, everything = ("64", "128", "256"), []
    for kind in ((), ("--erase", "--decay"), ("--erase", "--by-unit")):
        everything += report(*sizes, *kind, "--dtype", "bf16", "--capability", *map(str, CAPABILITIES))
        everything += report(*sizes, *kind, "--dtype", "fp16", "fp32", "--capability", "90")
    check_that_nothing_is_left_out({described(entry) for entry in everything})
    check(everything)


def check(entries: list[dict[str, Any]]) -> None:
    assert not [entry for entry in entries if entry["shared"] > SHARED_LIMIT[entry["capability"]]]
    assert not [(*described(x), x["capability"], x["spills"]) for x in entries if x["spills"] > ceiling(x)]
    check_the_use_of_hopper_s_matrix_unit([entry for entry in entries if entry["capability"] == 90])


@pytest.mark.long
def test_decay_spills_no_more_than_known_at_64_features() -> None:
    spills = {entry["kernel"]: entry["spills"] for entry in report("64", "--decay")}
    assert spills.keys() == DECAY_CEILING.keys()
    assert not [name for name in spills if spills[name] > DECAY_CEILING[name]]


def check_that_nothing_is_left_out(compiled: set[tuple[str, int, str]]) -> None:
    names = {(name.replace("_bwd", ""), dim) for name, dim, _ in compiled}
    assert names >= set(tiles.TABLE["bf16"])
    assert {(*name, dtype) for name in names for dtype in ("bf16", "fp16", "fp32")} <= compiled


def ceiling(entry: dict[str, Any]) -> int:
    if entry["dtype"] != "bf16":
        return CEILING.get(described(entry), WIDE_CEILING[entry["dim"]])
    elsewhere = 0 if entry["capability"] == 90 else ELSEWHERE.get((entry["kernel"], entry["dim"]), 0)
    return max(CEILING.get(described(entry), LITTLE), elsewhere)


def check_the_use_of_hopper_s_matrix_unit(report: list[dict[str, Any]]) -> None:
    """The delta rule has also products in tf32 that are too small for it."""
    for entry in report:
        if entry["dtype"] != "bf16" or entry["kernel"] == "step_fwd":
            continue
        assert entry["matrix"] > 0, entry
        assert entry["mma_sync"] == 0 or entry["kernel"].startswith(("delta", "chunk")), entry


# make test compiles a step alone, in test_ptx.py.
FORMS = [
    *(pytest.param(x, marks=pytest.mark.long) for x in ("few", "other", "delta")),
    pytest.param("wide", marks=pytest.mark.ptx),
]


OF_SCAN = {"table_fwd", "scan_fwd", "states", "prefix", "dq", "dkv"}
OF_DECAY = {"boundary_products", "log_decay"}
STARTED = {
    "few": {*OF_SCAN, "step_fwd"},
    "other": {*OF_SCAN, *OF_DECAY, "step_fwd"},
    "wide": OF_SCAN | OF_DECAY,
    "delta": {
        *("table_fwd", "step_fwd", "features_fwd", "features_bwd", "sum_decay", "chunk_scores"),
        *("delta_fwd", "delta_states", "delta_dv", "delta_dqk"),
    },
}


def started_by(forms: str, capability: int) -> list[dict[str, Any]]:
    return run_compiled(str(Path(__file__).parent / "launch_without_gpu.py"), str(capability), forms)


@pytest.mark.parametrize("forms", FORMS)
def test_what_the_launchers_start_compiles_too(forms: str) -> None:
    started = started_by(forms, CAPABILITIES[0])
    assert {entry["kernel"].removesuffix("_kernel") for entry in started} == STARTED[forms]
    assert not [entry for entry in started if entry["shared"] > SHARED_LIMIT[80]]


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_gated_norm_compiles_and_does_not_spill(capability: int) -> None:
    started = started_by("norms", capability)
    assert {x["kernel"] for x in started} == {"norm_fwd_kernel", "norm_bwd_kernel", "sum_rows_kernel"}
    assert not [x for x in started if x["shared"] > SHARED_LIMIT[capability] or x["spills"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("forms", "capability", "most"),
    [("gates", 90, 0), *(("many gates", x, 1420 if x == 120 else 1400) for x in (89, *CAPABILITIES))],
)
def test_the_gates_compile_fit_and_spill_no_more_than_known(forms: str, capability: int, most: int) -> None:
    started = started_by(forms, capability)
    assert {x["kernel"] for x in started} == {"gates_fwd_kernel", "gates_bwd_kernel", "sum_rows_kernel"}
    assert not [x for x in started if x["shared"] > SHARED_LIMIT[capability] or x["spills"] > most]


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("forms", ["convolution", "packed convolution"])
def test_the_convolution_compiles_in_few_launches_and_does_not_spill(forms: str, capability: int) -> None:
    """With few channels several programs share the positions of a channel, and a third launch adds up their sums."""
    started = started_by(forms, capability)
    more = ["sum_rows_kernel"] if forms == "packed convolution" else []
    assert [x["kernel"] for x in started] == ["convolve_fwd_kernel", "convolve_bwd_kernel", *more]
    assert not [x for x in started if x["spills"] or x["shared"] > SHARED_LIMIT[capability]]
