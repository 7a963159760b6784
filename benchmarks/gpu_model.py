"""Measures training steps of linrope's language model on a GPU, beside the same model with softmax attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_host import MODES, Row, Shape
from linrope.models import LanguageModel, LanguageModelConfig

LAYERS, VOCABULARY = 4, 256
# How far the logits in bfloat16 may be from those in float32, as a fraction of their norm: 16 roundings of 2^-8
TOLERANCE = 2.0**-4


def model_of(shape: Shape, attention: str, backend: str, device: str) -> LanguageModel:
    """The default block, or softmax attention in it, with random weights, the same in each call."""
    _, _, heads, dim = shape
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=VOCABULARY, embed_dim=heads * dim, num_heads=heads, num_layers=LAYERS, attention=attention,
        backend=backend,
    )  # fmt: skip
    return LanguageModel(config).to(device)


def check_model(model: LanguageModel, plain: LanguageModel, tokens: Tensor, dtype: torch.dtype) -> float:
    """The error of the logits under autocast, relative to plain PyTorch in float32. AssertionError: it is large."""
    with torch.no_grad():
        with torch.autocast(tokens.device.type, dtype):
            logits = model(tokens)[0].float()
        expected = plain(tokens)[0]
    error = float((logits - expected).norm() / expected.norm())
    assert error <= TOLERANCE, f"the logits are off: {error:.3g} of their size"
    return error


def loss_of(model: LanguageModel, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(tokens.device.type, dtype):
        logits, _ = model(tokens[:, :-1], return_states=False)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def training_step(model: LanguageModel, tokens: Tensor, dtype: torch.dtype) -> None:
    model.zero_grad()
    loss_of(model, tokens, dtype).backward()


def times_of(
    shape: Shape, attention: str, device: str, dtype: torch.dtype, timed: Callable[..., Row]
) -> tuple[float, Row]:
    """The error of a model, and the times of its forward passes and training steps."""
    model = model_of(shape, attention, "triton", device)
    tokens = torch.randint(VOCABULARY, shape[:2], device=device)
    error = check_model(model, model_of(shape, attention, "eager", device), tokens[:1, :1024], dtype)
    training = partial(training_step, model, tokens, dtype)
    times = {
        "forward": timed(torch.no_grad()(partial(loss_of, model, tokens, dtype)), device),
        "training": timed(training, device),
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        training()
        times["training"]["peak_memory"] = torch.cuda.max_memory_allocated()
    return error, times


def model_row(shape: Shape, device: str, dtype: torch.dtype, timed: Callable[..., Row]) -> Row:
    """Times of both models under autocast, launched from Python, and how many times as fast linrope's is."""
    row: dict[str, Any] = {"functions": {}, "errors": {}}
    for name in ("linear", "softmax"):
        row["errors"][name], row["functions"][name] = times_of(shape, name, device, dtype, timed)
    linear, softmax = row["functions"].values()
    return row | {f"{mode} x": softmax[mode]["median_ms"] / linear[mode]["median_ms"] for mode in MODES}
