"""An operator with a backward pass of its own: one opaque node for autograd, torch.compile and torch.func.

``bridge.py`` declares the operator of all chunked backends; ``linrope/ops`` declares those around the attention.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from linrope.common.private_names import transformed
from linrope.common.tracing import plain

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    float: "float",
}
Record = TypeVar("Record")
# The results, and a list of the tensors that the backward pass requires besides the arguments.
Output: TypeAlias = tuple[Any, ...]
Tensors: TypeAlias = Sequence[Tensor | None]


class Operator(Generic[Record]):
    """A function with a backward pass, registered as ``linrope::name`` and ``linrope::name_backward``.

    PyTorch passes a flat list of arguments: first the inputs, which have gradients, then other tensors, then settings.
    The methods of subclasses receive them as a record.
    """

    name: ClassVar[str]
    types: ClassVar[Mapping[str, Any]]  # the type of each argument, by name and in order
    inputs: ClassVar[int]  # how many arguments have gradients
    results: ClassVar[int] = 1
    record: ClassVar[Callable[..., Any]]  # makes a record of the arguments
    # Computes the result of a record, or a tuple of the first results, in plain PyTorch. Second derivatives go through
    # it; None: they are refused.
    definition: ClassVar[Callable[..., Tensor | tuple[Tensor, ...]] | None] = None

    def forward(self, record: Record, save: bool) -> Output:
        """The results, and a list of the tensors that ``backward`` requires besides the arguments if ``save``.

        None stands for a result that the call does not have.
        """
        raise NotImplementedError

    def new(self, record: Record, save: bool) -> Output:
        """Tensors like those that ``forward`` returns, without values."""
        raise NotImplementedError

    def backward(self, record: Record, saved: list[Tensor], g: Tensors) -> Tensors:
        """The gradients of the inputs, None for absent ones. g: the gradients of the results.

        saved: the results if ``reads_results``, then the tensors that ``forward`` saved.
        """
        raise NotImplementedError

    def reads_results(self, record: Record) -> bool:
        """True if ``backward`` requires the results too."""
        return False

    def refusal(self, arguments: Sequence[Any]) -> str:
        """The error of second derivatives if there is no ``definition``."""
        return f"second derivatives: linrope::{self.name} has none"

    def __init__(self) -> None:
        types = [_TYPES[x] for x in self.types.values()]
        self.tensors = sum(x.startswith("Tensor") for x in types)
        arguments = ", ".join(map(" ".join, zip(types, self.types)))
        gradients = ", ".join(f"Tensor? g{i}" for i in range(self.results))
        schemas = (
            f"({arguments}, bool save) -> ({'Tensor, ' * self.results}Tensor[])",
            f"({arguments}, Tensor[] saved, {gradients}) -> Tensor[]",
        )
        new = torch.library.custom_op
        self.forward_op = new(f"linrope::{self.name}", self.run, mutates_args=(), schema=schemas[0])
        self.backward_op = new(
            f"linrope::{self.name}_backward", self.run_backward, mutates_args=(), schema=schemas[1]
        )
        self.forward_op.register_fake(lambda *x: _present(self.new(self.record(*x[:-1]), x[-1])))
        self.backward_op.register_fake(self._new_gradients)
        self.forward_op.register_autograd(self._backward, setup_context=self._setup_context)
        self.backward_op.register_autograd(_refuse, setup_context=self._keep_refusal)
        for op in (self.forward_op, self.backward_op):
            op.register_vmap(_vmap_by_loop(op))

    def __call__(self, arguments: Sequence[Any], record: Record) -> tuple[Tensor, ...]:
        """The results, with gradients. record: the one that ``self.record`` makes of the arguments."""
        inputs = arguments[: self.inputs]
        save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        output: Output
        if plain(arguments[: self.tensors]):
            if save:
                return _WithoutDispatcher.apply(self, arguments, record, *inputs)  # type: ignore[no-any-return, no-untyped-call]
            output = self.forward(record, False)
        elif transformed():
            output = _Transformed.apply(self, *arguments, save)  # type: ignore[no-untyped-call]
        else:
            output = self.forward_op(*arguments, save)
        return output[: self.results]

    def run(self, *arguments: Any) -> Output:
        """The forward operator, which PyTorch calls."""
        return _present(self.forward(self.record(*arguments[:-1]), arguments[-1]))

    def run_backward(self, *arguments: Any) -> list[Tensor]:
        """The backward operator, which PyTorch calls: the gradients of the inputs that are present."""
        n = len(self.types)
        found = self.backward(self.record(*arguments[:n]), arguments[n], arguments[n + 1 :])
        return [x for x in found if x is not None]

    def _new_gradients(self, *arguments: Any) -> list[Tensor]:
        present = [x for x in arguments[: self.inputs] if x is not None]
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in present]

    def _keep_refusal(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.refusal = self.refusal(inputs)

    def _setup_context(self, ctx: Any, inputs: Sequence[Any], output: Output) -> None:
        self.keep(ctx, inputs[:-1], self.record(*inputs[:-1]), output)

    def keep(self, ctx: Any, arguments: Sequence[Any], record: Record, output: Output) -> None:
        """Saves what ``gradients`` requires."""
        *results, saved = output
        saved = [*results, *saved] if self.reads_results(record) else saved
        ctx.save_for_backward(*arguments[: self.tensors], *saved)
        ctx.settings = arguments[self.tensors :]
        ctx.set_materialize_grads(self.results == 1)  # the loss depends on a single result
        ctx.skipped_dispatcher = False

    def _backward(self, ctx: Any, *g: Any) -> tuple[Tensor | None, ...]:
        """The gradients of all arguments of the forward operator."""
        return *self.gradients(ctx, g[: self.results]), *[None] * (len(self.types) + 1 - self.inputs)

    def gradients(self, ctx: Any, g: Tensors) -> Tensors:
        """The gradients of the inputs."""
        tensors = ctx.saved_tensors
        arguments, saved = [*tensors[: self.tensors], *ctx.settings], list(tensors[self.tensors :])
        if ctx.skipped_dispatcher and not transformed() and not torch.is_grad_enabled():
            return self.backward(self.record(*arguments), saved, g)
        return self.gradients_by_operator(arguments, saved, g)

    def gradients_by_operator(self, arguments: Sequence[Any], saved: list[Tensor], g: Tensors) -> Tensors:
        """The gradients of the inputs, as transformations and graphs require them."""
        if transformed():
            found = _TransformedBackward.apply(self, *arguments, *g, *saved)  # type: ignore[no-untyped-call]
        elif torch.is_grad_enabled() and self.definition is not None:
            return self.differentiate_definition(arguments, g)
        else:
            found = self.backward_op(*arguments, saved, *g)
        present = iter(found)
        return [None if x is None else next(present) for x in arguments[: self.inputs]]

    def differentiate_definition(self, arguments: Sequence[Any], g: Tensors) -> Tensors:
        """The gradients of the inputs, which have gradients themselves: create_graph=True."""
        assert self.definition is not None
        # Views: a tensor that is passed twice has two gradients.
        inputs = [None if x is None else x.view_as(x) for x in arguments[: self.inputs]]
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        results = self.definition(self.record(*inputs, *arguments[self.inputs :]))
        results = (results,) if isinstance(results, Tensor) else results
        given = [torch.zeros_like(y) if g_y is None else g_y for y, g_y in zip(results, g)]
        ys, gradients = zip(*[pair for pair in zip(results, given) if pair[0].requires_grad])
        found = iter(torch.autograd.grad(ys, wanted, gradients, create_graph=True))
        return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def _present(output: Output) -> Output:
    """The output with an empty tensor for each absent result, because PyTorch's operators cannot return None."""
    first = next(x for x in output if x is not None)
    return tuple(first.new_empty(0) if x is None else x for x in output)


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(ctx.refusal)


