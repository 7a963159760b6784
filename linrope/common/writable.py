"""Checks of a state's tensors and rows before they are written or copied, so that no state is half written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from linrope.common.argument_checks import check_integer_tensors
from linrope.common.tracing import values_readable


def check_writable(tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a state's tensor that torch would not write to, or whose entries share memory.

    Does nothing inside torch.compile, which traces the writes. Memory that the operating system or numpy
    protects cannot be recognized.

    >>> from linrope.common.writable import check_writable
    >>> check_writable({"z": torch.zeros(1, 2).expand(3, 2)})
    Traceback (most recent call last):
    ValueError: state.z: got entries that share memory (strides (0, 1)), expected a clone()
    """
    if torch.compiler.is_compiling():
        return
    recording = torch.is_grad_enabled()
    for name, x in tensors.items():
        if is_read_only(x):
            raise ValueError(
                f"state.{name}: got a tensor made in torch.inference_mode(), expected a call in that mode "
                "or a clone() made outside of it"
            )
        if recording and x.requires_grad:
            raise ValueError(
                f"state.{name}: got a tensor that requires gradients, expected torch.no_grad() or detach()"
            )
        if not x.is_contiguous() and _overlaps(x):
            strides = x.stride()
            raise ValueError(
                f"state.{name}: got entries that share memory (strides {strides}), expected a clone()"
            )


def is_read_only(*tensors: Tensor) -> bool:
    """True if one of them was made in inference mode and this call runs outside of that mode."""
    return any(map(Tensor.is_inference, tensors)) and not torch.is_inference_mode_enabled()


def _overlaps(x: Tensor) -> bool:
    """True if two entries may share memory: an axis has a stride within the span of the axes with smaller strides."""
    span = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= span:
            return True
        span += stride * (size - 1)
    return False


def check_sources(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], rows: int) -> None:
    """Raises ValueError unless ``write_rows`` can write these sources into a state's tensors, as many rows of each."""
    if unknown := sorted(sources.keys() - targets.keys()):
        raise ValueError(f"state: got {', '.join(unknown)}; expected some of {', '.join(targets)}")
    for name, x in sources.items():
        if x.shape != (expected := (rows, *targets[name].shape[1:])):
            raise ValueError(f"state.{name}: got shape {tuple(x.shape)}, expected {expected}")
    check_writable({name: targets[name] for name in sources})


def write_rows(
    targets: Mapping[str, Tensor | None], sources: Mapping[str, Tensor | None], slots: Tensor | None
) -> None:
    """Copies each source into the target of its name: into the rows at the slots, or into all rows."""
    for name, source in sources.items():
        target = targets[name]
        if target is None or source is None or source is target:  # target itself: written in place before
            continue
        if slots is None:
            target.copy_(source)
        else:
            target.index_copy_(0, slots, source.to(target.dtype))


def check_slots(slots: object, rows: int, device: torch.device) -> None:
    """Raises unless slots is an integer tensor (b,) on the device whose numbers are different rows of a state."""
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int64, torch.int32):
        kind = slots.dtype if isinstance(slots, Tensor) else type(slots).__name__
        raise TypeError(f"slots: got {kind}, expected a torch.Tensor of int64 or int32")
    if slots.ndim != 1:
        raise ValueError(f"slots: got shape {tuple(slots.shape)}, expected (b,)")
    if slots.device != device:
        raise ValueError(f"slots: got device {slots.device}, expected {device}")
    if values_readable(slots):
        numbers = slots.tolist()
        if numbers and (len(set(numbers)) < len(numbers) or not 0 <= min(numbers) <= max(numbers) < rows):
            raise ValueError(f"slots: got {numbers}, expected different rows 0 .. {rows - 1}")


def rows_to_copy(index: Tensor, sequences: int, device: torch.device) -> Tensor:
    """index (b') as int64 on the device. Raises unless it counts a state's sequences, of which it may repeat some."""
    check_integer_tensors(index=index)
    if index.ndim != 1:
        raise ValueError(f"index: got shape {tuple(index.shape)}, expected (b,)")
    index = index.to(device).long()  # uint8 would select as a mask
    if values_readable(index) and index.numel() and not 0 <= index.min() <= index.max() < sequences:
        raise IndexError(f"index: got {index.tolist()}, expected numbers 0 .. {sequences - 1}")
    return index
