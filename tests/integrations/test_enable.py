"""``enable`` and ``disable``: what they replace, refuse and say."""

import builtins
import importlib
import logging
import re
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from linrope.backends import native
from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers import families as replaced
from linrope.integrations.transformers import refusals
from tests.support.families import CONFIGURATIONS, model, modeling

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


def test_what_linrope_refuses_runs_as_before_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    module = modeling("mamba2")
    original = module.causal_conv1d_fn
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    with caplog.at_level(logging.WARNING), linrope_transformers.enable("mamba2"):
        for _ in range(2):
            got = module.causal_conv1d_fn(x, weight, None, activation="gelu")
    assert torch.equal(got, original(x, weight, None, activation="gelu"))
    messages = [x.message for x in caplog.records if x.name.startswith("linrope")]
    reason = "causal_conv1d_fn runs transformers' own code: activation 'gelu'"
    assert messages == [f"{module.__name__}: {reason}"]


def test_meta_tensors_and_heads_that_are_too_wide_are_refused() -> None:
    x = torch.zeros(1, 5, 2, 300)
    B = torch.zeros(1, 5, 1, 16)
    assert refusals.scan(x, x, x, B) == "heads of 300, more than 256"
    assert refusals.scan(x.to("meta")[..., :8], x, x, B) == "tensors on meta"
    per_channel = [torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.zeros(2, 8, 16), B[:, 0], B[:, 0]]
    reason = refusals.step(torch.zeros(1, 2, 8, 16), *per_channel)
    assert reason == "step sizes or decays that differ between the channels of a head"


def test_delta_rules_and_gates_that_linrope_does_not_have_are_refused() -> None:
    x = torch.zeros(1, 5, 2, 8)
    assert refusals.delta_rule(x, x, x, x, x) == "queries and keys that are not normalized"
    reason = refusals.delta_rule(x, x, torch.zeros(1, 5, 2, 300), x, x, use_qk_l2norm_in_kernel=True)
    assert reason == "heads of 300, more than 256"
    module = nn.Module()
    module.activation = "tanh"  # type: ignore[assignment]
    assert refusals.norm(module, x, x) == "activation 'tanh'"


def test_enable_and_disable() -> None:
    modules = {x: modeling(x) for x in ("mamba2", "bamba")}
    originals = {name: module.mamba2_chunk_scan for name, module in modules.items()}

    def enabled() -> list[str]:
        return [name for name, module in modules.items() if module.mamba2_chunk_scan is not originals[name]]

    with linrope_transformers.enable("mamba2") as outer:
        assert enabled() == ["mamba2"]
        assert outer.families == ("mamba2",)
        with linrope_transformers.enable("mamba2", "bamba") as inner:
            assert inner.families == ("bamba",)
            assert enabled() == ["mamba2", "bamba"]
        assert enabled() == ["mamba2"]
    assert enabled() == []
    assert set(linrope_transformers.enable().families) == set(CONFIGURATIONS)
    linrope_transformers.disable("bamba")
    assert enabled() == ["mamba2"]
    linrope_transformers.disable()
    assert enabled() == []
    assert not replaced._replaced
    assert repr(linrope_transformers.enable("mamba2")) == "Enabled(mamba2; backend: native)"
    again = linrope_transformers.enable("mamba2", "bamba", "bamba")
    assert again.families == ("bamba",)
    assert repr(again) == "Enabled(bamba; enabled before: mamba2; backend: native)"


def test_a_well_known_family_that_linrope_does_not_run_is_refused_with_the_reason() -> None:
    for family, reason in replaced.NOT_RUN.items():
        message = f"'{family}': a family of transformers that linrope does not run ({reason}); expected"
        with pytest.raises(ValueError, match=re.escape(message)):
            linrope_transformers.enable(family)


