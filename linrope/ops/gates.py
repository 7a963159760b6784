"""Gates: a number per token and head that says how much to keep, write or erase."""

from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends.operator import Operator, Output, Tensors
from linrope.common.argument_checks import check_dense, check_name
from linrope.common.precision import full_precision
from linrope.common.tracing import check_not_in_onnx
from linrope.ops.arguments import check_shape, choose, launch, plan_of

ACTIVATIONS = ("log_sigmoid", "sigmoid")
MAX_HEADS = {"triton": 128}  # the most that the kernel takes


class _Gates(NamedTuple):
    """A call, checked. b batch, n tokens, g heads."""

    x: Tensor  # (b, n, dim)
    weight: Tensor  # (g, dim)
    bias: Tensor  # (g,)
    activation: str
    complement: bool


def gates(
    x: Tensor, weight: Tensor, bias: Tensor, *, activation: str = "log_sigmoid", backend: str = "auto"
) -> Tensor:
    """Computes from each token a number for each head.

        y = act(W x + b)      act: log sigmoid or sigmoid

    Everything is float32, or float64 if an input is: half precision has few numbers near 1.

    Args:
        x: (b, n, dim).
        weight: W (g, dim).
        bias: b (g,).
        activation: "log_sigmoid", or "sigmoid".
        backend: "auto", "triton" or "eager". "auto" takes triton on a GPU if it can run the call, else eager.

    Returns:
        y (b, n, g). It has gradients for x, weight and bias.

    Raises:
        TypeError: an argument is not a dense tensor of real numbers.
        ValueError: a shape or device does not fit, or a name is unknown.
        RuntimeError: the backend cannot run the call.

    Source: the gates of Mamba-2 (arXiv 2405.21060) and GLA (arXiv 2312.06635).

    >>> from linrope.ops import gates
    >>> gates(torch.zeros(1, 1, 4), torch.zeros(2, 4), torch.tensor([0.0, 5.0]), activation="sigmoid")
    tensor([[[0.5000, 0.9933]]])
    """
    return _run(x, weight, bias, activation, False, backend)[0]


def forget_and_write_gates(
    x: Tensor, weight: Tensor, bias: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """A forget gate f and the write gate tied to it: log f and 1 - f, where log f = log sigmoid(W x + b).

    Arguments and errors are those of ``gates``.

    >>> from linrope.ops import forget_and_write_gates
    >>> log_decay, write = forget_and_write_gates(torch.zeros(1, 1, 4), torch.zeros(1, 4), torch.tensor([5.0]))
    >>> torch.testing.assert_close(write, 1 - log_decay.exp())
    """
    log_decay, write = _run(x, weight, bias, "log_sigmoid", True, backend)
    return log_decay, write


def log_sigmoid(y: Tensor) -> Tensor:
    """log sigmoid(y), in a form that is precise in ONNX and fast for a single token."""
    if torch.onnx.is_in_onnx_export():
        return F.logsigmoid(_float64_for_onnx(y)).to(y.dtype)
    return F.softplus(y, beta=-1, threshold=40)  # F.logsigmoid wakes PyTorch's threads even for one token


def one_minus_exp(x: Tensor) -> Tensor:
    """1 - e^x of x <= 0, to the last digits of a small result and of a small slope."""
    if torch.onnx.is_in_onnx_export() or not torch.compiler.is_compiling():
        return -torch.expm1(_float64_for_onnx(x)).to(x.dtype)
    # PyTorch's compiler, up to 2.13, writes expm1(x) as e^x - 1 on CPUs. The clamp keeps sinh finite; float64 keeps the
    # slope e^x, the difference of two numbers near 1/2, and rounds as eager code does.
    half = x.double().clamp(min=-80) / 2
    return (-2 * half.sinh() * half.exp()).to(x.dtype)


def _float64_for_onnx(x: Tensor) -> Tensor:
    """Widens x while a model is exported to ONNX.

    ONNX has neither logsigmoid nor expm1. The exporter writes log(1 / (1 + e^-x)) and e^x - 1, which in float32 would
    lose digits.
    """
    return x.double() if torch.onnx.is_in_onnx_export() else x


def _run(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, complement: bool, backend: str
) -> tuple[Tensor, ...]:
    def check() -> str:
        check_name("activation", activation, ACTIVATIONS)
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
            check_dense(name, tensor, x.device if name != "x" else None)
        if x.ndim != 3:
            raise ValueError(f"x: got shape {tuple(x.shape)}, expected (batch, length, dim)")
        if weight.ndim != 2:
            raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected (heads, dim)")
        check_shape("weight", weight, (weight.shape[0], x.shape[2]))
        check_shape("bias", bias, (weight.shape[0],))
        return choose(backend, (x, weight, bias), weight.shape[0], "heads", MAX_HEADS)

    kernel = plan_of(("gates", activation, backend), (x, weight, bias), check).kernel
    call = _Gates(x, weight, bias, activation, complement)
    return _GATES.definition(call) if kernel == "eager" else _GATES(call, call)


class _GateOperator(Operator[_Gates]):
    """The Triton kernel and the definition: on a CPU a matrix product and few elements, which require no kernel.

    The results are y and, with ``complement``, 1 - e^y.
    """

    name = "gates"
    types = get_type_hints(_Gates)
    inputs = 3
    results = 2
    record = _Gates

    @staticmethod
    def definition(call: _Gates) -> tuple[Tensor, ...]:
        """The operator in plain PyTorch: for any dtype and device, for exporters and transformations."""
        x, weight, bias, activation, complement = call
        wide = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x.device):
            y = F.linear(x.to(wide), weight.to(wide), bias.to(wide))
            y = y.sigmoid() if activation == "sigmoid" else log_sigmoid(y)
        return (y, one_minus_exp(y)) if complement else (y,)

    def new(self, record: _Gates, save: bool) -> Output:
        check_not_in_onnx("triton", "'eager'")
        y = record.x.new_empty(*record.x.shape[:2], record.weight.shape[0], dtype=torch.float32)
        return y, torch.empty_like(y) if record.complement else None, []

    def forward(self, record: _Gates, save: bool) -> Output:
        return *launch("gates_fwd", record), []

    def reads_results(self, record: _Gates) -> bool:
        return True

    def backward(self, record: _Gates, saved: list[Tensor], g: Tensors) -> Tensors:
        dy, d_complement = g
        found: Tensors = launch(
            "gates_bwd", record, saved[0], dy, d_complement if record.complement else None
        )
        return found


_GATES = _GateOperator()
