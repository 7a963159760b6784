"""The change of a state by a segment of tokens: S -> M S + N.

N is what the segment's tokens write. M, its ``Transition``, is what they leave of the state before them. Two segments
in a row are one segment: (M_2, N_2) after (M_1, N_1) = (M_2 M_1, M_2 N_1 + N_2). The gradient T of the state goes back
by the adjoint, T -> M^T T + N', where N' is what the segment's queries add. A segment may be a chunk, a call, or the
tokens of a rank.

t segment, s sequence; S (t, g, f, e) or z (t, g, f).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from linrope.recurrence.chunks import Cut


@dataclass(frozen=True)
class Transition:
    """M = Diag(e^log): each row of the state, which belongs to a feature, decays.

    M^T, which takes the gradient of the state after the segment to that of the state before it, is M.
    """

    log: Tensor | None  # (.., g or 1, f or 1): what the tokens' log decays sum up to; None: M = 1

    def apply(self, state: Tensor) -> Tensor:
        """M S. The factor is its rounded value plus the rest, or every segment would add the same rounding error."""
        if self.log is None:
            return state
        factor = self.log.view(*self.log.shape, *[1] * (state.ndim - self.log.ndim)).double().exp()
        high = factor.to(state.dtype)
        return torch.addcmul(state * high, state, (factor - high).to(state.dtype))

    def after(self, earlier: "Transition") -> "Transition":
        """M M_earlier, for two segments in a row."""
        if self.log is None or earlier.log is None:
            return earlier if self.log is None else self
        return Transition(self.log + earlier.log)

    def __getitem__(self, segments: slice) -> "Transition":
        return self if self.log is None else Transition(self.log[segments])

    def flip(self) -> "Transition":
        """The transitions of the segments from the last to the first."""
        return self if self.log is None else Transition(self.log.flip(0))


def scan(transition: Transition, added: Tensor, begins: Tensor) -> Tensor:
    """The state after each segment: S_t = M_t S_(t-1) + N_t, or N_t where a sequence begins.

    Computed over pairs of segments, pairs of pairs, .. added: N (t, ..), begins (t,).
    """
    if len(added) < 2:
        return added
    first, second, rest = slice(0, len(added) // 2 * 2, 2), slice(1, None, 2), slice(2, None, 2)

    def carried(states: Tensor, segments: slice) -> Tensor:
        starts = begins[segments].view(-1, *[1] * (added.ndim - 1))
        return transition[segments].apply(states).masked_fill(starts, 0)

    both = transition[second].after(transition[first])
    states = torch.empty_like(added)
    states[second] = scan(both, added[second] + carried(added[first], second), begins[first] | begins[second])
    states[:1] = added[:1]
    states[rest] = added[rest] + carried(states[1 : len(added) - 1 : 2], rest)
    return states


def states_around(
    transition: Transition, added: Tensor, cut: Cut, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The states before and after each chunk. first (s, ..): the state before each sequence; None: 0."""
    starts = cut.begins.view(-1, *[1] * (added.ndim - 1))
    if first is None:
        incoming = torch.zeros_like(added)
    else:
        incoming = first.to(added.dtype)[cut.owner].masked_fill(~starts, 0)
        added = added + transition.apply(incoming)
    after = scan(transition, added, cut.begins)
    return torch.where(starts, incoming, after.roll(1, 0)), after


def gradients_around(
    transition: Transition, added: Tensor, cut: Cut, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of the states after and before each chunk: ``states_around``, from the last chunk to the first.

    added: N', what each chunk adds to the gradient. last (s, ..): the gradient of the last state; None: 0.
    """
    after, before = states_around(transition.flip(), added.flip(0), cut.reverse(), last)
    return after.flip(0), before.flip(0)
