"""Compares the compiled kernels with plain PyTorch, at their first use on machines where they have not been tested."""

from typing import Any

import torch
from torch import Tensor

from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.step import LayerStep
from linrope.operation.plan import forget_plans

_TOLERANCE = 1e-3  # relative to the largest number of a tensor. Rounding errors are a hundred times smaller
LAYERS: dict[str, dict[str, Any]] = {  # together they call every kernel
    "the default block": {},
    "the delta rule": {"erase_gate": "tied", "feature_map": "unit", "normalize": False},
    "a decay per feature": {"forget_gate": {"per": "feature"}, "feature_map": "identity", "normalize": False},
    "attention in both directions": {"causal": False},
}


def difference() -> str | None:
    """How the kernels' results differ from PyTorch's in a small layer of each kind; None: they agree.

    Takes a tenth of a second, and leaves PyTorch's random numbers as they were.

    >>> from linrope.backends import native
    >>> from linrope.first_use import difference
    >>> if native.why_not() is None:
    ...     assert difference() is None
    """
    for name, options in LAYERS.items():
        found, expected = (_results(dtype, options) for dtype in (torch.float32, torch.float64))
        for part, x in expected.items():
            error, largest = float((found[part] - x).abs().max()), float(x.abs().max())
            if not error <= _TOLERANCE * largest + 1e-6:
                forget_plans()  # the calls above have stored the choice of these kernels
                return f"{name}: {part} is off by {error:.2g}, and its numbers are up to {largest:.2g}"
    return None


def _results(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    """The results of a small layer: out, state and gradients for 40 tokens, then one decoding step in two ways."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(0)
        return _of_layer(dtype, options)


def _of_layer(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    kernels = dtype == torch.float32  # none has float64
    backend = "native" if kernels else "eager"
    layer = LinearRoPEAttention.block(32, 2, dtype=torch.float32, backend=backend, **options).to(dtype)
    x = torch.randn(2, 41, 32, dtype=torch.float32).to(dtype).requires_grad_()
    if not layer.causal:
        y = layer(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        return {"the output": y.detach(), "its gradient": gradient}
    y, state = layer(x[:, :40], return_state=True)
    gradients = torch.autograd.grad(y.square().sum() + state.sums.kv.square().sum(), (x, *layer.parameters()))
    results = {"the output": y.detach(), "the state": state.sums.kv.detach()}
    results |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
    with torch.no_grad():
        state = state.detach()
        # With positions the layer takes the operation's step and the kernels around it, not its own step
        results["the next token"] = layer(x[:, 40:], state=state, positions=state.position[:, None])
        results["the layer's own step"] = (
            LayerStep(layer)(x[:, 40:].detach(), [*state.tensors().values()], None)
            if kernels
            else results["the next token"]
        )
    return results
