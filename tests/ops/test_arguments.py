"""The checks that calls which are alike share: whatever a check looks at is noticed when it changes."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from linrope.backends import library
from linrope.operation import plan
from linrope.ops import arguments, convolve, convolve_parts, gated_norm, gates, norm
from tests.ops.cases import needs_native, numbers, with_gaps

X, OUT = numbers(2, 9, 6), numbers(2, 9, 4, 5)
CUTS = torch.tensor([0, 4, 9])
Run = Callable[..., Any]
GOOD: dict[str, tuple[Run, dict[str, Any]]] = {
    "convolve": (convolve, {"x": X, "weight": numbers(6, 4), "bias": numbers(6), "before": numbers(2, 3, 6)}),
    "packed": (convolve, {"x": X[:1], "weight": numbers(6, 4), "cu_seqlens": CUTS}),
    "parts": (convolve_parts, {"parts": (X, X), "weight": numbers(12, 1, 4)}),
    "gated_norm": (
        gated_norm,
        {"out": OUT, "weight": numbers(5), "gate": numbers(2, 9, 20), "v": OUT[:, :, :2], "skip": numbers(4)},
    ),
    "gates": (gates, {"x": X, "weight": numbers(3, 6), "bias": numbers(3)}),
}
# What changes, and the words of the error
CHANGES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "convolve": [
        ({"x": numbers(2, 9, 5)}, r"^weight: got shape"),
        ({"x": numbers(2, 8, 6)[0]}, r"^x: got shape \(8, 6\)"),
        ({"x": X.long()}, r"^x: got torch\.int64"),
        ({"x": X.to_sparse()}, r"^x: got torch\.sparse_coo"),
        ({"x": X.tolist()}, r"^x: got list"),
        ({"weight": numbers(6, 3)}, r"^before: got shape \(2, 3, 6\), expected \(2, 2, 6\)"),
        ({"weight": numbers(6, 4).to("meta")}, "^weight: got device meta"),
        ({"weight": numbers(6, 9), "before": None, "backend": "native"}, "9 taps"),
        ({"bias": numbers(5)}, r"^bias: got shape \(5,\)"),
        ({"before": numbers(3, 3, 6)}, r"^before: got shape \(3, 3, 6\)"),
        ({"before": numbers(2, 3, 6).bool()}, r"^before: got torch\.bool"),
        ({"backend": "fast"}, "^backend='fast'"),
        ({"backend": ["auto"]}, "^backend="),
        ({"cu_seqlens": CUTS}, "^cu_seqlens: got batch 2"),
        ({"x": X.double(), "backend": "native"}, "cannot run: float64"),
    ],
    "packed": [
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, r"^cu_seqlens: got \[0, 4, 8\]"),
        ({"cu_seqlens": CUTS.float()}, r"^cu_seqlens: got torch\.float32"),
        ({"cu_seqlens": [0, 4, 9]}, "^cu_seqlens: got list"),
        ({"before": numbers(1, 3, 6)}, r"^before: got shape \(1, 3, 6\), expected \(2, 3, 6\)"),
    ],
    "parts": [
        ({"parts": (X, X, X, X)}, "^parts: got 4"),
        ({"parts": ()}, "^parts: got none"),
        ({"parts": (X,)}, "^weight: got shape"),
        ({"parts": (X, X[:, :8])}, "^x: got shape"),
    ],
    "gated_norm": [
        ({"out": OUT[0]}, "^out: got shape"),
        ({"weight": numbers(4)}, r"^weight: got shape \(4,\)"),
        ({"eps": -1.0}, r"^eps=-1\.0"),
        ({"over": "all"}, r"^weight: got shape \(5,\), expected \(20,\)"),
        ({"over": "none"}, "^over="),
        ({"gate": numbers(2, 9, 19)}, r"^gate: got shape \(2, 9, 19\)"),
        ({"gate_order": "first"}, "^gate_order="),
        ({"gate_activation": "relu"}, "^gate_activation="),
        ({"v": None}, "^v, skip: got skip alone"),
        ({"v": OUT[:, :, :3]}, "^v: got 3 heads"),
        ({"skip": numbers(3)}, "^skip: got shape"),
        ({"skip_order": 0}, "^skip_order="),
    ],
    "gates": [
        ({"weight": numbers(3, 5)}, "^weight: got shape"),
        ({"bias": numbers(2)}, "^bias: got shape"),
        ({"activation": "tanh"}, "^activation="),
        ({"backend": "native"}, "^backend="),
        ({"x": X[0]}, "^x: got shape"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [(name, *x) for name, changes in CHANGES.items() for x in changes],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_what_no_longer_fits_is_refused_after_a_call_that_fitted(name: str, change: dict, words: str) -> None:
    run, good = GOOD[name]
    run(**good)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        run(**(good | change))


@needs_native
def test_a_backend_that_can_no_longer_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, good = GOOD["convolve"]
    run(**good, backend="native")
    monkeypatch.setattr(library, "WHY_NOT", "not built")
    with pytest.raises(RuntimeError, match="cannot run: not built"):
        run(**good, backend="native")


def test_calls_that_differ_in_their_numbers_alone_are_checked_once_until_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for run, good in GOOD.values():
        run(**good)
    for operator in ("convolution", "norm", "gates"):
        # A check would call it
        monkeypatch.delattr(sys.modules[f"linrope.ops.{operator}"], "choose")
    for run, good in GOOD.values():
        run(**{name: 2 * x if name in ("x", "out") else x for name, x in good.items()})
    plan.forget_plans()
    for run, good in GOOD.values():
        with pytest.raises(NameError, match="choose"):
            run(**good)


def test_the_number_of_kept_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_PLANS", 3)
    for n in range(1, 9):
        assert convolve(X[:, :n], numbers(6, 4)).shape == (2, n, 6)
    assert len(plan.PLANS) <= 3


# What a call may change without an error: every argument, and what its kernel reads of it
HALF, WIDE = torch.bfloat16, torch.float64
OTHERS: dict[str, list[dict[str, Any]]] = {
    "convolve": [
        *({"x": x} for x in (with_gaps(X), X.to(HALF), X.double(), X.clone().requires_grad_())),
        *({"weight": x} for x in (numbers(6, 1, 4), numbers(4, 6).T, numbers(6, 4).to(HALF), numbers(6, 4).double())),
        *({"bias": x} for x in (None, with_gaps(numbers(6)), numbers(6).requires_grad_())),
        *({"before": x} for x in (None, with_gaps(numbers(2, 3, 6)), numbers(2, 3, 6).to(HALF))),
        {"weight": numbers(6, 3), "before": None}, {"silu": True}, {"backend": "eager"},
    ],
    "packed": [
        *({"cu_seqlens": x} for x in (None, CUTS.int(), with_gaps(CUTS), torch.tensor([0, 5, 9]))),
        {"cu_seqlens": None, "x": X},
    ],
    "parts": [
        {"parts": (X[..., :5], numbers(2, 9, 7))}, {"parts": (numbers(2, 9, 12),)}, {"parts": (X, with_gaps(X))},
        {"parts": (X, X.clone().requires_grad_())}, {"parts": (X[:, :4], X[:, :4])},
    ],
    "gated_norm": [
        *({"out": x} for x in (with_gaps(OUT), OUT.to(HALF), OUT.double(), OUT.clone().requires_grad_())),
        *({"weight": x} for x in (None, numbers(4, 5), numbers(5, 4).T, numbers(5).to(HALF))),
        *({"gate": x} for x in (None, with_gaps(numbers(2, 9, 20)), numbers(2, 9, 20).to(HALF))),
        *({"v": x} for x in (OUT[:, :, :1], with_gaps(OUT), OUT[:, :, :2].to(HALF))),
        *({"skip": x} for x in (numbers(4).to(HALF), numbers(4).requires_grad_())),
        {"v": None, "skip": None}, {"over": "all", "weight": numbers(20)},
        {"eps": 0.5}, {"gate_order": "before"}, {"skip_order": "before"}, {"gate_activation": "sigmoid"},
        {"backend": "eager"},
    ],
    "gates": [
        {"x": X.double()}, {"weight": numbers(3, 6).to(HALF)}, {"bias": numbers(3).requires_grad_()},
        {"activation": "sigmoid"}, {"backend": "eager"},
    ],
}  # fmt: skip
# Calls that are alike in all but this, from the same tensors
SURROUNDINGS = {
    "as usual": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "forward mode": forward_ad.dual_level,
}


def outcome(run: Run, call: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The results and what else a caller sees of them."""
    results = run(**call)
    results = [results] if isinstance(results, torch.Tensor) else results
    return [(x.detach().tolist(), x.dtype, x.requires_grad, x.is_inference()) for x in results]


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_serves_no_call_that_differs_in_anything(name: str) -> None:
    run, good = GOOD[name]
    calls = [good, *(good | change for change in OTHERS[name])]
    for first, second in [*product(calls[:1], calls), *product(calls, calls[:1])]:
        for surroundings in SURROUNDINGS.values():
            plan.forget_plans()
            with surroundings():
                expected = outcome(run, second)
            plan.forget_plans()
            run(**first)
            with surroundings():
                assert outcome(run, second) == expected
                assert outcome(run, second) == expected


@needs_native
def test_a_call_whose_strides_the_kernel_refuses_changes_no_other_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, fits = torch.ones(1, 3, 2, 8), []

    def run_as_is(*x: Any) -> Any:
        fits.append((y := arguments.run_as_is(*x)) is not None)
        return y

    monkeypatch.setattr(norm, "run_as_is", run_as_is)
    for x in (out.mT.contiguous().mT, out) * 2:
        gated_norm(x)
    assert fits == [False, True, False, True]
