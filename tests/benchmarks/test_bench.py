"""linrope bench: options, checks, files; the times themselves are nobody's test."""

import json
import re
import statistics
import sys
import types
from typing import Any

import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.bench import families
from benchmarks.bench.cases import AttentionCase, Case, DecodeCase
from benchmarks.bench.peers import peers_of
from benchmarks.bench.report import noise_warning
from benchmarks.bench.rows import Effort, attention_row, overtaking
from benchmarks.measuring import measured
from linrope import backends
from linrope.layer.options import DECAYS

FAST = "--budget 0.01 --rounds 1 --out {tmp} "


def _softmax_fails_in_bfloat16() -> bool:
    """PyTorch 2.13's own kernel raises if ATEN_CPU_CAPABILITY hides the AVX-512 of a CPU that has AMX."""
    x = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError as error:
        return "avx512" in str(error)
    return False


needs_softmax_in_bfloat16 = pytest.mark.skipif(
    _softmax_fails_in_bfloat16(), reason="PyTorch's softmax attention fails under this ATEN_CPU_CAPABILITY"
)


@needs_softmax_in_bfloat16
def test_bench_writes_what_it_prints_and_overwrites_nothing(run, refused, tmp_path, monkeypatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plt, "close", figures.append)
    monkeypatch.setattr("linrope.cli.training._SECONDS", 0.0)  # a pipe gets a line per stage
    printed = run(f"bench {FAST} --lengths 32,64 --decode-at 64,128")
    monkeypatch.undo()
    assert "softmax tok/s" in printed
    stages = re.findall(r"^measuring (.+)$", printed, re.MULTILINE)
    assert stages == ["N = 32", "N = 64", "extra costs", "decoding"]
    (first,) = tmp_path.glob("*.json")
    result, before = json.loads(first.read_text()), first.read_bytes()
    assert [row["n"] for row in result["attention"]] == [32, 64]
    assert [row["position"] for row in result["decode"]] == [64, 128]
    assert result["case"]["dtype"] == "float32"
    assert set(result["costs"]["forward"]) >= {"decay", "bfloat16"}
    assert first.with_suffix(".png").stat().st_size > 10_000

    lines = [line.split() for line in printed.splitlines()]
    (row,) = (line for line in lines if line[:1] == ["128"] and len(line) == 10)
    assert next(line for line in lines if line[:1] == ["after"])[-4:] == ["layer", "layer", "ratio", "±"]
    (figure,) = figures
    assert f"linrope: {row[8]}" in [text.get_text() for text in figure.axes[2].texts]
    plt.close(figure)
    assert "layer (as in the plot)" in printed
    assert "after 128 tokens a key/value cache takes 0.5 MB, linrope's state 0.1 MB\n" in printed

    options = "--lengths 40,100 --dim 16 --heads 4 --kv-heads 2 --batch 2 --dtype bfloat16 --backend eager"
    run(f"bench {FAST} {options} --feature-map relu --decay spread --gates --decode-at ''")
    (second,) = set(tmp_path.glob("*.json")) - {first}
    assert first.read_bytes() == before
    assert second.name == f"{first.stem}-2.json"
    result = json.loads(second.read_text())
    assert [row["n"] for row in result["attention"]] == [40, 100]
    assert result["decode"] == []
    assert result["case"] == {
        "batch": 2, "heads": 4, "dim": 16, "device": "cpu", "dtype": "bfloat16", "kv_heads": 2,
        "feature_map": "relu", "decay": "spread", "gates": True, "backend": "eager",
    }  # fmt: skip

    assert "1.00x" in (same := run(f"bench --compare {first} {first}"))
    assert "differs" not in same
    assert "no length and no position in common" in refused(f"bench --compare {first} {second}")


def test_the_help_lists_all_names_that_an_option_takes(run) -> None:
    # The texts are written out, since the modules that define the names import PyTorch.
    names = {*DECAYS, *(set(backends.NAMES) - {"onnx"}), *map(str, families.LENGTHS)}
    assert names <= set(re.findall(r"[\w-]+", re.sub(r"-\s+", "-", run("bench --help"))))


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ("--max-length 256", [256]),
        ("--max-length 4096", [256, 1024, 4096]),
        ("", [256, 1024, 16384, 65536]),
        ("--lengths 40,100", [100]),
        ("--max-length 256 --decode-at 7,1048576", [7, 1048576]),
    ],
)
def test_without_decode_at_no_step_comes_after_the_longest_length(
    options: str, positions: list[int], run, monkeypatch
) -> None:
    chosen: list[list[int]] = []
    monkeypatch.setattr("benchmarks.bench.run.measure", lambda case, lengths, at, *_: chosen.append(at))
    run(f"bench {options}")
    assert chosen == [positions]


