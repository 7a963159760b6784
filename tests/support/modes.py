"""PyTorch's modes and linrope's, which last until somebody sets them again: a test must not leave its own behind."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linrope.backends import native


def _waiting() -> int:
    """PyTorch's mode for operations that wait for the GPU. Reading it starts CUDA; before that it is 0."""
    return torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0


# How each mode is read and set
MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}
if native.why_not() is None:
    MODES["instruction set"] = native.instruction_set, native.use_instruction_set
if torch.cuda.is_available():
    MODES["waiting for the GPU"] = _waiting, torch.cuda.set_sync_debug_mode


@contextmanager
def kept_modes() -> Iterator[None]:
    """Whatever the block sets, and however it ends, every mode is then as it was before."""
    before = {name: read() for name, (read, _) in MODES.items()}
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the setters of prototypes warn
            for name, (read, write) in MODES.items():
                if read() != before[name]:
                    write(before[name])
