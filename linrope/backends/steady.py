"""Calls of the backend native that differ in their numbers alone: without a state, at positions 0, 1, 2 ..

Those of a training run are such calls. A short one takes less time to compute than to turn into a ``Call`` for backends
and into the arguments of an operator. So its tensors go to the kernels as they are, and what all share is put together
once.
"""

from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from linrope.backends import bridge, library, native
from linrope.backends.value_columns import parts_of
from linrope.common.private_names import transformed
from linrope.recurrence.call import INPUTS, Call, Sums, contiguous, dense_heads, summed_to, with_dense_rows
from linrope.recurrence.decay import clamp_gates, through_clamp

# The tensors that differ, those with gradients first
_PER_CALL = ("q", "k", "v", "log_decay", "write", "erase", "key_mask")
_SAVED = ("saved_kv", "saved_z", "saved_u")


def covers(call: Call) -> bool:
    """True if ``Steady`` computes such calls. ``call`` is one as backends get it, without a state."""
    if call.key_mask is not None and not (call.log_decay is call.erase is None):
        return False  # a mask would change these tensors
    others = [name for name in INPUTS if name not in _PER_CALL]
    return all(getattr(call, name) is None for name in others) and call.k.numel() > 0


class Steady:
    """Computes calls like ``call``, which is as a backend gets it."""

    def __init__(self, call: Call) -> None:
        self._names = names = [name for name in _PER_CALL if getattr(call, name) is not None]
        self._tensors_of = attrgetter(*names)
        self._inputs = sum(name in INPUTS for name in names)
        self._heads = sum(name in ("q", "k", "v") for name in names)
        self._call = call.changed(**dict.fromkeys(_PER_CALL))  # a plan must not keep tensors alive
        self._has_gates, self._erases = call.log_decay is not None, call.erase is not None
        self._shares_heads, self._by_unit = call.value_group > 1, call.decays_by_unit
        self.results, self.lacks_z = 3 if call.return_state else 1, call.return_state and self._erases
        shared = native.settings(call) | native.positions(call) | {"causal": call.causal}
        of_forward = shared | {"want_state": call.return_state, "save": False}
        self.compute = library.Prepared("forward", of_forward, names)
        self.compute_and_save = library.Prepared("forward", of_forward | {"save": True}, names)
        wanted = {f"want_{name}": name in names for name in ("log_decay", "write", "erase")}
        self._saved = native.saved_states(call) + ["saved_u"] * self._erases
        self._gradients = ["g_out", "g_kv", "g_z"][: min(self.results, 3 - self._erases)]
        self._backward = library.Prepared(
            "backward", shared | wanted, [*names, *self._saved, *self._gradients]
        )
        results = library.result_names("backward")
        self._of_inputs = itemgetter(*[results.index(name) for name in names[: self._inputs]])

    def __call__(self, call: Call, clamps: bool) -> tuple[Tensor, Sums | None]:
        """out and, if wanted, the last sums. clamps: some gates may be below MIN_LOG_DECAY."""
        tensors = self._tensors_of(call)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors[: self._inputs]):
            results = _WithGradients.apply(self, clamps, *tensors)  # type: ignore[no-untyped-call]
        else:
            given = self.for_kernel(tensors, clamps)
            if self._erases and not self._by_unit and parts_of(call) > 1:
                return native.attend(self._call.changed(**dict(zip(self._names, given))), None)
            results = self.compute(*given)
            results = self.with_z(results) if self.lacks_z else results
        return results[0], Sums(results[1], results[2], None) if self.results == 3 else None

    def with_z(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of a kernel that has made a state without z, which is zeros then."""
        out, kv, _, *saved = results
        return out, kv, kv.new_zeros(kv.shape[:-1], dtype=torch.float64), *saved

    def for_kernel(self, tensors: tuple[Tensor, ...], clamps: bool) -> tuple[Tensor, ...]:
        """The tensors of a call as the kernels require them: q, k and v with a last stride of 1, gates in range."""
        heads = self._heads
        if self._has_gates:
            gates = tensors[heads]
            if clamps or gates.dtype.itemsize < 4:
                tensors = *tensors[:heads], clamp_gates(gates), *tensors[heads + 1 :]
        return dense_heads(tensors, heads)

    def gradients(
        self, kept: tuple[Tensor, ...], clamps: bool, g: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        """The gradients of the call's tensors. kept: these, then what the kernel saved."""
        count, heads = len(self._names), self._heads
        given, saved = kept[:count], kept[count:]
        passed = self.for_kernel(given, clamps)
        if transformed() or torch.is_grad_enabled():
            found = self._gradients_by_operator(passed, saved, g)
        else:
            found = self._gradients_by_kernel(passed, saved, g)
        if self._has_gates:
            gradient, gates = found[heads], given[heads]
            assert gradient is not None
            gradient = through_clamp(gradient, gates) if clamps else gradient
            found[heads] = gradient.to(gates.dtype)
        return found

    def _gradients_by_kernel(
        self, given: tuple[Tensor, ...], saved: tuple[Tensor, ...], g: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        g_out, *g_state = g[: len(self._gradients)]
        if g_out is not None:
            g_out = with_dense_rows(g_out)
        found = [*self._of_inputs(self._backward(*given, *saved, g_out, *map(contiguous, g_state)))]
        heads = self._heads
        if self._shares_heads:
            found[:heads] = [native.sum_of_heads(x, like) for x, like in zip(found[:heads], given)]
        if self._has_gates and not self._by_unit:
            found[heads] = found[heads].squeeze(3)
        for i in range(heads, len(found)):
            found[i] = summed_to(found[i], given[i])
        return found if len(found) == len(given) else [*found, None]

    def _gradients_by_operator(
        self, given: tuple[Tensor, ...], saved: tuple[Tensor, ...], g: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        """The same as the registered operator computes them: in torch.func, and with create_graph=True."""
        call = self._call.changed(**dict(zip(self._names, given)))
        arguments = bridge.flatten("native", call, None)
        named = dict(zip(self._saved, saved))
        kept = native.filled(call, map(named.get, _SAVED))
        found = bridge.ATTEND.gradients_by_operator(arguments, kept, (*g, None, None)[:3])
        by_input = dict(zip(INPUTS, found))
        return [by_input.get(name) for name in self._names]


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steady: Steady, clamps: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Any, ...] = steady.compute_and_save(*steady.for_kernel(tensors, clamps))
        results = steady.with_z(results) if steady.lacks_z else results
        ctx.save_for_backward(*tensors, *[x for x in results[3:] if x is not None])
        ctx.steady, ctx.clamps = steady, clamps
        ctx.set_materialize_grads(False)
        return results[: steady.results]

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Any:
        return None, None, *ctx.steady.gradients(ctx.saved_tensors, ctx.clamps, g)
