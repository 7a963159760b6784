"""What a call says to the arguments of PyTorch's attention, and the options that type checkers see."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from linrope import LinearRoPEAttention, linear_rope_attention
from linrope.common.keywords import PYTORCH
from linrope.layer import typed_options
from linrope.layer.config import OPTIONS, SHARED
from linrope.models import LanguageModelConfig

ROOT = Path(__file__).parents[2]
OF_MHA = {*inspect.signature(nn.MultiheadAttention).parameters}
OF_A_CALL = {*inspect.signature(nn.MultiheadAttention.forward).parameters} - {"self"}
OF_SDPA = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
X, Q = torch.zeros(1, 3, 8), torch.zeros(1, 3, 2, 4)


def layer(**options: Any) -> LinearRoPEAttention:
    return LinearRoPEAttention(8, 2, **options)


CALLS: list[tuple[Any, set[str]]] = [
    (layer, OF_MHA - {"embed_dim", "num_heads", "bias", "device", "dtype"}),
    (lambda **options: LinearRoPEAttention.block(8, 2, **options), {"dropout", "batch_first"}),
    (lambda **options: layer()(**options), OF_A_CALL),
    (lambda **options: layer()(X, **options), OF_A_CALL | OF_SDPA),
    (lambda **options: linear_rope_attention(**options), OF_SDPA),
    (lambda **options: linear_rope_attention(Q, Q, Q, **options), OF_A_CALL | OF_SDPA),
]


def test_each_argument_of_pytorch_s_attention_is_answered_in_one_line() -> None:
    for call, names in CALLS:
        for name in names:
            with pytest.raises(TypeError) as error:
                call(**{name: None})
            assert str(error.value) == f"{name}: expected {PYTORCH[name]}"
    page = (ROOT / "docs/use_it.md").read_text("utf-8")
    missing = [name for name in PYTORCH if f"`{name}" not in page]
    assert not missing


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer()(X, X, X), "value: expected layer(x), or layer(x, context)"),
        (lambda: linear_rope_attention(Q, Q, Q, None), "attn_mask: expected causal, key_mask"),
        (lambda: LinearRoPEAttention(8, 2, 0.1), "got a third argument by place, expected options by name"),
        (lambda: LinearRoPEAttention.block(8, 2, 0.1), "got a third argument by place"),
        (lambda: layer()(X, causal=False), "causal: expected causal in the constructor, LinearRoPEAttention("),
        (lambda: linear_rope_attention(Q, Q, Q, forget_gate=True), "forget_gate: expected log_decay"),
        (lambda: linear_rope_attention(Q, Q, Q, eps_mod="add"), "linear_rope_attention; did you mean 'eps_mode'?"),
        (lambda: layer()(X, key_masks=None), "got the keyword 'key_masks', expected those of the layer's call; did"),
        (lambda: LinearRoPEAttention.block(8, 2, forget_gte=True), "LayerConfig.block; did you mean 'forget_gate'?"),
        (lambda: LanguageModelConfig(n_layers=3), "those of LanguageModelConfig; did you mean 'num_layers'?"),
        (lambda: LanguageModelConfig(d_model=3), "those of LanguageModelConfig: embed_dim, num_heads, "),
        (lambda: layer()(), "x: got NoneType, expected a floating-point torch.Tensor"),
        (lambda: linear_rope_attention(), "q: got NoneType, expected a dense torch.Tensor"),
    ],
)  # fmt: skip
def test_arguments_by_place_and_unknown_names(call: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_layer_of_pytorch_says_what_to_use_instead(training: bool) -> None:
    around = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    around.self_attn = layer()
    for module in (around, nn.TransformerEncoder(around, 1)):
        with pytest.raises(TypeError, match=r"^value: .*EncoderBlock in docs/examples/encoder_decoder\.py$"):
            module.train(training)(X)


def test_type_checkers_see_the_options_that_there_are() -> None:
    assert {*typed_options.SharedOptions.__annotations__} == {*SHARED}
    assert {*typed_options.LayerOptions.__annotations__} == {*OPTIONS}
    of_models = {*OPTIONS, "embed_dim", "num_heads"}
    assert {*typed_options.ModelLayerOptions.__annotations__} == of_models
    assert {*inspect.signature(LanguageModelConfig).parameters} > of_models
    of_layers = inspect.signature(LinearRoPEAttention).parameters
    for name, x in inspect.signature(LinearRoPEAttention.block).parameters.items():
        assert name == "num_heads" or x.default == of_layers[name].default


MISSPELT = """
from linrope import LinearRoPEAttention
from linrope.layer.config import LayerConfig
from linrope.models import LanguageModelConfig
from linrope.layer.softmax_attention import SoftmaxAttention

LinearRoPEAttention(64, 4, forget_gate={"longest": 9}, short_conv=4, gate=True, decay=[0.5] * 4)
LinearRoPEAttention(64, 4, short_cov=4)
LinearRoPEAttention.block(64, 4, forget_gte=True)
LayerConfig(64, 4, causl=False)
LayerConfig.block(64, 4, causl=False)
LanguageModelConfig(embed_dm=3)
SoftmaxAttention(64, 4, decay="spread")
"""


@pytest.mark.long  # mypy reads the library
def test_a_misspelt_option_is_an_error_of_mypy(tmp_path: Path) -> None:
    from mypy import api

    file = tmp_path / "misspelt.py"
    file.write_text(MISSPELT, "utf-8")
    report, problems, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), str(file)])
    found = [line.split(":")[1] for line in report.splitlines() if "Unexpected keyword argument" in line]
    calls = range(len(MISSPELT.splitlines()) - 5, len(MISSPELT.splitlines()) + 1)
    assert (found, problems) == ([str(number) for number in calls], ""), report
