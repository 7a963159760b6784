"""benchmarks/gpu.py without a GPU: what it counts, checks, skips and writes, and once all of it."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linrope import Rotary, linear_rope_attention
from linrope.cli.bench.cases import AttentionCase

ROOT = Path(__file__).parents[2]
DEVICE = torch.get_default_device().type
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TIMES = {"median_ms", "min_ms", "max_ms", "runs"}


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu = load()


def small(n: int = 70) -> AttentionCase:
    return AttentionCase(n, 2, 2, 16, DEVICE, DTYPE)


def right(case: AttentionCase, **how: Any) -> Tensor:
    return linear_rope_attention(*case.inputs, **({"rotary": case.rotary, "backend": "eager"} | how))


# The floor


@pytest.mark.parametrize(
    ("d", "forward", "backward", "step"), [(64, 512, 1420, 32768), (128, 1024, 2828, 131072)]
)
def test_the_floor(d: int, forward: int, backward: int, step: int) -> None:
    assert gpu.floor_bytes(d, d) == {"forward": forward, "backward": backward, "step": step}


def test_fractions_of_the_floor_are_the_floor_s_time_over_the_measured_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"forward": {"median_ms": 2.0}, "training": {"median_ms": 5.0}}
    monkeypatch.setattr(gpu, "measured", lambda *_: times)
    monkeypatch.setattr(gpu, "check", lambda *_: {})
    case = small()
    row = gpu.linrope_row(case, bandwidth=1e6)
    heads = case.batch * case.n * case.heads
    assert row["forward_floor"] == pytest.approx(heads * 128 / 1e6 / 2e-3)
    assert row["backward_floor"] == pytest.approx(heads * (2 * 11 * 16 + 12) / 1e6 / 3e-3)


# Checks: each passes on what is right and fails on what is not


def test_right_results_pass() -> None:
    case = small(1100)  # three windows
    errors = gpu.check(case, partial(right, case))
    assert errors.keys() == {"bound", "out", "dq", "dk", "dv"}
    assert all(0 < error < gpu.TOLERANCE[DTYPE] for name, error in errors.items() if name != "bound")


def late(case: AttentionCase) -> Tensor:
    """Off where outputs are small."""
    out = right(case)
    return torch.cat((out[:, :-50], 1.1 * out[:, -50:]), 1)


def one_number(case: AttentionCase) -> Tensor:
    """Off by more than its bound, by little among the others."""
    out = right(case)
    off = torch.zeros_like(out)
    off[-1, 0, -1, 0] = 4 * gpu.TOLERANCE[DTYPE]
    return out + off


def not_finite(case: AttentionCase) -> Tensor:
    """In a head that is not compared."""
    return right(case).index_fill(2, torch.tensor([0]), torch.nan)


def wrong_gradient(case: AttentionCase, which: int) -> Tensor:
    """The right output; one input's gradient is a tenth too large."""
    inputs = list(case.inputs)
    inputs[which] = inputs[which] + 0.1 * (inputs[which] - inputs[which].detach())
    return linear_rope_attention(*inputs, rotary=case.rotary, backend="eager")


@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (partial(right, rotary=Rotary(16, base=100.0)), "out is off"),
        (partial(right, rotary=None), "out is off"),
        (partial(right, normalize=False), "out is off"),
        (lambda case: right(case).roll(1, 1), "out is off"),
        (late, "out is off"),
        (one_number, "times the bound"),
        (not_finite, "not finite"),
        (partial(wrong_gradient, which=0), "dq is off"),
        (partial(wrong_gradient, which=1), "dk is off"),
        (partial(wrong_gradient, which=2), "dv is off"),
    ],
)
def test_wrong_results_do_not_pass(attend: Any, why: str) -> None:
    case = small(600)
    with pytest.raises(AssertionError, match=why):
        gpu.check(case, partial(attend, case))


def test_nan_does_not_pass() -> None:
    x = torch.ones(1, 1200, 2)
    y = x.clone()
    y[0, 700, 1] = torch.nan
    with pytest.raises(AssertionError, match="nan"):
        gpu.compare("x", y, x, 1.0)


def test_the_softmax_side_is_softmax_attention_with_linrope_s_rotary() -> None:
    case = AttentionCase(70, 2, 2, 16, DEVICE, torch.float32)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        out = case.softmax()
    q, k, v = (x.detach().double() for x in case.inputs)
    q, k = (case.rotary(x, torch.arange(70)) for x in (q, k))
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / 4
    weights = logits.masked_fill(torch.ones(70, 70).triu(1) > 0, -torch.inf).softmax(-1)
    expected = torch.einsum("bhnm,bmhe->bnhe", weights, v)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_a_wrong_softmax_side_is_not_timed() -> None:
    case = small()
    gpu.check_softmax(case)
    case.cis = case.cis.conj()
    row = gpu.softmax_row(case, ("MATH",))
    assert row["functions"] == {}
    assert "softmax is off" in row["not_run"]["MATH"]


