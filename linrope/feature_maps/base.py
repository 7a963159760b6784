"""The FeatureMap protocol: phi for queries, psi for keys."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Features (..., f), or of a log_scaled map also the logarithm (...) of what multiplies them.
Features: TypeAlias = Tensor | tuple[Tensor, Tensor]

DIGITS = 16  # of a digest in an identity
LARGEST = 1e38  # of a log_scale: the difference of two is finite in float32


class FeatureMap(nn.Module):
    """Maps head vectors to the features whose dot products replace exp(q.k).

    queries: phi, (..., d) -> (..., f);  keys: psi, (..., d) -> (..., f).

    Subclasses set ``feature_dim`` (f) and ``positive`` (<phi(x), psi(y)> >= 0 for all x, y, which the
    normalizer needs), and ``head_dim`` (d) where the map fits only one. ``elementwise`` names the
    function under which kernels apply the map while they load a tensor; it is None where the map must
    run before the kernel. A map acts on each token alone: one that looked along the sequence would leak
    the future.

    A ``log_scaled`` map returns (features, log_scale) and means e^log_scale * features, so that
    exponentials stay in range: log_scale is (...), without the last axis, float64, and a constant to the
    gradient, all of which the features carry. ``exponential`` makes such a pair of logits.

    A ``positional`` map needs to know where its tokens are: queries(q, positions), keys(k, positions)
    with x (b, n, h, d) and positions int64 (b or 1, n).

    ``identity`` tells apart two maps whose states must not be mixed; it goes into the state. It has the
    class, the ``settings``, and, of a map with parameters or buffers, "#" and a digest of their dtypes,
    shapes and bytes: equal contents have equal identities, however they came about, and a change of one
    bit changes it. Where no bytes can be read (in torch.compile and torch.export, on the meta device, of
    sharded tensors) "?" stands in place of the digest; ``same_identity`` compares. The digest is made
    anew after a change only, as torch counts changes: a write through ``.data`` is not seen. Fused optimizers
    write uncounted too, so it is also made anew after ``train`` and ``eval``, and after each use of the
    weights for which gradients are recorded (outside of compiled code).

    Raises:
        RuntimeError: ``identity`` of a map that was moved off the meta device by ``to_empty`` and has not
            been filled since, by ``reset_parameters`` or from a state dict.
    """

    head_dim: int | None = None
    feature_dim: int
    positive: bool
    positional: bool = False
    log_scaled: bool = False
    elementwise: str | None = None
    # The last digest, with tensors that keep the memory it was made of from being used again for others,
    # so that equal addresses and versions mean equal contents.
    _last: tuple[list[Tensor], list[tuple[Any, ...]], str] | None = None
    _unfilled: dict[str, tuple[int, str]] | None = None  # by name: version and digest after to_empty

    # What else a map takes depends on ``positional``: type checkers accept any here.
    def queries(self, q: Tensor, *args: Any, **kwargs: Any) -> Features:
        raise NotImplementedError

    def keys(self, k: Tensor, *args: Any, **kwargs: Any) -> Features:
        raise NotImplementedError

    def settings(self) -> str:
        """What tells two maps of this class apart beside their tensors."""
        return self.extra_repr()

    @property
    def identity(self) -> str:
        return f"{type(self).__name__}({self.settings()}){self._digest()}"

    def _digest(self) -> str:
        tensors = [*self.parameters(), *self.buffers()]
        if not tensors:
            return ""
        if torch.compiler.is_compiling() or not all(map(_readable, tensors)):
            return "#?"
        # torch counts no changes of inference tensors, nor those that fused optimizers make.
        training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        counted = not training and not any(x.is_inference() for x in tensors)
        now = [(x.data_ptr(), x._version, x.dtype, x.device, x.shape, x.stride()) for x in tensors if counted]
        last = self._last  # once: other threads may change it
        if counted and last is not None and last[1] == now:
            return last[2]
        self._check_filled()
        digest = f"#{_digest_of(tensors)}"
        self._last = ([x.detach() for x in tensors], now, digest) if counted else None
        return digest

    def train(self, mode: bool = True) -> "FeatureMap":
        self._last = None
        super().train(mode)
        return self

    def _check_filled(self) -> None:
        tensors = dict(self._named_tensors())
        for name, (version, digest) in (self._unfilled or {}).items():
            x = tensors[name]
            if not x.is_inference() and x._version == version and _digest_of([x]) == digest:
                raise RuntimeError(
                    f"{name}: empty since the map left the meta device; expected a call of "
                    "reset_parameters() or load_state_dict() first"
                )
        self._unfilled = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FeatureMap":
        virtual = [name for name, x in self._named_tensors() if x.is_meta]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if virtual:
            tensors = ((name, x) for name, x in self._named_tensors() if name in virtual)
            self._unfilled = {
                name: (x._version, _digest_of([x]))
                for name, x in tensors
                if _readable(x) and not x.is_inference()
            }
        return self

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_last"}


def same_identity(a: str, b: str) -> bool:
    """Whether the states of two maps may be mixed: equal, but "?" stands for any digest.

    >>> from linrope.feature_maps.base import same_identity
    >>> same_identity("T2R(4)#0123456789abcdef; None", "T2R(4)#?; None")
    True
    >>> same_identity("T2R(4)#0123456789abcdef; None", "T2R(4)#fedcba9876543210; None")
    False
    """
    if a == b:
        return True
    one, other = a.split("#"), b.split("#")
    return len(one) == len(other) and all(_same_part(x, y) for x, y in zip(one, other))


def _same_part(x: str, y: str) -> bool:
    """Of what stands between two "#" of identities."""
    if x == y:
        return True
    rests = [part[1:] if part[:1] == "?" else part[DIGITS:] for part in (x, y)]
    return "?" in (x[:1], y[:1]) and rests[0] == rests[1]


def _readable(x: Tensor) -> bool:
    """Whether x has bytes here: it is not fake, sharded, on the meta device or inside torch.func."""
    plain = type(x) in (Tensor, nn.Parameter) and not x.is_meta
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _digest_of(tensors: list[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def widen(x: Tensor) -> Tensor:
    """x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def at_most_0(x: Tensor) -> Tensor:
    """x, or a number whose exponential is 1, with slope 1 at 0: clamp's at its bound is 0 in PyTorch 2.15."""
    return x.clamp(max=torch.finfo(x.dtype).tiny)