def test_the_page_names_all_families_that_are_refused_with_a_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    table = page.partition("`enable` does not accept these:")[2].partition("\n- ")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(replaced.NOT_RUN)
    assert not set(replaced.NOT_RUN) & set(replaced.FAMILIES)


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ("Mamba2", ValueError, "families='Mamba2': expected one of .* did you mean 'mamba2'"),
        ("../x", ValueError, "families='../x': expected one of .*lfm3$"),
        ("Ling 3", ValueError, "did you mean 'bailing_hybrid'"),
        ("Granite 4.0-H", ValueError, "expected one of .* did you mean 'granitemoehybrid'"),
        ("Qwen/Qwen3.5-0.8B", ValueError, r"did you mean 'qwen3_5'\?$"),
        ("qwen3.6", ValueError, "did you mean 'qwen3_5' or 'qwen3_5_moe' or 'qwen3_next' or 'qwen4_exp'"),
        (
            "jamba",
            ValueError,
            "does not run .its recurrent layers are Mamba-1's.*; expected one of bamba, .*lfm3$",
        ),
        (
            "llama",
            ValueError,
            "families='llama': a family of transformers that linrope does not run; expected one of .*lfm3$",
        ),
        (["mamba2", "bamba"], TypeError, "got a list, expected names as separate arguments"),
        (
            model("qwen3_5"),
            TypeError,
            "^families: got a Qwen3_5ForCausalLM, expected the name of a family, here 'qwen3_5'$",
        ),
        (nn.Linear(1, 1), TypeError, "^families: got a Linear, expected the name of a family$"),
        (None, TypeError, "got a NoneType, expected names"),
    ],
)
def test_a_wrong_family_is_an_error(argument: Any, error: type, message: str) -> None:
    for function in (linrope_transformers.enable, linrope_transformers.disable):
        with pytest.raises(error, match=message):
            function("mamba2", argument)
    assert not replaced._replaced


def test_the_families_of_a_model_are_names_that_enable_takes() -> None:
    for family in CONFIGURATIONS:
        assert replaced.families_of(model(family)) == [family]
    assert replaced.families_of(nn.Linear(1, 1)) == []


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for families in ((), ("mamba2",), ("jmba",)):
        with pytest.raises(
            ModuleNotFoundError, match=r"^transformers is missing; install linrope\[huggingface\]$"
        ):
            linrope_transformers.enable(*families)


def test_a_changed_signature_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = modeling("zamba2")
    monkeypatch.setattr(module, "mamba2_chunk_scan", lambda hidden_states, dt, extra: None)
    message = r"zamba2.*mamba2_chunk_scan has the parameters hidden_states, dt, extra"
    with pytest.raises(RuntimeError, match=message):
        linrope_transformers.enable("mamba2", "zamba2")
    assert not replaced._replaced
    monkeypatch.delattr(module, "mamba2_chunk_scan")
    with pytest.raises(RuntimeError, match="zamba2 has no mamba2_chunk_scan"):
        linrope_transformers.enable("zamba2")
    monkeypatch.delattr(modeling("minimax"), "MiniMaxLightningAttention")
    with pytest.raises(RuntimeError, match=r"minimax has no MiniMaxLightningAttention\.forward"):
        linrope_transformers.enable("minimax")