@pytest.mark.parametrize("wrong", ["out", "kv", "place"])
def test_a_wrong_decoding_step_does_not_pass(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*args: Any, **how: Any) -> Any:
        if how["backend"] == "triton" and wrong == "place" and how.get("state"):
            how["state"] = how["state"].clone()
        out, state = linear_rope_attention(*args, **how)
        if how["backend"] == "triton":
            out = out * 1.1 if wrong == "out" else out
            state.kv.mul_(1.1 if wrong == "kv" else 1)
        return out, state

    monkeypatch.setattr(gpu, "linear_rope_attention", call)
    with pytest.raises(AssertionError, match={"place": "in place"}.get(wrong, f"{wrong} is off")):
        gpu.decode_row((1, 1, 2, 16), DEVICE, DTYPE, 1e9)


# Times and what follows from them


def test_times() -> None:
    calls = []
    times = gpu.timed(lambda: calls.append(1), DEVICE)
    assert times.keys() == TIMES
    assert 0 <= times["min_ms"] <= times["median_ms"] <= times["max_ms"]
    assert len(calls) >= times["runs"] >= 1


def test_a_backend_that_does_not_run_is_noted_and_a_slow_one_not_followed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "OVERRIDEABLE")
    milliseconds = {"FLASH_ATTENTION": 1.0, "EFFICIENT_ATTENTION": 1.9, "OVERRIDEABLE": 2.1}
    now = iter(backends)
    backend = ""

    def check_softmax(case: AttentionCase) -> None:
        nonlocal backend
        backend = next(now)
        if backend == "CUDNN_ATTENTION":
            raise RuntimeError("No available kernel.")

    def measured(case: AttentionCase, attend: Any, modes: tuple[str, ...] = gpu.MODES) -> Any:
        bare = attend.__name__ == "bare"
        return {mode: {"median_ms": 0.1 if bare else milliseconds[backend]} for mode in modes}

    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(gpu, "check_softmax", check_softmax)
    row = gpu.softmax_row(small(), backends)
    assert list(row["not_run"]) == ["CUDNN_ATTENTION"]
    assert "No available kernel" in row["not_run"]["CUDNN_ATTENTION"]
    both = {"forward", "training"}
    assert {name: set(times) for name, times in row["functions"].items()} == {
        "FLASH_ATTENTION": both,
        "FLASH_ATTENTION bare": both,
        "EFFICIENT_ATTENTION": both,
        "EFFICIENT_ATTENTION bare": both,
        "OVERRIDEABLE": {"forward"},
    }


def test_speedups_are_over_the_fastest_with_and_without_the_rest_of_the_equation() -> None:
    def times(forward: float, training: float) -> dict[str, Any]:
        return {"forward": {"median_ms": forward}, "training": {"median_ms": training}}

    functions = {"flash": times(8, 20), "cudnn": times(6, 30), "cudnn bare": times(4, 25)}
    functions["efficient"] = {"forward": {"median_ms": 50}}
    assert gpu.speedups(functions, times(2, 10)) == {
        "forward x": 3, "training x": 2, "bare forward x": 2, "bare training x": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ([0.5, 1.2, 3.0], 512),
        ([1.5, 1.2, 3.0], 256),
        ([1.5, 0.9, 3.0], 1024),
        ([1.5, 1.2, 1.0], None),
        ([1.5, None, 3.0], 1024),
        ([1.5, 1.2, None], None),
        ([], None),
    ],
)
def test_the_length_from_which_on_linrope_is_faster(ratios: list[float | None], length: int | None) -> None:
    rows = [
        {"shape": [8, n, 16, 64]} | ({} if ratio is None else {"speedups": {"forward x": ratio}})
        for n, ratio in zip((256, 512, 1024), ratios)
    ]
    assert gpu.overtaking(rows, "forward x") == length


def test_what_is_over_the_budget_is_skipped_and_a_failure_stops_no_other_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def row_of(section: str, shape: tuple[int, ...]) -> dict[str, Any]:
        nonlocal now
        now += 10
        if shape[1] == 2:
            raise RuntimeError("broken")
        return {"forward_ms": 1.0}

    monkeypatch.setattr(gpu.time, "monotonic", lambda: now)
    result = {"ceilings": {}, "overtakes": {}}
    gpu.measure(result, "linrope", [(1, n, 1, 1) for n in range(1, 6)], row_of, end=35)
    assert [sorted(row.keys() - {"shape"}) for row in result["linrope"]] == [
        ["forward_ms"], ["failure"], ["forward_ms"], ["skipped"], ["skipped"],
    ]  # fmt: skip
    lines = gpu.table(result).splitlines()
    assert "1" in lines[1]
    assert "broken" in lines[2]
    assert "over the budget" in lines[4]