def pad_to_even(x: Tensor) -> Tensor:
    """x (..., f), with a feature that is 0 after an odd number of them: a rotation turns pairs."""
    return F.pad(x, (0, 1)) if x.shape[-1] % 2 else x  # F.pad by nothing is a copy


def centre(logits: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits that are at most 0, and log_scale: e^log_scale e^centred = e^(logits + shared).

        log_scale = max_f logits + shared,   centred = logits - max_f logits

    logits (..., f); shared float64 (..., 1), or None for 0 -> centred (..., f) in float32 or wider,
    log_scale (...) float64. log_scale is a constant to the gradient; centred carries the gradients of
    logits and shared. log_scale is finite: of a token without finite logits +-1e38, or 0 where the
    maximum is no number. Such a token's features are 0 or no numbers; other tokens are not touched.
    """
    logits = widen(logits)
    top = _finite(logits.detach().amax(-1, keepdim=True))
    if shared is None:
        return logits - top, top.double().squeeze(-1)
    constant = shared.detach()
    # The difference is 0 and carries the gradient. In float64 shared loses no digits beside the maximum: a
    # key's weight is e^log_scale, and in float32 a log_scale of 150 would shift it by 1e-5.
    return logits - (top - (shared - constant).to(top.dtype)), _finite(top + constant).squeeze(-1)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0).clamp(-LARGEST, LARGEST)


def exponential(logits: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e^(logits + shared) as features from 0 to 1 and their log_scale; arguments as of ``centre``.

    >>> from linrope.feature_maps.base import exponential
    >>> features, log_scale = exponential(torch.tensor([[500.0, 499.0]]))
    >>> features, log_scale
    (tensor([[1.0000, 0.3679]]), tensor([500.], dtype=torch.float64))
    """
    centred, log_scale = centre(logits, shared)
    return centred.exp_(), log_scale