def test_comparing_says_what_differs(run, refused, tmp_path) -> None:
    times = {"linrope_seconds": 2.0, "softmax_seconds": None}
    result = {"machine": {"cpu": "one"}, "attention": [{"n": 64, "forward": times, "training": times}]}
    faster = json.loads(json.dumps(result).replace("2.0", "0.5").replace("one", "other"))
    for name, content in (("a", result), ("b", faster), ("c", {"machine": {}, "attention": [3]}), ("d", [])):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    printed = run("bench --compare {tmp}/a.json {tmp}/b.json")
    assert "differs: cpu: one, other" in printed
    assert "4.00x" in printed
    for wrong in ("/c.json", "/d.json", ""):
        refused("bench --compare {tmp}/a.json {tmp}" + wrong)


WRONG = {
    "--max-length 1000": "--max-length=1000",
    "--lengths 0,5": "--lengths='0,5'",
    "--lengths ' '": "--lengths=' '",
    "--decode-at 1k": "--decode-at='1k'",
    "--decode-at 2147483000": "--decode-at=",
    "--positions 64": "--positions=64: expected --decode-at=64",
    "--dtype float64": "--dtype='float64'",
    "--heads 0": "--heads=0",
    "--kv-heads 3": "--kv-heads=3: expected a divisor of --heads=8",
    "--feature-map performer": "--feature-map='performer'",
    "--decay fast": "--decay='fast'",
    "--backend cuda": "--backend='cuda'",
    "--budget 0": "--budget=0.0: expected a positive number",
    "--rounds 0": "--rounds=0: expected at least 1",
    "--distributed x --rounds 2": "--rounds has no effect with --distributed; expected only",
    "--transformers x --heads 4": "--heads has no effect with --transformers;",
    "--transformers mamba2 --dtype float8": "--dtype='float8': expected one of float32, bfloat16, float16",
    "--transformers mamba": "--transformers='mamba': expected one of bailing_hybrid, bamba",
    "--transformers mamba2 --threads -1": "--threads=-1: expected at least 0",
    "--compare a b": "--out has no effect with --compare; expected no other option",
    "--device tpu9": "--device=tpu9",
    "--out {text}/new": "text.txt is a file, expected a folder",
}


@pytest.mark.parametrize(("options", "cause"), WRONG.items(), ids=WRONG)
def test_wrong_options_are_named(options: str, cause: str, refused) -> None:
    assert cause in refused("bench --out {tmp} " + options)


CASES: list[Any] = [
    {},
    pytest.param({"dtype": torch.bfloat16, "batch": 2}, marks=needs_softmax_in_bfloat16),
    {"dtype": torch.float16, "kv_heads": 1},
    {"decay": "spread", "gates": True, "kv_heads": 2},
    {"feature_map": "favor+", "gates": True},
    {"feature_map": "hedgehog", "decay": "retnet"},
    {"feature_map": "silu"},
    {"backend": "reference"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_option_is_checked_against_float64(options: dict[str, Any]) -> None:
    case = Case(**{"heads": 4, "dim": 16, **options})
    attention, step = AttentionCase(70, **vars(case)), DecodeCase(90, **vars(case))
    attention.check()
    attention.check_softmax()
    step.check()
    step.fill_cache()
    step.check_softmax()

    def off(attend: Any) -> Any:
        def other() -> Tensor:
            changed: Tensor = attend().clone()
            changed[-1, -1, 1] *= 1.25  # one head of the last token
            return changed

        return other

    with pytest.raises(AssertionError, match="out is off at N = 70"):
        attention.check(off(attention.linrope))
    step.linrope = off(step.linrope)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="the step is off"):
        step.check()


@pytest.mark.parametrize(
    ("ratios", "length"),
    [([0.5, 2, 3], 2), ([2, 0.5, 3, None], 3), ([0.5, None], None), ([2, None, None], 1), ([None], None)],
)
def test_linrope_overtakes_at_a_measured_length(ratios: list[float | None], length: int | None) -> None:
    rows = [{"n": n, "forward": {"ratio": ratio}} for n, ratio in enumerate(ratios, 1)]
    assert overtaking(rows, "forward") == length


@pytest.mark.parametrize(("index", "label"), list(enumerate(("dq", "dk", "dv", "dlog_decay"))))
def test_a_wrong_gradient_is_seen(index: int, label: str) -> None:
    case = AttentionCase(70, heads=2, dim=16, gates=True)
    right = case.training

    def wrong(attend: Any) -> tuple[Tensor, ...]:
        grads = list(right(attend))
        grads[index] = grads[index] * 1.01
        return tuple(grads)

    case.training = wrong  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=f"{label} is off"):
        case.check()


