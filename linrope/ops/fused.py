"""The fused operators as nodes for autograd and for torch.compile. Their backward pass recomputes from the inputs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.common.tracing import check_not_in_onnx, plain
from linrope.ops import eager
from linrope.ops.backends import load


class _Fused:
    """An operator with a gradient for each of its floating-point tensors.

    name: of the operator, and of the functions of the same name in ``eager`` and in the fused backends, which also
        have ``<name>_backward(gradient, *arguments)``.
    tensors, options: the types and names of its arguments, in order.
    shape: the shape of the result, from the arguments.
    """

    def __init__(self, name: str, tensors: str, options: str, shape: Callable[..., Sequence[int]]) -> None:
        self.name, self.shape, self.eager = name, shape, getattr(eager, name)
        self.count = len(tensors.split(","))
        arguments = f"str backend, {tensors}, {options}"
        library = torch.library.custom_op
        self.forward = library(
            f"linrope::{name}", self.run, mutates_args=(), schema=f"({arguments}) -> Tensor"
        )
        self.backward = library(
            f"linrope::{name}_backward",
            self.run_backward,
            mutates_args=(),
            schema=f"(Tensor gradient, {arguments}) -> Tensor[]",
        )
        self.forward.register_fake(self._new_result)
        self.backward.register_fake(self._new_gradients)
        self.forward.register_autograd(self._gradients, setup_context=self._save)

    def __call__(self, backend: str, *arguments: Any) -> Tensor:
        tensors = [x for x in arguments[: self.count] if x is not None]
        if not plain(tensors):
            y: Tensor = self.forward(backend, *arguments)
            return y
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _WithoutDispatcher.apply(self, backend, *arguments)  # type: ignore[no-any-return, no-untyped-call]
        return self.run(backend, *arguments)

    def run(self, backend: str, *arguments: Any) -> Tensor:
        y: Tensor = getattr(load(backend), self.name)(*arguments)
        return y

    def run_backward(self, gradient: Tensor, backend: str, *arguments: Any) -> list[Tensor]:
        """The gradients of the floating-point tensors among the arguments."""
        return [x for x in self._run_backward(gradient, backend, arguments) if x is not None]

    def _run_backward(self, gradient: Tensor, backend: str, arguments: Sequence[Any]) -> list[Tensor | None]:
        """The gradient of each tensor argument; None for those that are absent or hold integers."""
        gradients: list[Tensor | None] = getattr(load(backend), f"{self.name}_backward")(gradient, *arguments)
        return gradients

    def _new_result(self, backend: str, x: Tensor, *rest: Any) -> Tensor:
        check_not_in_onnx(backend, "'eager'")
        return x.new_empty(self.shape(x, *rest))

    def _new_gradients(self, gradient: Tensor, backend: str, *arguments: Any) -> list[Tensor]:
        return [
            torch.empty_like(arguments[i], memory_format=torch.contiguous_format)
            for i in self._differentiable(arguments)
        ]

    def _differentiable(self, arguments: Sequence[Any]) -> list[int]:
        """The indices of the tensors that have gradients."""
        tensors = enumerate(arguments[: self.count])
        return [i for i, x in tensors if x is not None and x.is_floating_point()]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        backend, *arguments = inputs
        ctx.save_for_backward(*arguments[: self.count])
        ctx.backend, ctx.options, ctx.skipped_dispatcher = backend, arguments[self.count :], False

    def _gradients(self, ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        arguments = [*ctx.saved_tensors, *ctx.options]
        return None, *self.gradients(gradient, ctx.backend, arguments, ctx.skipped_dispatcher)

    def gradients(
        self, gradient: Tensor, backend: str, arguments: list[Any], skipped_dispatcher: bool
    ) -> list[Tensor | None]:
        """The gradients of the arguments. skipped_dispatcher: True if the forward pass did."""
        gradients: list[Tensor | None] = [None] * len(arguments)
        if torch.is_grad_enabled():  # create_graph=True: the gradients have gradients themselves
            indices = [i for i in self._differentiable(arguments) if arguments[i].requires_grad]
            for i in indices:  # a tensor that is passed twice has two gradients
                arguments[i] = arguments[i].view_as(arguments[i])
            inputs = [arguments[i] for i in indices]
            present: Sequence[Tensor] = torch.autograd.grad(
                self.eager(*arguments), inputs, gradient, create_graph=True
            )
        elif skipped_dispatcher:
            gradients[: self.count] = self._run_backward(gradient, backend, arguments)
            return gradients
        else:
            indices = self._differentiable(arguments)
            present = self.backward(gradient, backend, *arguments)
        for i, x in zip(indices, present, strict=True):
            gradients[i] = x
        return gradients


class _WithoutDispatcher(torch.autograd.Function):
    """An operator and its gradient without the dispatcher, whose cost exceeds that of a short call."""

    @staticmethod
    def forward(ctx: Any, operator: _Fused, backend: str, *arguments: Any) -> Tensor:
        y = operator.run(backend, *arguments)
        operator._save(ctx, (backend, *arguments), y)
        ctx.operator, ctx.skipped_dispatcher = operator, True
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.operator._gradients(ctx, gradient)


convolve = _Fused(
    "convolve",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? cu_seqlens",
    "bool silu",
    lambda x, *_: x.shape,
)
gated_norm = _Fused(
    "gated_norm",
    "Tensor out, Tensor? weight, Tensor? gate, Tensor? v, Tensor? skip",
    "float eps, bool over_heads, bool gate_first, bool skip_first",
    lambda out, *_: (*out.shape[:2], out.shape[2] * out.shape[3]),
)


def convolve_parts(
    backend: str,
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> Sequence[Tensor]:
    """``convolve`` of each part with its channels of weight, bias and before."""
    tensors = [x for x in (*parts, weight, bias, before, cu_seqlens) if x is not None]
    if len(parts) > 1 and torch.is_grad_enabled() and plain(tensors):
        return _ConvolvedParts.apply(  # type: ignore[no-any-return, no-untyped-call]
            backend, silu, weight, bias, before, cu_seqlens, *parts
        )
    return [convolve(backend, *x) for x in arguments_by_part(parts, weight, bias, before, cu_seqlens, silu)]


def arguments_by_part(
    parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None, before: Tensor | None, *rest: Any
) -> Iterator[list[Any]]:
    """The arguments of ``convolve`` for each part."""
    if len(parts) == 1:
        yield [parts[0], weight, bias, before, *rest]
        return
    low = 0
    for x in parts:
        channels = slice(low, low := low + x.shape[2])
        x_bias, x_before = None if bias is None else bias[channels], before
        if before is not None:
            x_before = before[..., channels]
        yield [x, weight[channels], x_bias, x_before, *rest]


class _ConvolvedParts(torch.autograd.Function):
    """``convolve_parts`` as one node of the graph. A node and slices for each part would cost more than short calls."""

    @staticmethod
    def forward(ctx: Any, backend: str, silu: bool, *tensors: Any) -> tuple[Tensor, ...]:
        weight, bias, before, cu_seqlens, *parts = tensors
        ctx.save_for_backward(*tensors)
        ctx.backend, ctx.silu = backend, silu
        arguments = arguments_by_part(parts, weight, bias, before, cu_seqlens, silu)
        return tuple(convolve.run(backend, *x) for x in arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        weight, bias, before, cu_seqlens, *parts = ctx.saved_tensors
        arguments = arguments_by_part(parts, weight, bias, before, cu_seqlens, ctx.silu)
        gradients_by_part = [
            convolve.gradients(g, ctx.backend, x, True) for g, x in zip(gradients, arguments, strict=True)
        ]
        d_x, d_weight, d_bias, d_before, *_ = zip(*gradients_by_part, strict=True)
        return None, None, _join(d_weight, 0), _join(d_bias, 0), _join(d_before, 2), None, *d_x


def _join(gradients: Sequence[Tensor | None], dim: int) -> Tensor | None:
    present = [x for x in gradients if x is not None]
    return torch.cat(present, dim) if len(present) == len(gradients) else None