def break_family(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Makes transformers' Zamba2 a family that linrope cannot replace."""
    if how == "signature":
        monkeypatch.setattr(modeling("zamba2"), "causal_conv1d_fn", lambda hidden_states, extra: None)
        return
    name, real = "transformers.models.zamba2.modeling_zamba2", importlib.import_module

    def fails(module: str, *rest: Any) -> Any:
        if module == name:
            raise ImportError("a part of it is missing")
        return real(module, *rest)

    monkeypatch.setattr(importlib, "import_module", fails)


@pytest.mark.parametrize("how", ["signature", "import"])
def test_a_family_that_does_not_fit_is_named_and_does_not_stop_the_others(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_family(monkeypatch, how)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with linrope_transformers.enable() as enabled:
                assert set(enabled.families) == set(CONFIGURATIONS) - {"zamba2"}
    (message,) = [x.message for x in caplog.records if x.name == "linrope.integrations.transformers"]
    reason = {
        "signature": "causal_conv1d_fn has the parameters hidden_states, extra",
        "import": "a part of it",
    }[how]
    assert message.startswith("transformers.models.zamba2 runs transformers' own code: ")
    assert reason in message
    with pytest.raises((RuntimeError, ImportError), match=reason):
        linrope_transformers.enable("mamba2", "zamba2")
    assert not replaced._replaced


@pytest.mark.parametrize("families", [(), ("mamba2", "zamba2")])
@pytest.mark.parametrize("count", [0, 5])
def test_nothing_is_left_half_replaced(
    families: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An assignment fails after ``count`` others."""
    modules = {x: dict(vars(modeling(x))) for x in CONFIGURATIONS}
    linrope_transformers.enable("bamba")
    before = dict(replaced._replaced)
    left = [count]

    def failing(owner: Any, name: str, value: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        builtins.setattr(owner, name, value)

    monkeypatch.setattr(replaced, "setattr", failing, raising=False)
    with pytest.raises(KeyboardInterrupt):
        linrope_transformers.enable(*families)
    assert replaced._replaced == before
    linrope_transformers.disable()
    for name, expected in modules.items():
        assert vars(modeling(name)).items() == expected.items()
    assert not any(hasattr(x.forward, "__wrapped__") and _is_ours(x.forward) for x in _models())


def _models() -> list[Any]:
    return [x for name in CONFIGURATIONS for x in vars(modeling(name)).values() if hasattr(x, "forward")]


def _is_ours(function: Any) -> bool:
    return function.__code__.co_filename.startswith(replaced.__file__.rpartition("/")[0])


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_the_cache_may_have_either_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 renamed it. The signature decides."""
    attention: Any = next(
        x for x in model("minimax").modules() if type(x).__name__ == "MiniMaxLightningAttention"
    )
    scope: dict[str, Any] = {}
    exec(
        f"def forward(self, hidden_states, position_embeddings, attention_mask, {name}=None, **kwargs): ...",
        scope,
    )
    monkeypatch.setattr(type(attention), "forward", scope["forward"])
    cache = modeling("minimax").MiniMaxCache()
    x = torch.randn(1, 9, 48)
    with linrope_transformers.enable("minimax"):
        y, sums = attention(x, None, None, **{name: cache})
        assert torch.equal(attention(x, None, None, modeling("minimax").MiniMaxCache())[0], y)
    assert torch.equal(cache.get_linear_cache(attention.layer_idx), sums)


def test_replaced_says_what_linrope_computes_in_a_model() -> None:
    expected = dict.fromkeys(CONFIGURATIONS, ("convolution", "delta rule", "gated norm", "step"))
    expected |= dict.fromkeys(replaced.MAMBA2, ("convolution", "gated norm", "scan", "step"))
    expected |= {"minimax": ("lightning attention",)} | dict.fromkeys(replaced.CONVOLUTION, ("convolution",))
    models = {family: model(family) for family in CONFIGURATIONS}
    for family, net in models.items():
        assert linrope_transformers.replaced(net) == ()
        with linrope_transformers.enable(family):
            assert linrope_transformers.replaced(net) == expected[family]
    with linrope_transformers.enable("mamba2"):
        assert linrope_transformers.replaced(models["minimax"]) == ()
    softmax = model("granitemoehybrid", layer_types=["attention", "attention"])
    with linrope_transformers.enable():
        assert linrope_transformers.replaced(softmax) == ()
        assert linrope_transformers.replaced(nn.Linear(2, 2)) == ()


def test_replaced_takes_a_model_and_no_name() -> None:
    message = "model: got a str, expected a model, not the name of its family"
    with pytest.raises(TypeError, match=message):
        linrope_transformers.replaced("qwen3_5")  # type: ignore[arg-type]


def test_nothing_is_computed_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("mamba2")
    with linrope_transformers.enable("mamba2"):
        assert linrope_transformers.replaced(net)
        monkeypatch.setattr(native, "why_not", lambda: "not built")
        assert linrope_transformers.replaced(net) == ()


def test_replaced_knows_modules_that_keep_the_forward_from_before() -> None:
    """accelerate's hooks do so."""
    before, after = model("minimax"), model("minimax")
    accelerate.cpu_offload(before, execution_device=torch.device("cpu"))
    with linrope_transformers.enable("minimax"):
        accelerate.cpu_offload(after, execution_device=torch.device("cpu"))
        assert linrope_transformers.replaced(before) == ()
        assert linrope_transformers.replaced(after) == ("lightning attention",)