# flash-linear-attention, which need not be there


def fake_fla(monkeypatch: pytest.MonkeyPatch, turn: float = 1.0) -> None:
    """Its functions, as far as they are used, in PyTorch."""

    def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None] * turn
        return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)

    def chunk_linear_attn(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, normalize: bool = True
    ) -> tuple[Tensor, None]:
        assert not normalize
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = linear_rope_attention(
            q.float(), k.float(), v.float(), feature_map=None, normalize=False, backend="eager"
        )
        return (scale * out).to(v.dtype), None

    def normalize_with_z_state(
        o: Tensor, q: Tensor, k: Tensor, scale: float, z_init: None, reverse: bool, cu_seqlens: None
    ) -> tuple[Tensor, Tensor]:
        total = k.float().cumsum(1)
        return o / (scale * q * total).sum(-1, keepdim=True).to(o.dtype), total[:, -1:]

    modules: dict[str, Any] = {
        "fla": {"__version__": "0"},
        "fla.modules": {},
        "fla.modules.rotary": {"rotary_embedding": rotary_embedding},
        "fla.ops": {},
        "fla.ops.linear_attn": {"chunk_linear_attn": chunk_linear_attn},
        "fla.ops.linear_attn.utils": {"normalize_with_z_state": normalize_with_z_state},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def test_its_route_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla(monkeypatch)
    row = gpu.fla_row(small(20))
    assert row["not_run"] == {}
    assert {name: times.keys() for name, times in row["functions"].items()} == {
        "route": {"forward", "training"},
        "bare": {"forward", "training"},
    }


def test_another_function_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla(monkeypatch, turn=0.5)
    row = gpu.fla_row(small(20))
    assert row["functions"] == {}
    assert "its route is off" in row["not_run"]["fla"]


def test_without_it_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    row = gpu.fla_row(small(20))
    assert row["functions"] == {}
    assert "not installed" in row["not_run"]["fla"]


# All of it


@pytest.mark.long
def test_the_whole_script_writes_every_field_and_prints_a_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    interpret = "0" if DEVICE == "cuda" else "1"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRITON_INTERPRET": interpret}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", DEVICE, "--tiny"]
    done = subprocess.run(
        [*command, "--out", str(path), "--commit", "abc"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout) < 6000

    result = json.loads(path.read_text())
    assert result["machine"].keys() >= {"device", "python", "torch", "triton", "linrope", "commit", "cpu"}
    assert result["machine"]["commit"] == "abc"
    assert result["ceilings"].keys() == {"copy", "product"}
    for times in result["ceilings"].values():
        assert times.keys() == TIMES | {"rate", "unit"}
    assert result.keys() == {"machine", "date", "ceilings", "overtakes", *gpu.SECTIONS}
    (own,) = result["linrope"]
    assert own.keys() >= {"shape", "errors", "forward", "training", "forward_floor", "backward_floor"}
    assert own["forward"].keys() == TIMES
    (gated,), (host,) = result["gated"], result["host"]
    assert gated["functions"].keys() >= {"linrope", "linrope bare"}
    assert gated["not_run"].keys() <= {"simple_gla", "mamba SSD"}
    assert host.keys() >= {"forward host us", "training host us"}
    assert [row["shape"][1] for row in result["overtaking"]] == [16, 32]
    for row in (*result["overtaking"], *result["softmax"]):
        assert row["speedups"].keys() == set(gpu.SPEEDUPS)
    assert result["overtakes"].keys() == set(gpu.SPEEDUPS)
    (step,) = result["decode"]
    assert step.keys() >= {"layers", "eager", "eager tokens/s", "eager floor"}
    for section in gpu.SECTIONS:
        assert f"\n{section} " in done.stdout
    assert "linrope overtakes softmax attention" in done.stdout


def test_wrong_kernels_are_not_timed_and_the_exit_status_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*args: Any, backend: str, **how: Any) -> Tensor:
        wrong = backend == "triton"
        out = linear_rope_attention(*args, backend="eager" if wrong else backend, **how)
        return out * 1.1 if wrong else out

    monkeypatch.setattr(gpu, "linear_rope_attention", call)
    path = tmp_path / "gpu.json"
    arguments = ["--device", DEVICE, "--tiny", "--out", str(path), "--only", "linrope", "softmax"]
    assert gpu.main(arguments) == 1
    (row,) = json.loads(path.read_text())["linrope"]
    assert row.keys() == {"shape", "failure"}
    assert "is off" in capsys.readouterr().out


def test_without_time_nothing_is_measured_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main(["--device", DEVICE, "--tiny", "--out", str(path), "--budget", "0"]) == 0
    result = json.loads(path.read_text())
    assert all("skipped" in row for section in gpu.SECTIONS for row in result[section])
    assert capsys.readouterr().out.count("over the budget") == len(gpu.SECTIONS) + 1
