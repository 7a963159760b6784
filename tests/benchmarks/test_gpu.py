"""benchmarks/gpu.py without a GPU: what it counts, checks, skips and writes, and once all of it."""

import json
import os
import subprocess
import sys
from functools import partial
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu
from linrope import Rotary, linear_rope_attention
from linrope.cli.bench.cases import AttentionCase

ROOT = Path(__file__).parents[2]
DEVICE = torch.get_default_device().type
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TIMES = {"median_ms", "min_ms", "max_ms", "runs"}


def small(n: int = 70) -> AttentionCase:
    return AttentionCase(n, 2, 2, 16, DEVICE, DTYPE)


def right(case: AttentionCase, **how: Any) -> Tensor:
    return linear_rope_attention(*case.inputs, **({"rotary": case.rotary, "backend": "eager"} | how))


def median(**milliseconds: float) -> dict[str, Any]:
    """Times in the form in which gpu.py stores them."""
    return {mode: {"median_ms": x} for mode, x in milliseconds.items()}


def test_the_floor() -> None:
    assert gpu.floor_bytes(64, 64) == {"forward": 512, "backward": 1420, "step": 32768}
    assert gpu.floor_bytes(128, 128) == {"forward": 1024, "backward": 2828, "step": 131072}


def test_fractions_of_the_floor_are_the_floor_s_time_over_the_measured_one(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "measured", lambda *_: median(forward=2, training=5))
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
        (partial(off, index=(-1, 0, -1, 0), plus=4 * gpu.TOLERANCE[DTYPE]), "times the bound"),
    "not finite, in a head that is not compared": (partial(off, index=np.s_[:, :, 0], times=nan), "not finite"),
    **{x: (partial(wrong_gradient, which=i), f"{x} is off") for i, x in enumerate(("dq", "dk", "dv"))},
}  # fmt: skip


@pytest.mark.parametrize(("attend", "why"), WRONG.values(), ids=WRONG)
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
def test_a_wrong_decoding_step_does_not_pass(wrong: str, monkeypatch) -> None:
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


def test_a_backend_that_does_not_run_is_noted_and_a_slow_one_not_followed_up(monkeypatch) -> None:
    backends = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "OVERRIDEABLE")
    milliseconds = {"FLASH_ATTENTION": 1.0, "EFFICIENT_ATTENTION": 1.9, "OVERRIDEABLE": 2.1}
    seen: list[str] = []

    def check_softmax(case: AttentionCase) -> None:
        seen.append(backends[len(seen)])
        if seen[-1] == "CUDNN_ATTENTION":
            raise RuntimeError("No available kernel.")

    def measured(case: AttentionCase, attend: Any, modes: tuple[str, ...] = gpu.MODES) -> Any:
        return median(**dict.fromkeys(modes, 0.1 if attend.__name__ == "bare" else milliseconds[seen[-1]]))

    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(gpu, "check_softmax", check_softmax)
    row = gpu.softmax_row(small(), backends)
    assert list(row["not_run"]) == ["CUDNN_ATTENTION"]
    assert "No available kernel" in row["not_run"]["CUDNN_ATTENTION"]
    fast = ("FLASH_ATTENTION", "FLASH_ATTENTION bare", "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION bare")
    expected = {name: {"forward", "training"} for name in fast} | {"OVERRIDEABLE": {"forward"}}
    assert {name: set(times) for name, times in row["functions"].items()} == expected


def test_speedups_are_over_the_fastest_with_and_without_the_rest_of_the_equation() -> None:
    functions = {
        "flash": median(forward=8, training=20), "cudnn": median(forward=6, training=30),
        "cudnn bare": median(forward=4, training=25), "efficient": median(forward=50),
    }  # fmt: skip
    expected = {"forward x": 3, "training x": 2, "bare forward x": 2, "bare training x": 2.5}
    assert gpu.speedups(functions, median(forward=2, training=10)) == expected


def test_the_length_from_which_on_linrope_is_faster() -> None:
    for ratios, length in (
        ([0.5, 1.2, 3.0], 512), ([1.5, 1.2, 3.0], 256), ([1.5, 0.9, 3.0], 1024), ([1.5, 1.2, 1.0], None),
        ([1.5, None, 3.0], 1024), ([1.5, 1.2, None], None), ([], None),
    ):  # fmt: skip
        rows: list[dict[str, Any]] = [
            {"shape": [8, n, 16, 64]} | ({} if ratio is None else {"speedups": {"forward x": ratio}})
            for n, ratio in zip((256, 512, 1024), ratios)
        ]
        assert gpu.overtaking(rows, "forward x") == length, ratios