def test_a_single_thread_s_times_are_minima_and_others_medians(monkeypatch) -> None:
    for threads, clock, expected in ((1, "thread_time", 1.0), (2, "perf_counter", 2.0)):
        now = iter([0.0, *(x for pair in ((0.0, 1.0), (1.0, 3.0), (3.0, 6.0)) for x in pair)])
        monkeypatch.setattr(f"benchmarks.measuring.time.{clock}", lambda now=now: next(now))
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert measured({"": lambda: None}, rounds=1, budget=6.0)[""].seconds == expected


ROUNDS = {
    "quartiles of 1.75 and 2.25, so no further rounds": ([2, 2, 1, 3], 0.125),
    "half of them thrice as slow, which further ones do not change": ([1, 3, 1, 3, 1, 3, 1, 3], 0.5),
    "one slow one of four, which does not count with further ones": ([1, 1, 9, 1, 1, 1, 1, 1], 0.0),
}


@pytest.mark.parametrize(("sixteenths", "noise"), ROUNDS.values(), ids=ROUNDS)
def test_rounds_that_differ_are_measured_again_and_have_noise(
    sixteenths: list[int], noise: float, monkeypatch
) -> None:
    # A warm-up comes before each round.
    now, calls = 0.0, iter([x / 16 for count in sixteenths for x in (0, count)])

    def function() -> None:
        nonlocal now
        now += next(calls)

    monkeypatch.setattr("benchmarks.measuring.time.perf_counter", lambda: now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (timing,) = measured({"": function}, rounds=4, budget=0.0).values()
    assert timing == (statistics.median(sixteenths) / 16, noise)
    assert next(calls, None) is None


def test_noise_is_named_and_calm_rounds_are_not() -> None:
    assert noise_warning({"forward at 64": 0.1}) == []
    (line,) = noise_warning({"forward at 64": 0.1, "matmul at 64": 0.5, "forward at 128": 3.0})
    assert "forward at 128 ±300%, matmul at 64 ±50%." in line
    assert "forward at 64" not in line


def test_softmax_attention_is_left_out_where_it_takes_too_long() -> None:
    case = Case(heads=2, dim=16)
    row, _ = attention_row(case, 2048, None, Effort(0.0, 0.01, 1))
    assert row["forward"]["softmax_seconds"] is row["training"]["ratio"] is None


def test_peers_that_are_not_there_or_wrong_are_named(monkeypatch) -> None:
    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k).tril()
        return (scores / scores.sum(-1, keepdim=True)) @ v

    module: Any = types.ModuleType("performer_pytorch.performer_pytorch")
    for name in ("performer_pytorch", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    module.causal_linear_attention_noncuda = right
    case = AttentionCase(70, heads=2, dim=16, gates=True)  # peers go without gates
    found, reasons = peers_of(case)
    assert list(found) == ["performer-pytorch"]
    assert reasons == {"fast-transformers": "not installed"}
    module.causal_linear_attention_noncuda = lambda q, k, v: 2 * right(q, k, v)
    found, reasons = peers_of(case)
    assert found == {}
    assert "performer-pytorch: out is off at N = 70" in reasons["performer-pytorch"]
    _, reasons = peers_of(AttentionCase(70, heads=2, dim=16, kv_heads=1))
    assert reasons["performer-pytorch"] == "does not support grouped heads"
