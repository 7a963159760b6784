"""The steps of ``make gpu-run`` without a GPU: each runs, and none lets a wrong result pass.

Plain PyTorch takes the kernels' place: tests/backends and tests/kernels run these in Triton's interpreter.
"""

import inspect
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from math import log, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from linrope_kernels import start, tiles
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bench.cases import AttentionCase
from benchmarks.gpu import commands, curves, delta, host, machine, operation, others
from benchmarks.gpu import tiles as tile_step
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.runner import failures
from benchmarks.gpu.steps import STEPS
from benchmarks.study import peers
from benchmarks.study.variants import num_parameters
from linrope import Rotary, linear_rope_attention
from linrope.integrations import fla
from linrope.models.training import Corpus

ROOT = Path(__file__).parents[2]
DRY = Machine("cpu", small=True, limit=120, backend="eager")
DTYPE = DRY.dtype
TIMES = {"median_ms", "min_ms", "max_ms", "runs"}

pytestmark = pytest.mark.usefixtures("quick_interpreter")
LONG = {"compiled"}  # compiles for 10 seconds and more


class Event:
    """Stands in for torch.cuda.Event, with the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.time - self.time)


class Pretended(Machine):
    """A CPU on which the steps do what they do on a GPU, but for graphs and the profiler."""

    on_gpu = True
    dtype, layer_dtype = DRY.dtype, DRY.layer_dtype

    def captured(self, run: Any) -> Any:
        return DRY.captured(run)

    def kernels(self, run: Any, repeats: int = 1) -> Any:
        run()
        return [("scan_fwd_kernel", 0.5)] * repeats


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, arguments: module)
    optimizer = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda x, **how: optimizer(x, **(how | {"capturable": False})))
    return Pretended(**vars(DRY))


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule and one size of heads: tests/backends and tests/kernels run all rules, sizes and tiles."""
    monkeypatch.setattr(operation, "DIMS", (64,))
    for module in (delta, others):
        monkeypatch.setattr(module, "SMALL", (1, 40, 1, 16))
    for name in ("RULES", "GATED"):
        monkeypatch.setattr(delta, name, (delta.KDA,))


