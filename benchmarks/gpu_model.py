"""Measures training steps of linrope's language model on a GPU, beside the same model with softmax attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.models import LanguageModel, LanguageModelConfig

Row = dict[str, Any]
Shape = tuple[int, int, int, int]  # batch, length, heads, dim
LAYERS, VOCABULARY = 4, 256
TOLERANCE = 2.0**-4  # of the logits' size, between bfloat16 and float32 after LAYERS layers


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


def model_row(shape: Shape, device: str, dtype: torch.dtype, timed: Callable[..., Row]) -> Row:
    """Times of forward passes, and of forward and backward passes, under autocast and launched from Python."""
    row: Row = {"functions": {}, "errors": {}}
    for attention in ("linear", "softmax"):
        model, plain = (model_of(shape, attention, backend, device) for backend in ("triton", "eager"))
        tokens = torch.randint(VOCABULARY, shape[:2], device=device)

        def loss(model: LanguageModel = model, tokens: Tensor = tokens) -> Tensor:
            with torch.autocast(device, dtype):
                logits, _ = model(tokens[:, :-1], return_states=False)
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        def forward(loss: Callable[[], Tensor] = loss) -> None:
            with torch.no_grad():
                loss()

        def training(model: LanguageModel = model, loss: Callable[[], Tensor] = loss) -> None:
            model.zero_grad()
            loss().backward()

        row["errors"][attention] = check_model(model, plain, tokens[:1, :1024], dtype)
        row["functions"][attention] = {"forward": timed(forward, device), "training": timed(training, device)}
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            training()
            row["functions"][attention]["training"]["peak_memory"] = torch.cuda.max_memory_allocated()
    linear, softmax = (row["functions"][x] for x in ("linear", "softmax"))
    for mode in linear:
        row[f"{mode} x"] = softmax[mode]["median_ms"] / linear[mode]["median_ms"]
    return row
