"""Identities of feature maps: strings that a state keeps, so that another map rejects it.

An identity is the name of the class, the settings, and "#" with a digest of the dtypes, shapes and bytes of all
parameters and buffers. The name of a class outside of linrope has its module. Equal contents have equal digests; a
change of one bit changes the digest. "?" stands for a digest where no bytes can be read: in torch.compile and
torch.export, on the meta device, and of sharded tensors.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linrope.common.class_names import name_of
from linrope.common.private_names import is_functorch_wrapped_tensor, version_of
from linrope.recurrence.identities import DIGITS


class Identified(nn.Module):
    """A module with an ``identity``, whose digest is cached until the contents change.

    torch's version counters show changes, except writes through ``.data`` and those of fused optimizers. The
    cache is therefore dropped by ``train`` and ``eval`` too, and not used while gradients are recorded.
    """

    # The digest, and what it was made from. Holding the tensors keeps their memory from being reused, so that
    # equal addresses and versions mean equal contents.
    _last: tuple[list[Tensor], list[tuple[Any, ...]], str] | None = None
    _unfilled: dict[str, tuple[int, str]] | None = None  # name -> version and digest after to_empty

    def settings(self) -> str:
        """The options that tell apart two maps of this class with the same tensors."""
        return self.extra_repr()

    @property
    def identity(self) -> str:
        return f"{name_of(type(self))}({self.settings()}){self._digest()}"

    def forget_digest(self) -> None:
        """Makes the next identity read all tensors again."""
        self._last = None

    def _digest(self) -> str:
        tensors = [*self.parameters(), *self.buffers()]
        if not tensors:
            return ""
        if torch.compiler.is_compiling() or not all(map(_has_bytes, tensors)):
            return "#?"
        # torch does not count changes of inference tensors, nor those that fused optimizers make.
        training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        cacheable = not training and not any(x.is_inference() for x in tensors)
        key = [_version_of(x) for x in tensors] if cacheable else []
        last = self._last  # read once: other threads may change it
        if cacheable and last is not None and last[1] == key:
            return last[2]
        self._check_filled()
        digest = f"#{_digest_of(tensors)}"
        self._last = ([x.detach() for x in tensors], key, digest) if cacheable else None
        return digest

    def train(self, mode: bool = True) -> "Identified":
        self.forget_digest()
        super().train(mode)
        return self

    def _check_filled(self) -> None:
        tensors = dict(self._named_tensors())
        for name, (version, digest) in (self._unfilled or {}).items():
            x = tensors[name]
            if not x.is_inference() and version_of(x) == version and _digest_of([x]) == digest:
                raise RuntimeError(
                    f"{name}: empty since the map left the meta device; expected a call of "
                    "reset_parameters() or load_state_dict() first"
                )
        self._unfilled = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Identified":
        on_meta = {name for name, x in self._named_tensors() if x.is_meta}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if on_meta:
            self._unfilled = {
                name: (version_of(x), _digest_of([x]))
                for name, x in self._named_tensors()
                if name in on_meta and _has_bytes(x) and not x.is_inference()
            }
        return self

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_last"}


def _has_bytes(x: Tensor) -> bool:
    """False for tensors that are fake, sharded, on the meta device or inside torch.func."""
    plain = type(x) in (Tensor, nn.Parameter) and not x.is_meta
    return plain and not is_functorch_wrapped_tensor(x)


def _version_of(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), version_of(x), x.dtype, x.device, x.shape, x.stride()


def _digest_of(tensors: list[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