class _WithoutDispatcher(torch.autograd.Function):
    """An operator and its gradient as a plain autograd.Function. The dispatcher would take longer than a short call.

    arguments holds the operator's arguments in one tuple, because autograd inspects every argument of a Function. The
    tensors that may need gradients are passed again as inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, operator: Operator[Any], arguments: Sequence[Any], record: Any, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        output = operator.forward(record, True)
        operator.keep(ctx, arguments, record, output)
        ctx.operator, ctx.skipped_dispatcher = operator, True
        return output[:-1]

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Any:
        return None, None, None, *ctx.operator.gradients(ctx, g)


class _Transformed(torch.autograd.Function):
    """An operator in the form that torch.func's transformations require."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Operator[Any], *arguments: Any) -> tuple[Tensor, ...]:
        *results, saved = operator.forward_op(*arguments)
        return *results, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operator, *arguments = inputs
        ctx.refusal, n = ctx.operator.refusal(arguments), ctx.operator.results
        ctx.operator._setup_context(ctx, arguments, (*output[:n], list(output[n:])))

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Any:
        return None, *ctx.operator._backward(ctx, *g)

    jvp = staticmethod(_refuse)


class _TransformedBackward(torch.autograd.Function):
    """A backward operator in the form that torch.func requires, which ignores lists: each tensor is an argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Operator[Any], *flat: Any) -> tuple[Tensor, ...]:
        n, m = len(operator.types), len(operator.types) + operator.results
        return tuple(operator.backward_op(*flat[:n], list(flat[m:]), *flat[n:m]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.refusal = inputs[0].refusal(inputs[1:])

    backward = jvp = staticmethod(_refuse)


def _vmap_by_loop(op: Any) -> Any:
    """vmap's rule for an operator: one call per entry of the batch."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        def entry(x: Any, dim: Any, i: int) -> Any:
            if isinstance(x, (list, tuple)):
                return [entry(y, d, i) for y, d in zip(x, dim, strict=True)]
            return x if dim is None else x.select(dim, i)

        def stacked(results: Any) -> Any:
            if isinstance(results[0], Tensor):
                return torch.stack(results)
            return type(results[0])(map(stacked, zip(*results, strict=True)))

        def zeros(result: Any) -> Any:
            return 0 if isinstance(result, Tensor) else type(result)(map(zeros, result))

        results = [op(*entry(arguments, in_dims, i)) for i in range(info.batch_size)]
        return stacked(results), zeros(results[0])

    return rule