def once(run: Any) -> Any:
    """A program that was called as before gives what it gave then."""
    known: dict[str, Any] = {}

    def call(command: list[str], **how: Any) -> Any:
        key = str((command, how))
        return known[key] if key in known else known.setdefault(key, run(command, **how))

    return call


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] if x in LONG else []) for x in STEPS]
)
def test_every_step_runs_without_a_gpu(
    name: str, pretended: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fla(monkeypatch)
    if name == "host":
        monkeypatch.setattr(subprocess, "run", once(subprocess.run))
    on = {"host": replace(pretended, before=ROOT), "parallel": DRY}.get(name, pretended)
    rows = list(STEPS[name].run(on))
    assert rows
    assert failures(name, rows, "done") == []
    not_here = {"mamba SSD", *operation.SOFTMAX}
    assert {other for row in rows for other in row.get("not_run", {})} <= not_here
    assert json.loads(json.dumps(rows, default=str))


def small(n: int = 70) -> AttentionCase:
    return operation.case_of(DRY, (2, n, 2, 16))


def right(case: AttentionCase, **how: Any) -> Tensor:
    return linear_rope_attention(*case.inputs, **({"rotary": case.rotary, "backend": "eager"} | how))


def median(**milliseconds: float) -> dict[str, Any]:
    """Times in the form in which the steps store them."""
    return {mode: {"median_ms": x} for mode, x in milliseconds.items()}


# Checks: each passes on what is right and fails on what is not


@pytest.mark.parametrize("gates", [False, True])
def test_right_results_pass(gates: bool) -> None:
    case = operation.case_of(DRY, (2, 1100, 2, 16), gates)  # three windows
    errors = operation.check(case, partial(case.linrope, backend="eager"))
    assert errors.keys() == {"bound", "out", "dq", "dk", "dv"} | ({"dlog_decay"} if gates else set())
    assert all(0 < error < machine.TOLERANCE[DTYPE] for name, error in errors.items() if name != "bound")


def off(case: AttentionCase, index: Any, times: float = 1.0, plus: float = 0.0) -> Tensor:
    out = right(case).clone()
    out[index] = times * out[index] + plus
    return out


def wrong_gradient(case: AttentionCase, which: int) -> Tensor:
    """The right output; one input's gradient is a tenth too large."""
    inputs = list(case.inputs)
    inputs[which] = inputs[which] + 0.1 * (inputs[which] - inputs[which].detach())
    return linear_rope_attention(*inputs, rotary=case.rotary, backend="eager")


WRONG: dict[str, tuple[Any, str]] = {
    "rotation": (partial(right, rotary=Rotary(16, base=100.0)), "out is off"),
    "no rotation": (partial(right, rotary=None), "out is off"),
    "not normalized": (partial(right, normalize=False), "out is off"),
    "shifted": (lambda case: right(case).roll(1, 1), "out is off"),
    "where outputs are small": (partial(off, index=np.s_[:, -50:], times=1.1), "out is off"),
    "one number, by more than its bound and by little among the others":
        (partial(off, index=(-1, 0, -1, 0), plus=4 * machine.TOLERANCE[DTYPE]), "times the bound"),
    "not finite, in a head that is not compared": (partial(off, index=np.s_[:, :, 0], times=nan), "not finite"),
    **{x: (partial(wrong_gradient, which=i), f"{x} is off") for i, x in enumerate(("dq", "dk", "dv"))},
}  # fmt: skip


@pytest.mark.parametrize(("attend", "why"), WRONG.values(), ids=WRONG)
def test_wrong_results_do_not_pass(attend: Any, why: str) -> None:
    case = small(600)
    with pytest.raises(AssertionError, match=why):
        operation.check(case, partial(attend, case))


def test_where_the_only_value_is_zero_the_bound_is_a_number() -> None:
    case = small()
    with torch.no_grad():
        case.inputs[2][:, 0] = 0
    assert operation.check(case, partial(right, case))["bound"] < 1


def test_nan_does_not_pass() -> None:
    x = torch.ones(1, 1200, 2)
    y = x.clone()
    y[0, 700, 1] = torch.nan
    with pytest.raises(AssertionError, match="nan"):
        machine.compare("x", y, x, 1.0)


def test_a_case_that_fails_is_a_row_and_the_others_go_on() -> None:
    def row_of(n: int) -> dict[str, Any]:
        if n == 2:
            raise RuntimeError("broken")
        return {"n": n}

    rows = list(machine.each([1, 2, 3], row_of))
    assert rows == [{"case": 1, "n": 1}, {"case": 2, "failure": "RuntimeError: broken"}, {"case": 3, "n": 3}]


def test_the_softmax_side_is_softmax_attention_with_linrope_s_rotary() -> None:
    case = AttentionCase(70, 2, 2, 16, "cpu", torch.float32)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        out = case.softmax()
    q, k, v = (x.detach().double() for x in case.inputs)
    q, k = (case.rotary(x, torch.arange(70)) for x in (q, k))
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / 4
    weights = logits.masked_fill(torch.ones(70, 70).triu(1) > 0, -torch.inf).softmax(-1)
    expected = torch.einsum("bhnm,bmhe->bnhe", weights, v)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_a_wrong_softmax_side_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small()
    case.check_softmax()
    case.cis = case.cis.conj()
    monkeypatch.setattr(operation, "case_of", lambda *_: case)
    monkeypatch.setattr(operation, "linrope_row", lambda *_: {})
    row = operation.softmax_row(DRY, (2, 70, 2, 16), ("MATH",))
    assert row["functions"] == {}
    assert "softmax attention's output is off" in row["not_run"]["MATH"]


def test_a_backend_that_does_not_run_is_noted_and_a_slow_one_not_followed_up(monkeypatch) -> None:
    backends = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "OVERRIDEABLE")
    milliseconds = {"FLASH_ATTENTION": 1.0, "EFFICIENT_ATTENTION": 1.9, "OVERRIDEABLE": 2.1}
    seen: list[str] = []

    def check_softmax(case: AttentionCase) -> None:
        seen.append(backends[len(seen)])
        if seen[-1] == "CUDNN_ATTENTION":
            raise RuntimeError("No available kernel.")

    def measured(on: Machine, case: Any, attend: Any, modes: tuple[str, ...] = machine.MODES) -> Any:
        return median(**dict.fromkeys(modes, 0.1 if attend.__name__ == "bare" else milliseconds[seen[-1]]))

    monkeypatch.setattr(operation, "measured", measured)
    monkeypatch.setattr(AttentionCase, "check_softmax", check_softmax)
    monkeypatch.setattr(operation, "linrope_row", lambda *_: {})
    row = operation.softmax_row(DRY, (2, 70, 2, 16), backends)
    assert list(row["not_run"]) == ["CUDNN_ATTENTION"]
    assert "No available kernel" in row["not_run"]["CUDNN_ATTENTION"]
    fast = ("FLASH_ATTENTION", "FLASH_ATTENTION bare", "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION bare")
    expected = {name: {"forward", "training"} for name in fast} | {"OVERRIDEABLE": {"forward"}}
    assert {name: set(times) for name, times in row["functions"].items()} == expected


