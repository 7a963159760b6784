"""What the checks of arguments share: a name out of a list, and whether to look at a tensor's numbers."""

from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def expected_one_of(value: object, known: Sequence[str], also: str = "") -> str:
    """The end of an error's message: the known names, and the one nearest to the value.

    also: what else is accepted, in words.

    >>> from linrope.common.names import expected_one_of
    >>> expected_one_of("hlf", ("interleaved", "half"), also="a Rotary or None")
    "expected one of interleaved, half, a Rotary or None; did you mean 'half'?"
    """
    near = get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected one of {', '.join([*known, also] if also else known)}{hint}"


def check_name(argument: str, value: object, known: Sequence[str], also: str = "") -> None:
    """Raises ValueError unless the value is one of the known names; also: what else is accepted, in words.

    >>> from linrope.common.names import check_name
    >>> check_name("layout", "hlf", ("interleaved", "half"))
    Traceback (most recent call last):
    ValueError: layout='hlf': expected one of interleaved, half; did you mean 'half'?
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{argument}={value!r}: {expected_one_of(value, known, also)}")


def readable(x: Tensor | torch.device) -> bool:
    """Whether to look at the numbers of a tensor, or of tensors on a device, in order to check them.

    Not on a GPU, which it would stall, nor while a graph is compiled or a FakeTensorMode is on, nor of a
    fake, a meta or a vmapped tensor: these have no numbers.

    >>> from linrope.common.names import readable
    >>> readable(torch.ones(2)), readable(torch.ones(2, device="meta"))
    (True, False)
    """
    device = x.device if isinstance(x, Tensor) else x
    if device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if isinstance(x, Tensor) and (isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x)):
        return False
    return torch._C._get_dispatch_mode(_FAKE) is None
