"""The emulator by itself, on small programs: what it computes, and that it sees what is left out."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.ptx.grid import Kernel, Report
from tests.kernels.ptx.parse import Fault

HEAD = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<20>;
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	shl.b32 	%r3, %r1, 2;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
"""  # thread %r1 of program %r2; %r3 4 bytes for each thread of shared, %rd4 and %rd5 of global memory
Findings = Counter[str]
pytestmark = pytest.mark.ptx  # it belongs to the emulator, which make test-ptx runs


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Also where the other tests run on a GPU."""
    with torch.device("cpu"):
        yield


def run(body: str, *tensors: Tensor, threads: int = 64, programs: int = 1, shared: int = 4096) -> Findings:
    """What is found, without the places."""
    given: list[Any] = list(tensors) + [torch.zeros(0)] * (2 - len(tensors))
    report = Report()
    Kernel(HEAD.format(threads=threads) + body + "\n\tret;\n}\n", shared).run(given, programs, report)
    return Counter({what: count for (_, what, _), count in report.findings.items()})


def numbers(n: int = 64) -> Tensor:
    return torch.arange(n, dtype=torch.int32)


# ---- What it computes


def test_threads_that_part_meet_again() -> None:
    """Each thread adds up its own number of terms."""
    out = torch.zeros(64, dtype=torch.int32)
    found = run(
        """
        mov.b32 %r4, 0;
        mov.b32 %r5, 0;
        $loop:
        setp.ge.s32 %p1, %r4, %r1;
        @%p1 bra $end;
        add.s32 %r4, %r4, 1;
        add.s32 %r5, %r5, %r4;
        bra.uni $loop;
        $end:
        bar.sync 0;
        st.global.b32 [%rd4], %r5;
        """,
        out,
    )
    assert not found
    assert torch.equal(out, numbers() * (numbers() + 1) // 2)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("mul.hi.u32 %r5, 0xC0000000, 5;", 3),
        ("mul.hi.s32 %r5, -3, 5;", -1),
        ("mov.b64 %rd6, kernel_param_1; ld.param.b32 %r4, [%rd6]; cvt.u32.u64 %r5, %rd2; sub.s32 %r5, %r5, %r4;", 0),
        ("div.s32 %r5, -7, 2;", -3),
        ("rem.s32 %r5, -7, 2;", -1),
        ("shr.s32 %r5, -8, 40;", -1),
        ("shl.b32 %r5, 1, 32;", 0),
        ("bfe.s32 %r5, 12, 2, 2;", -1),
        ("bfe.u32 %r5, 12, 2, 2;", 3),
        ("mov.b64 %rd1, -1; bfe.u64 %rd1, %rd1, 33, 31; cvt.u32.u64 %r5, %rd1;", 2**31 - 1),
        ("bfi.b32 %r5, 3, 16, 1, 2;", 22),
        ("prmt.b32 %r5, 0x44332211, 0x88776655, 0x7041;", 0x88115522 - 2**32),
        ("lop3.b32 %r5, 12, 10, 6, 0x96;", 12 ^ 10 ^ 6),
        ("mov.b32 %r4, 0f7FC00000; max.f32 %r5, %r4, 0f3F800000;", 0x3F800000),
        ("mov.b32 %r4, 0f7FC00000; max.NaN.f32 %r5, %r4, 0f3F800000;", 0x7FC00000),
        ("mov.b16 %rs1, 0xBFC0; mov.b16 %rs2, 0x3F80; min.NaN.bf16 %rs1, %rs1, %rs2; cvt.u32.u16 %r5, %rs1;", 0xBFC0),
        ("mov.b32 %r4, 7; st.shared::cta.b32 [%r3], %r4; ld.shared.b32 %r5, [%r3];", 7),
        ("sub.s32 %r4, %r3, 256; mov.b32 %r5, 7; st.shared.b32 [%r4+256], %r5; ld.shared.b32 %r5, [%r3];", 7),
        ("mov.b32 %r4, 0fBFC00000; cvt.rni.s32.f32 %r5, %r4;", -2),
        ("mov.b32 %r4, 0f7F800000; cvt.rzi.s32.f32 %r5, %r4;", 2**31 - 1),
        ("mov.b32 %r4, 0f3F808000; cvt.rn.bf16.f32 %rs1, %r4; cvt.u32.u16 %r5, %rs1;", 0x3F80),
        ("mov.b32 %r4, 0f3F803000; cvt.rna.tf32.f32 %r5, %r4;", 0x3F804000),
        ("mov.b32 %r4, 0f3F818000; cvt.rn.bf16.f32 %rs1, %r4; cvt.u32.u16 %r5, %rs1;", 0x3F82),
        ("mov.b64 %rd6, 0x500000007; mov.b64 {_, %r5}, %rd6;", 5),
        ("mov.b32 %r4, 0f7FC00000; setp.neu.f32 %p1, %r4, %r4; selp.b32 %r5, 1, 0, %p1;", 1),
        ("mov.b32 %r4, 0f7FC00000; setp.lt.f32 %p1, %r4, 0f00000000; selp.b32 %r5, 1, 0, %p1;", 0),
        ("mov.b32 %r5, 7; setp.eq.s32 %p1, %r1, 99; @%p1 mov.b32 %r5, 8;", 7),
    ],
)  # fmt: skip
def test_one_instruction(instructions: str, expected: int) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    run(f"{instructions}\nst.global.b32 [%rd4], %r5;", out)
    assert out.tolist() == [expected] * 64


def test_lanes_exchange_numbers_within_their_warp() -> None:
    for how, expected in (
        ("bfly.b32 %r4, %r1, 1, 31, -1", numbers() ^ 1),
        ("idx.b32 %r4, %r1, 3, 31, -1", numbers() // 32 * 32 + 3),
        ("up.b32 %r4, %r1, 2, 0, -1", torch.where(numbers() % 32 < 2, numbers(), numbers() - 2)),
    ):
        out = torch.zeros(64, dtype=torch.int32)
        run(f"shfl.sync.{how};\nst.global.b32 [%rd4], %r4;", out)
        assert torch.equal(out, expected.int())


def test_a_matrix_is_stored_and_loaded_transposed() -> None:
    """Each lane holds two values of a row; after both each lane holds two of a column."""
    values = torch.randint(0, 2**15, (8, 8), dtype=torch.int16)
    out = torch.zeros(32, dtype=torch.int32)
    store = "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r4}; bar.sync 0;"
    load = "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r5}, [%r6]; st.global.b32 [%rd5], %r5;"
    run("ld.global.b32 %r4, [%rd4]; shl.b32 %r6, %r1, 4;" + store + load, values, out, threads=32)
    assert torch.equal(out.view(torch.int16).reshape(8, 8), values.T)


def test_a_product_of_one_warp() -> None:
    """The fragments of mma.sync as the PTX manual draws them, lane by lane."""
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    lanes = torch.zeros(32, 6, 2, dtype=torch.bfloat16)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for j in range(2):
            for i in range(4):
                lanes[lane, i, j] = a[row + 8 * (i % 2), column + 8 * (i // 2) + j]
            for i in range(2):
                lanes[lane, 4 + i, j] = b[column + 8 * i + j, row]
    out = torch.zeros(32, 4)
    loads = "".join(f"ld.global.b32 %r{4 + i}, [%rd6+{4 * i}];" for i in range(6))
    run(
        f"mul.wide.u32 %rd6, %r1, 24; add.s64 %rd6, %rd1, %rd6; {loads} mov.b32 %r10, 0f3F800000;"
        """
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%r11, %r12, %r13, %r14}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r10, %r10, %r10, %r10};
        mul.wide.u32 %rd6, %r1, 16;
        add.s64 %rd6, %rd2, %rd6;
        st.global.v4.b32 [%rd6], {%r11, %r12, %r13, %r14};
        """,
        lanes,
        out,
        threads=32,
    )
    expected = (1 + a.double() @ b.double()).float()
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for i in range(4):
            assert out[lane, i] == expected[row + 8 * (i // 2), column + i % 2]


# ---- Races

OTHER_WARP = "xor.b32 %r4, %r3, 128;"  # the 4 bytes of a thread of the other warp


@pytest.mark.parametrize(
    ("first", "second", "seen"),
    [
        ("st.shared.b32 [%r3], %r1;", "ld.shared.b32 %r5, [%r4];", "reads what another warp wrote"),
        ("ld.shared.b32 %r5, [%r4];", "st.shared.b32 [%r3], %r1;", "writes over what another warp reads"),
        ("st.shared.b32 [%r3], %r1;", "st.shared.b32 [%r4], %r1;", "writes over what another warp wrote"),
        ("st.global.b32 [%rd4], %r1;", "ld.global.b32 %r5, [%rd6];", "reads what another warp wrote"),
    ],
)
def test_a_barrier_left_out_is_a_race(first: str, second: str, seen: str) -> None:
    where = OTHER_WARP + "cvt.u64.u32 %rd6, %r4; add.s64 %rd6, %rd1, %rd6;"
    assert not run(where + first + "bar.sync 0;" + second, numbers())
    assert run(where + first + second, numbers()) == {seen: 1}


def test_within_a_warp_there_is_no_race() -> None:
    assert not run("xor.b32 %r4, %r3, 4; st.shared.b32 [%r3], %r1; ld.shared.b32 %r5, [%r4];")


def test_programs_of_the_grid_have_no_barrier_between_them() -> None:
    found = run("st.global.b32 [%rd4], %r2;", numbers(), programs=3)
    assert found == {"two threads write different values to one address in one instruction": 1}
    each = "mul.lo.s32 %r4, %r2, 256; cvt.u64.u32 %rd6, %r4; add.s64 %rd6, %rd4, %rd6; st.global.b32 [%rd6], %r2;"
    out = torch.zeros(3 * 64, dtype=torch.int32)
    assert not run(each, out, programs=3)
    assert out.tolist() == [0] * 64 + [1] * 64 + [2] * 64
    found = run(each + "bar.sync 0; ld.global.b32 %r5, [%rd4];", out, programs=3)
    assert found["reads what another program of the grid wrote"] == 1
    changed = each.replace("256;", "256; add.s32 %r2, %r2, 5;")
    found = run("ld.global.b32 %r5, [%rd4];" + changed, out, programs=3)
    assert found["writes over what another program of the grid reads"] == 1


def test_two_values_at_one_address_are_a_race() -> None:
    found = run("mov.b32 %r4, 0; st.shared.b32 [%r4], %r1;")
    assert found == {"two threads write different values to one address in one instruction": 1}
    assert not run("mov.b32 %r4, 0; st.shared.b32 [%r4], %r4;")


# ---- cp.async and the matrix unit

COPY = "shl.b32 %r4, %r1, 4; cvt.u64.u32 %rd6, %r4; add.s64 %rd6, %rd1, %rd6; " \
       "cp.async.cg.shared.global [ %r4 + 0 ], [ %rd6 + 0 ], 0x10; cp.async.commit_group;"  # fmt: skip


def test_a_copy_is_there_after_its_wait_and_for_other_warps_after_a_barrier() -> None:
    data, out = torch.randint(0, 99, (256,), dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    load, store = "ld.shared.b32 %r5, [%r3];", "st.global.b32 [%rd5], %r5;"
    assert not run(COPY + "cp.async.wait_group 0; bar.sync 0;" + load + store, data, out)
    assert torch.equal(out, data[:64])
    assert run(COPY + "bar.sync 0;" + load, data)["reads what cp.async has not brought yet"] == 1
    assert run(COPY + "cp.async.wait_group 0;" + load, data) == {"reads what another warp wrote": 1}


def test_a_wait_leaves_the_last_groups_on_their_way() -> None:
    """The second copy goes behind the first; wait_group 1 waits for the first only."""
    second = "add.s32 %r6, %r4, 1024; cp.async.cg.shared.global [ %r6 + 0 ], [ %rd6 + 0 ], 0x10; " \
             "cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;"  # fmt: skip
    data = torch.zeros(256, dtype=torch.int32)
    assert not run(COPY + second + "ld.shared.b32 %r5, [%r4];", data)
    found = run(COPY + second + "ld.shared.b32 %r5, [%r6];", data)
    assert found == {"reads what cp.async has not brought yet": 1}


def test_a_copy_of_nothing_writes_zeros_and_reads_no_memory() -> None:
    out = torch.zeros(64, dtype=torch.int32) + 7
    none = COPY.replace("0x10;", "0x10, %r7;").replace("[ %rd6 + 0 ]", "[ %rd7 + 0 ]")
    body = "mov.b32 %r7, 0; mov.b64 %rd7, 5;" + none + "cp.async.wait_group 0; bar.sync 0;"
    assert not run(body + "ld.shared.b32 %r5, [%r3]; st.global.b32 [%rd5], %r5;", torch.zeros(1), out)
    assert out.tolist() == [0] * 64


# 128 threads fill 4096 bytes with ones in bfloat16.
ONES = "shl.b32 %r4, %r1, 5; mov.b32 %r5, 0x3F803F80; " + "".join(
    f"st.shared.b32 [%r4+{4 * i}], %r5;" for i in range(8)
)
DESCRIPTOR = 1 << 62 | 64 << 32 | 64 << 16  # 128 bytes in a row, 1024 between 8 rows, from address 0 on
PRODUCT = (
    f"mov.b64 %rd7, {DESCRIPTOR}; mov.b64 %rd8, {DESCRIPTOR}; mov.pred %p2, 0; wgmma.fence.sync.aligned;"
    "mov.b32 %r6, 0x3F803F80;"
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r7, %r8, %r9, %r10}, {%r6, %r6, %r6, %r6}, %rd8,"
    "%p2, 1, 1, 0;"
    "wgmma.commit_group.sync.aligned;"
)
NO_FENCE = "no fence.proxy.async between st.shared and the matrix unit"
START = "mov.b32 %r7, 0; mov.b32 %r8, 0; mov.b32 %r9, 0; mov.b32 %r10, 0;"
FENCE, WAIT = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"


def test_the_matrix_unit_needs_a_fence_and_a_barrier_before_it() -> None:
    out = torch.zeros(128, dtype=torch.float32)
    after = PRODUCT + WAIT + "st.global.b32 [%rd4], %r7;"
    assert not run(START + ONES + FENCE + "bar.sync 0;" + after, out, threads=128)
    assert out.tolist() == [16.0] * 128
    assert run(START + ONES + "bar.sync 0;" + after, out, threads=128) == {NO_FENCE: 1}
    found = run(START + ONES + FENCE + after, out, threads=128)
    assert found == {"the matrix unit reads what was written since the last barrier": 1}


def test_the_matrix_unit_needs_a_fence_after_a_copy() -> None:
    data, out = torch.ones(2048).bfloat16(), torch.zeros(128)
    copy = COPY.replace("%r4, %r1, 4", "%r4, %r1, 5").replace("cp.async.commit_group;", "")
    copy += "add.s64 %rd6, %rd6, 16; cp.async.cg.shared.global [ %r4 + 16 ], [ %rd6 + 0 ], 0x10;"
    copy += "cp.async.commit_group;"
    arrived, after = "cp.async.wait_group 0;", "bar.sync 0;" + PRODUCT + WAIT + "st.global.b32 [%rd5], %r7;"
    assert not run(START + copy + arrived + FENCE + after, data, out, threads=128)
    assert out.tolist() == [16.0] * 128
    for late in (arrived, FENCE + arrived):
        found = run(START + copy + late + after, data, out, threads=128)
        assert found == {"no fence.proxy.async between cp.async and the matrix unit": 1}


def test_what_the_matrix_unit_works_on_must_be_waited_for() -> None:
    ready = START + ONES + FENCE + "bar.sync 0;" + PRODUCT
    found = run(ready + "st.global.b32 [%rd4], %r7;", torch.zeros(128), threads=128)
    assert found == {"%r7 is read while the matrix unit works on it": 1}
    write = "bar.sync 0; mov.b32 %r11, 0; st.shared.b32 [%r4], %r11;"
    assert run(ready + write, threads=128) == {"writes over what another warp reads": 1}
    assert not run(ready + WAIT + write, threads=128)


# ---- What no GPU would run


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("ld.global.b32 %r4, [%rd4+4];", "global memory: out of bounds"),
        ("st.global.b32 [%rd4+-4], %r1;", "global memory: out of bounds"),
        ("ld.global.b32 %r4, [%rd4+2];", "global memory: 4 bytes at an address that is no multiple of 4"),
        ("ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd4];", "global memory: 16 bytes at an address"),
        ("ld.shared.b32 %r4, [%r3+4096];", "shared memory: out of bounds"),
        ("ld.shared.b32 %r4, [%r3+2];", "shared memory: 4 bytes at an address that is no multiple of 4"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r3];", "shared memory: 16 bytes at an address"),
        ("add.s32 %r4, %r5, 1;", "%r5 is read and was never written"),
        ("setp.lt.s32 %p1, %r1, 5; @%p1 bar.sync 0;", "only a part of the program's threads is here"),
        ("setp.lt.s32 %p1, %r1, 5; @%p1 shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1;", "only a part of the warp"),
        ("add.s32 %rs1, %r1, 1;", "%rs1 has 16 bits, written with int32"),
        ("tanh.approx.f32 %r4, %r1;", "not covered: tanh.approx.f32"),
        ("add.rz.f32 %r4, %r1, %r1;", "not covered: add.rz"),
        ("ld.local.b32 %r4, [%rd4];", "not covered: ld.local"),
        ("bar.sync 1;", "not covered: another barrier than 0"),
        ("mov.u32 %r4, %laneid;", "not covered: %laneid"),
    ],
)  # fmt: skip
def test_what_no_gpu_would_run_and_what_is_not_covered_raises(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why.replace(".", r"\.")):
        run(body, numbers())


def test_a_part_of_a_register_may_be_undefined_if_nobody_reads_it() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    run(
        "cvt.u16.u32 %rs1, %r1; mov.b32 %r4, {%rs1, %rs2}; and.b32 %r4, %r4, 0xFFFF; st.global.b32 [%rd4], %r4;",
        out,
    )
    assert torch.equal(out, numbers())


def test_the_bits_of_bfloat16_are_pytorch_s() -> None:
    from tests.kernels.ptx.operands import from_bf16, to_bf16

    x = torch.cat((torch.randn(4000) * 2.0 ** torch.randint(-120, 120, (4000,)), torch.tensor([0.0, -0.0])))
    bits = to_bf16(x.numpy())
    assert np.array_equal(bits, x.bfloat16().view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(from_bf16(bits), x.bfloat16().float().numpy())