@pytest.mark.parametrize("wrong", ["out", "kv", "place"])
def test_a_wrong_decoding_step_does_not_pass(wrong: str, monkeypatch) -> None:
    def call(*args: Any, **how: Any) -> Any:
        if how["backend"] == DRY.backend and wrong == "place" and how.get("state"):
            how["state"] = how["state"].clone()
        out, state = linear_rope_attention(*args, **how)
        if how["backend"] == DRY.backend:
            out = out * 1.1 if wrong == "out" else out
            state.kv.mul_(1.1 if wrong == "kv" else 1)
        return out, state

    monkeypatch.setattr(operation, "linear_rope_attention", call)
    with pytest.raises(AssertionError, match={"place": "in place"}.get(wrong, f"{wrong} is off")):
        operation.decode_row(DRY, (1, 1, 2, 16))


def test_times() -> None:
    calls = []
    times = DRY.timed(lambda: calls.append(1))
    assert times.keys() == TIMES
    assert 0 <= times["min_ms"] <= times["median_ms"] <= times["max_ms"]
    assert len(calls) == times["runs"] == 1


def test_the_profiler_names_what_a_call_starts() -> None:
    started = [name for name, _ in DRY.kernels(partial(torch.neg, torch.ones(2)), repeats=2)]
    assert started.count("aten::neg") == 2


def test_without_launches_nothing_runs_and_afterwards_all_does() -> None:
    case = operation.case_of(replace(DRY, backend="triton"), (1, 20, 1, 16))
    known = dict(start._LAUNCHES)
    with host.without_launches():
        case.forward(case.linrope)
        assert len(start._LAUNCHES) > 0
    assert known == start._LAUNCHES
    torch.testing.assert_close(case.forward(case.linrope), right(case), rtol=0, atol=0.01)


# Tiles


def test_the_table_s_own_tile_is_tried_first_and_the_others_differ() -> None:
    for key in tile_step.CANDIDATES:
        own, *others = tile_step.candidates(key)
        if key != ("dkv", 128):  # the table has none: dk and dv are two programs there
            assert own == tiles.TABLE["bf16"][key]
        assert own not in others
        assert len(set(others)) == len(others) > 1


