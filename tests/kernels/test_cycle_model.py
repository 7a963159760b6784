"""The model of one multiprocessor: made-up loops whose time is known beforehand."""

import pytest
from linrope_kernel_tools.cycle_model import Code, Instruction, main_loop, model, moved, resident


def instruction(name: str, unit: str, arguments: str = "", **how: int) -> Instruction:
    given = {"stall": 1, "sets": 7, "reads": 7, "waits": 0, "bytes": 4} | how
    return Instruction(name, arguments, unit=unit, **given)


def cycles(loop: list[Instruction], warps: int = 4, programs: int = 1) -> float:
    return model(loop, warps, programs).cycles


def test_a_warp_issues_one_instruction_a_cycle_at_best() -> None:
    assert cycles([instruction("FFMA", "fma")] * 100) == pytest.approx(100)


def test_stall_counts_are_waited_for_and_other_warps_fill_them() -> None:
    loop = [instruction("FFMA", "fma", stall=4)] * 100
    assert cycles(loop) == pytest.approx(400)
    assert cycles(loop, programs=4) == pytest.approx(100, rel=0.02)


def test_a_unit_of_half_the_rate_takes_twice_the_time() -> None:
    assert cycles([instruction("LOP3.LUT", "alu")] * 100, programs=2) == pytest.approx(200, rel=0.02)
    assert cycles([instruction("MUFU.EX2", "special")] * 100, programs=2) == pytest.approx(800, rel=0.02)


def test_who_reads_a_result_waits_for_its_scoreboard() -> None:
    loop = [instruction("LDS", "shared", sets=0), instruction("FADD", "fma", waits=1)]
    found = model(loop, 4, 1)
    assert found.cycles == pytest.approx(34)
    assert max(found.limits, key=found.limits.__getitem__) == "shared"


def test_copies_take_the_memory_s_bandwidth() -> None:
    copy = instruction("LDGSTS.E.128", "global", bytes=16)
    loop = [*[copy] * 50, instruction("LDGDEPBAR", "sync"), instruction("DEPBAR.LE", "sync", "SB0, 0x0")]
    assert moved(loop) == 50 * 32 * 16
    assert cycles(loop, programs=4) == pytest.approx(4 * moved(loop) / 19.16, rel=0.1)


def test_products_keep_the_matrix_unit_busy_for_half_their_columns() -> None:
    product = instruction("HGMMA.64x128x16.F32.BF16", "wgmma", "R24, R56, gdesc[UR16], R24, gsb0")
    assert cycles([product] * 40) == pytest.approx(40 * 64)


def test_the_loop_with_the_products_is_the_main_one() -> None:
    plain, product = instruction("FADD", "fma"), instruction("HGMMA.64x64x16", "wgmma")
    code = Code([plain] * 10 + [product] * 2 + [plain], [(0, 9), (10, 12)], 32)
    assert main_loop(code) == [product, product, plain]


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(255, 57_344, 4, 2), (255, 57_344, 8, 1), (128, 36_864, 4, 4), (168, 82_944, 4, 2), (32, 0, 4, 16)],
)
def test_registers_and_shared_memory_say_how_many_programs_run(registers, shared, warps, programs) -> None:
    assert resident(registers, shared, warps) == programs
