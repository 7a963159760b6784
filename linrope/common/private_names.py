"""The private names of other libraries that linrope reads. No other module may (``tests/test_private_names.py``).

A release may rename any of them. Each stands here with the reason why no public name can replace it. Methods that
override a private method of transformers are in ``linrope/models/huggingface/modeling.py``: its models are made so.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Public functions test for one transformation at a time, if at all.
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import is_functorch_wrapped_tensor

# torch.library and torch.onnx meet fake tensors, but no public module has their classes.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

# register_module_forward_hook has no counterpart that says whether there are such hooks.
from torch.nn.modules.module import _has_any_global_hook

# torch.export.register_dataclass registers a class as a pytree, but cannot leave out what is no tensor.
from torch.utils import _pytree as pytree

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = ["FakeTensor", "FakeTensorMode", "is_functorch_wrapped_tensor", "pytree"]


def transformed() -> bool:
    """True inside torch.func's transformations (vmap, grad, jacrev ..)."""
    return _are_functorch_transforms_active()


def watched() -> bool:
    """True while operations are recorded or changed: in torch.compile, torch.func and dispatch modes."""
    if torch.compiler.is_compiling() or _are_functorch_transforms_active():
        return True
    return _len_torch_dispatch_stack() > 0


def function_modes() -> bool:
    """True in a TorchFunctionMode, which may replace PyTorch's functions; torch.device(..) is one."""
    return _len_torch_function_stack() > 0


def fake_mode() -> bool:
    """True in a FakeTensorMode, in which each new tensor is fake."""
    return _len_torch_dispatch_stack() > 0 and isinstance(torch.empty(0), FakeTensor)


def compiled_for_export() -> bool:
    """True in torch.export. torch.compiler.is_exporting() is also True in torch.compile in 2.11."""
    return torch.compiler._is_exporting_flag


def forward_mode() -> bool:
    """True inside forward-mode differentiation. The public way looks at each tensor, which short calls notice."""
    return forward_ad._current_level >= 0


def called_while_traced(function: Function) -> Function:
    """Has torch.compile call this function while it traces, and take its result for a constant.

    The public torch.compiler.assume_constant_result does the same, but imports torch._dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def version_of(x: Tensor) -> int:
    """PyTorch's count of the writes to x in place, which public functions can raise but not read."""
    return x._version


def hooks_of(module: nn.Module) -> list[Any]:
    """The forward hooks of a module. PyTorch has public functions to add them, but none to list them."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def dicts_of(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps its submodules and its forward hooks, to see whether these change."""
    return [module._modules, module._forward_hooks, module._forward_pre_hooks]


def has_global_hooks() -> bool:
    """True if some hook is called for every module."""
    return bool(_has_any_global_hook())


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters, to be replaced for a while by plain tensors: setattr refuses them."""
    return module._parameters


def arguments_of(operator: Any) -> dict[str, Any]:
    """The arguments of an overload with their defaults, else None, in the order of its schema, which has no public
    reader.
    """
    return {argument.name: argument.default_value for argument in operator._schema.arguments}


def results_of(operator: Any) -> list[str]:
    """The names of an overload's results, in the order of its schema."""
    return [result.name for result in operator._schema.returns]


def softmax_kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> int:
    """The number of the kernel that scaled_dot_product_attention chooses, which it does not tell."""
    return int(torch._fused_sdp_choice(q, k, v, **options))


def assert_in_graph(condition: Tensor, message: str) -> None:
    """Checks a value inside a compiled graph. torch.compile breaks the graph at a public assert on a tensor's value."""
    torch._assert_async(condition, message)


def scan(step: Any, state: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The last state and the stacked outputs of a loop in a graph: state, output = step(state, inputs[i]).

    PyTorch has a prototype, which torch.onnx.export turns into ONNX's Scan, and no public name for it.
    """
    from torch._higher_order_ops.scan import scan  # imports the compiler

    last, outputs = scan(step, state, inputs)
    return last, outputs


def softmax_implementation(config: Any) -> str:
    """The attention that a model of transformers was made with, "sdpa" for example; from_pretrained sets it."""
    return str(config._attn_implementation)


def forward_behind_hooks(module: nn.Module) -> Any:
    """The forward method that accelerate's hooks call, which they keep under this name alone; else the module's."""
    return getattr(module, "_old_forward", module.forward)


# A class of transformers with this flag refuses to draft tokens, whether or not its cache could go back.
REFUSES_DRAFTS = "_is_stateful"
# The part of generate() that drafts tokens, and alone knows when the last one has been read.
GENERATES_WITH_DRAFTS = "_assisted_decoding"