def test_a_tile_is_in_the_table_while_it_is_timed_and_one_with_other_results_is_not_timed(
    monkeypatch,
) -> None:
    case, key, found = small(), ("scan_fwd", 64), []
    own, other = tile_step.candidates(key)[:2]

    def training_step(_: AttentionCase) -> tuple[Tensor, ...]:
        found.append(table[key])
        return (torch.ones(3),)

    monkeypatch.setattr(tile_step, "training_step", training_step)
    monkeypatch.setattr(Machine, "kernels", Pretended.kernels)
    table = tiles.TABLE[tiles.precision(case.g_out)]
    before = dict(table)
    for tile in (own, other):
        assert tile_step.tile_row(DRY, key, case, (torch.ones(3),), tile)["ms"] == 0.5
    assert found == [own, own, other, other]
    with pytest.raises(AssertionError, match="other results"):
        tile_step.tile_row(DRY, key, case, (torch.zeros(3) + 2,), own)
    assert table == before


def test_each_kernel_of_the_delta_rule_has_candidates_and_is_timed_where_it_runs() -> None:
    rules = {name: {row["rule"] for _, row in tile_step.cases_of(DRY, name, 16)} for name in tile_step.DELTA}
    assert {(name, 128) for name in rules} <= tile_step.CANDIDATES.keys()
    assert rules["delta_fwd"] == {delta.GDN, delta.KDA}
    assert (rules["delta_dqk"], rules["delta_dqk by unit"]) == ({delta.GDN}, {delta.KDA})


def test_a_kernel_that_a_step_launches_more_than_once_has_the_sum_of_its_times() -> None:
    assert tile_step.least_sum([3.0, 1.0, 2.0, 1.5, 4.0, 0.5], 2) == 3.5
    assert tile_step.least_sum([3.0, 1.0, 2.0], 1) == 1.0


def test_a_difference_counts_by_its_tensor_and_nan_is_no_small_one() -> None:
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    assert tile_step.difference((x, y), (x, y)) == 0
    assert abs(tile_step.difference((x + torch.tensor([0.0, 0.5]), y), (x, y)) - 0.1) < 1e-6
    assert not tile_step.difference((x * nan, y), (x, y)) <= 1


# Training curves


def test_the_models_of_the_curves_have_fifty_million_parameters() -> None:
    with torch.device("meta"):
        sizes = [num_parameters(curves.build(name, curves.FULL, 50_000_000)) for name in curves.RATES]
    assert len(sizes) == 3
    assert all(abs(size - 50_000_000) < 500_000 for size in sizes)


