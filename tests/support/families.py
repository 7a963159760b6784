"""Small models of the families that ``linrope.integrations.transformers`` knows, with weights that do something."""

import copy
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks.configurations import COMMON, FAMILIES, SMALL, model_of
from linrope.integrations import transformers as linrope_transformers

VOCABULARY = COMMON["vocab_size"][SMALL]
_NAMES = {*dir(transformers)}  # hasattr would import all families; each dir() takes a third of a second
CONFIGURATIONS = [family for family, (kind, _) in FAMILIES.items() if kind in _NAMES]
# One family for each set of functions that linrope replaces. make test-newest has all of them.
_EACH_SET = ("mamba2", "minimax", "qwen3_5", "kimi_linear", "lfm2")
TESTED = [x for x in CONFIGURATIONS if x in _EACH_SET or os.environ.get("TEST_FAMILIES") == "all"]


def model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model whose decays, steps and norms differ from head to head and from channel to channel."""
    torch.manual_seed(0)
    made: nn.Module = model_of(family, SMALL, **options)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if name.endswith("A_log"):
                x.uniform_(-2, 2.5)
            elif name.endswith("dt_bias"):
                x.uniform_(-4, 0)
            elif x.ndim == 1:  # norms, biases, D
                x.add_(0.2 * torch.randn_like(x))
            else:
                x.normal_(std=0.2 if "embed" in name else x[0].numel() ** -0.5)
    return made.to(dtype).eval()


def recurrent_layer(family: str) -> nn.Module:
    """A model of one recurrent layer, for compilers, whose time is that of the layers."""
    options = {} if family == "mamba2" else {"layer_types": ["linear_attention"]}
    if "mlp_layer_types" in FAMILIES[family][1]:
        options["mlp_layer_types"] = ["dense"]
    return model(family, num_hidden_layers=1, **options)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


_HEADS = ("ForCausalLM", "ForConditionalGeneration")


class _CacheNames(dict[str, str]):
    def __missing__(self, family: str) -> str:
        kind = next(x for name, x in vars(modeling(family)).items() if name.endswith(_HEADS))
        names = inspect.signature(kind.forward).parameters
        return next(x for x in ("cache", "cache_params", "past_key_values") if x in names)


# By family: the argument and the result that hold the cache. transformers 5.24 renamed them to "cache".
CACHE = _CacheNames()


def cache_of(result: Any) -> dict[str, Any]:
    """The cache that a model returned, as the argument of its next call."""
    name = next(x for x in ("cache", "cache_params", "past_key_values") if x in result)
    return {name: result[name]}


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def exactly(family: str, net: nn.Module, run: Callable[[nn.Module], Any]) -> Any:
    """The results of run with linrope, in float64 throughout: transformers' own code converts to float32 at times."""
    wide = copy.deepcopy(net).double()
    for config in (x.config for x in wide.modules() if hasattr(x, "config")):
        config._experts_implementation = "eager"  # the default has no float64
    with pytest.MonkeyPatch.context() as patch, linrope_transformers.enable(family):
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(torch, "float", torch.float64)
        return run(wide)


def assert_as_exact(got: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Over all parameters, the errors of gradients are at most twice those of the expected ones; of one, four times.

    Which parameter has the larger error is a matter of luck, above all in parameters of a few numbers.
    """
    assert got.keys() == expected.keys() == exact.keys()
    errors = []
    for name, x in exact.items():
        if x.any():
            errors.append((relative(got[name], x), relative(expected[name], x)))
            assert errors[-1][0] <= max(4 * errors[-1][1], 2e-5), (name, errors[-1])
        else:
            assert not got[name].any()
    ours, theirs = torch.tensor(errors).square().mean(0).sqrt()
    assert ours <= 2 * theirs


def both(family: str, run: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of run with linrope's functions and with transformers' own."""
    expected = run()
    with linrope_transformers.enable(family):
        return run(), expected
