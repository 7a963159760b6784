"""The comparison of the kernels with plain PyTorch at their first use, where they have not been tested."""

import warnings

import pytest
import torch

from linrope import LinearRoPEAttention, backends
from linrope.backends import library, native
from linrope.first_use import difference
from linrope.operation.plan import forget_plans

pytestmark = pytest.mark.skipif(library.WHY_NOT is not None, reason="needs the native library")
OPERATORS = (
    "forward", "backward", "step", "convolve", "convolve_backward", "gated_norm", "gated_norm_backward", "mixer_step",
)  # fmt: skip


def spoil(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    """Changes some numbers of the operator's results by a tenth."""
    run = library.run

    def wrong(name, *arguments, **named):
        results = run(name, *arguments, **named)
        if name == operator:
            for x in (results,) if isinstance(results, torch.Tensor) else results:
                if x is not None:  # a result that was not wanted
                    x[..., ::3] *= 1.1
        return results

    monkeypatch.setattr(library, "run", wrong)


@pytest.mark.parametrize("name", native.instruction_sets())
def test_good_kernels_agree_in_any_mode_and_random_numbers_stay(name: str) -> None:
    before = torch.get_rng_state()
    native.use_instruction_set(name)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert difference() is None
    torch.set_default_dtype(torch.float64)
    assert difference() is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_kernel_is_seen(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, operator)
    assert "is off by" in str(difference())


def test_a_wrong_kernel_is_not_used_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = LinearRoPEAttention.block(32, 2), torch.randn(1, 9, 32)
    monkeypatch.setattr(library, "_untrusted", True)
    monkeypatch.setattr(library, "_difference", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = layer(x)  # they agree
    assert not library._untrusted
    forget_plans()
    spoil(monkeypatch, "forward")
    monkeypatch.setattr(library, "_untrusted", True)
    monkeypatch.setattr(backends, "_warned", set())
    with pytest.warns(
        RuntimeWarning,
        match="plain PyTorch computes, .*: its kernels compute something else .*the output is off by",
    ) as seen:
        found = [layer(x) for _ in range(2)]
    assert len(seen) == 1
    torch.testing.assert_close(found, [expected] * 2)
    with pytest.raises(RuntimeError, match="backend='native' cannot run: its kernels compute something else"):
        LinearRoPEAttention.block(32, 2, backend="native")(x)


def test_a_compiled_program_compares_the_kernels_when_it_first_calls_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = torch.compile(LinearRoPEAttention(8, 1), backend="aot_eager"), torch.randn(1, 9, 8)
    monkeypatch.setattr(library, "_untrusted", True)
    monkeypatch.setattr(library, "_difference", None)
    spoil(monkeypatch, "forward")
    with pytest.raises(RuntimeError, match="backend='native' cannot run: its kernels compute something else"):
        layer(x)


def test_kernels_that_raise_are_not_used_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_untrusted", True)
    monkeypatch.setattr(library, "_difference", None)
    monkeypatch.setattr(library, "run", None)
    assert "TypeError" in str(native.why_not())