def test_what_is_over_the_budget_is_skipped_and_a_failure_stops_no_other_case(monkeypatch) -> None:
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
    assert all(text in lines[i] for i, text in {1: "1", 2: "broken", 4: "over the budget"}.items())


# flash-linear-attention, which need not be there


def fake_fla(monkeypatch: pytest.MonkeyPatch, turn: float = 1.0) -> None:
    """Its functions, as far as they are used, in PyTorch."""

    def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None] * turn
        return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)

    def chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: Any = None, normalize: bool = True) -> Any:
        assert not normalize
        scale, wide = q.shape[-1] ** -0.5 if scale is None else scale, (x.float() for x in (q, k, v))
        out = linear_rope_attention(*wide, feature_map=None, normalize=False, backend="eager")
        return (scale * out).to(v.dtype), None

    def normalize_with_z_state(
        o: Tensor, q: Tensor, k: Tensor, scale: float, z_init: None, reverse: bool, cu_seqlens: None
    ) -> Any:
        total = k.float().cumsum(1)
        return o / (scale * q * total).sum(-1, keepdim=True).to(o.dtype), total[:, -1:]

    modules: dict[str, dict[str, Any]] = {
        "fla": {"__version__": "0"}, "fla.modules": {}, "fla.ops": {},
        "fla.modules.rotary": {"rotary_embedding": rotary_embedding},
        "fla.ops.linear_attn": {"chunk_linear_attn": chunk_linear_attn},
        "fla.ops.linear_attn.utils": {"normalize_with_z_state": normalize_with_z_state},
    }  # fmt: skip
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def test_its_route_is_the_same_function(monkeypatch) -> None:
    fake_fla(monkeypatch)
    row = gpu.fla_row(small(20))
    assert row["not_run"] == {}
    found = {name: times.keys() for name, times in row["functions"].items()}
    assert found == {name: {"forward", "training"} for name in ("route", "bare")}


def test_another_function_and_none_are_not_timed(monkeypatch) -> None:
    fake_fla(monkeypatch, turn=0.5)
    another = gpu.fla_row(small(20))
    monkeypatch.setitem(sys.modules, "fla", None)
    for row, why in ((another, "its route is off"), (gpu.fla_row(small(20)), "not installed")):
        assert row["functions"] == {}
        assert why in row["not_run"]["fla"]


# All of it


@pytest.mark.long
def test_the_whole_script_writes_every_field_and_prints_a_table(tmp_path) -> None:
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
    assert result.keys() == {"machine", "date", "ceilings", "overtakes", *gpu.SECTIONS}
    assert result["machine"].keys() >= {"device", "python", "torch", "triton", "linrope", "commit", "cpu"}
    assert result["machine"]["commit"] == "abc"
    assert result["ceilings"].keys() == {"copy", "product"}
    assert all(times.keys() == TIMES | {"rate", "unit"} for times in result["ceilings"].values())
    keys = {
        "linrope": {"shape", "errors", "forward", "training", "forward_floor", "backward_floor"},
        "gated": {"functions", "not_run"},
        "host": {"forward host us", "training host us"},
        "model": {"functions", "errors", "forward x", "training x"},
        "decode": {"layers", "eager", "eager tokens/s", "eager floor"},
    }
    rows = {name: row for name in keys for (row,) in [result[name]]}
    assert all(row.keys() >= keys[name] for name, row in rows.items()), rows
    assert rows["linrope"]["forward"].keys() == TIMES
    assert rows["gated"]["functions"].keys() >= {"linrope", "linrope bare"}
    assert rows["gated"]["not_run"].keys() <= {"simple_gla", "mamba SSD"}
    assert [row["shape"][1] for row in result["overtaking"]] == [16, 32]
    faster = (*(row["speedups"] for row in (*result["overtaking"], *result["softmax"])), result["overtakes"])
    assert all(x.keys() == set(gpu.speedup_names(DEVICE)) for x in faster)
    headings = (*(f"\n{section} " for section in gpu.SECTIONS), "linrope overtakes softmax attention")
    assert all(heading in done.stdout for heading in headings)


def test_wrong_kernels_are_not_timed_and_the_exit_status_is_1(tmp_path, monkeypatch, capsys) -> None:
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


def test_without_time_nothing_is_measured_and_that_is_said(tmp_path, capsys) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main(["--device", DEVICE, "--tiny", "--out", str(path), "--budget", "0"]) == 0
    result = json.loads(path.read_text())
    assert all("skipped" in row for section in gpu.SECTIONS for row in result[section])
    assert capsys.readouterr().out.count("over the budget") == len(gpu.SECTIONS) + 1