def test_curves_count_the_time_of_training_alone_which_sets_the_rates(monkeypatch, tmp_path: Path) -> None:
    now, rates, texts = [0.0], list[float](), list[Tensor]()

    def update(model: Any, optimizer: Any, inputs: Tensor, targets: Tensor) -> float:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        now[0] += 1
        rates.append(optimizer.param_groups[0]["lr"])
        texts.append(inputs)
        return log(2) * len(rates)

    def bits_of(model: Any, rows: Tensor) -> Tensor:
        now[0] += 1000
        return torch.full((2, 3), float(len(rates)))

    monkeypatch.setattr(curves, "update", update)
    monkeypatch.setattr(curves, "bits_of", bits_of)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    corpus = Corpus.from_texts(["some text " * 100, "some more " * 10])
    row = curves.train(DRY, corpus, curves.SMALL, 2.0, torch.nn.Linear(1, 1), 100.0)
    assert (row["steps"], row["seconds"], row["tokens"]) == (100, 100, 6400)
    assert rates == [2 * curves.schedule(i / 100) for i in range(100)]
    assert rates[0] == 0
    assert rates.index(max(rates)) == 5
    assert 0.2 < rates[-1] < 0.21
    assert row["curve"] == [[2 * i, 128 * i, pytest.approx(2 * i - 0.5)] for i in range(1, 51)]
    assert [x[0] for x in row["held_out"]] == [x[2] for x in row["held_out"]] == [17, 34, 50, 67, 84, 100]
    first = texts[:]
    texts.clear()
    curves.train(DRY, corpus, curves.SMALL, 2.0, torch.nn.Linear(1, 1), 100.0)
    assert all(map(torch.equal, first, texts))  # each model reads the same rows
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"curves": [{"case": curves.BLOCK} | row, {"case": curves.DELTA}]}))
    curves.draw(results, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_a_model_that_cannot_be_built_says_why_and_a_diverged_one_fails(monkeypatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(curves, "update", lambda *_: nan)
    rows = list(curves.curves(DRY))
    assert [row["case"] for row in rows] == list(curves.RATES)
    assert rows[2]["not_run"] == {curves.DELTA: "gated-deltanet: transformers is not installed"}
    assert [row["failure"] for row in rows[:2]] == ["AssertionError: the loss of step 0 is nan"] * 2


# Tests


REPORT = """<testsuites><testsuite time="2.5">
<testcase classname="a" name="passes" time="0.5"/><testcase classname="a" name="is slow" time="1.5"/>
<testcase classname="a" name="fails" time="0.1"><failure message="1 != 2"/></testcase>
<testcase classname="a" name="breaks" time="0.1"><error message="no GPU"/></testcase>
<testcase classname="a" name="is left out" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_pytest_s_report_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    row = commands.outcomes(path)
    assert [row[name] for name in ("passed", "failed", "skipped", "seconds")] == [2, 2, 1, 2.5]
    assert row["failures"] == {"a::fails": "1 != 2", "a::breaks": "no GPU"}
    assert next(iter(row["slowest"])) == "a::is slow"


def test_only_folders_that_the_step_runs_have_tests_with_the_marker() -> None:
    """The marker chooses the tests; the folders only save the time to read the others."""
    named = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    ]
    folders = [ROOT / name for name in ("tests/kernels", "tests/backends", "tests/ops")]
    assert named
    assert all(any(folder in path.parents for folder in folders) for path in named)


# flash-linear-attention, which need not be there


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)


def normalize_with_z_state(
    o: Tensor, q: Tensor, k: Tensor, scale: float, z_init: None, reverse: bool, cu_seqlens: None
) -> Any:
    total = k.float().cumsum(1)
    return o / (scale * q * total).sum(-1, keepdim=True).to(o.dtype), total[:, -1:]


def install_fla(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """linrope's functions of the same names and signatures; tests/integrations/test_fla.py compares them with fla's."""
    modules: dict[str, dict[str, Any]] = {
        "fla": {"__version__": "0"}, "fla.modules": {}, "fla.ops": {},
        "fla.modules.rotary": {"rotary_embedding": rotary_embedding},
        "fla.ops.linear_attn": {"chunk_linear_attn": fla.chunk_linear_attn},
        "fla.ops.linear_attn.utils": {"normalize_with_z_state": normalize_with_z_state},
        "fla.ops.simple_gla": {"chunk_simple_gla": fla.chunk_simple_gla},
        **{module: {x: getattr(fla, x) for x in names} for module, *names in others.FLA.values()},
    }  # fmt: skip
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents | {key: x for key, x in changes.items() if key in contents})
        monkeypatch.setitem(sys.modules, name, module)


def test_another_function_and_none_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fla(monkeypatch, rotary_embedding=lambda x, cos, sin: rotary_embedding(x, cos, sin / 2))
    another = others.fla_row(DRY, (1, 20, 2, 16))
    for name in [x for x in sys.modules if x == "fla" or x.startswith("fla.")]:
        monkeypatch.setitem(sys.modules, name, None)
    for row, why in ((another, "its route is off"), (others.fla_row(DRY, (1, 20, 2, 16)), "not installed")):
        assert row["functions"].keys() == {"linrope"}
        assert why in row["not_run"]["fla"]


def test_the_stand_ins_take_what_fla_s_own_functions_take() -> None:
    """With flash-linear-attention there: make test-fla."""
    pytest.importorskip("fla.modules.rotary")
    from fla.modules.rotary import rotary_embedding as rotate
    from fla.ops.linear_attn.utils import normalize_with_z_state as divide

    x, cos = torch.zeros(1, 4, 2, 16), torch.zeros(4, 8)
    inspect.signature(rotate).bind(x, cos, cos)
    inspect.signature(divide).bind(x, x, x, 1.0, None, False, None)
