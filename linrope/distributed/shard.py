"""The shard of a batch that a process holds: the public object of this package."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from linrope.distributed.attend import SentState, send_state
from linrope.distributed.convolve import convolve_shard
from linrope.distributed.layout import Layout
from linrope.operation.request import Options, Request
from linrope.sequence.state import LinearAttentionState


class Shard(Layout):
    """The contiguous part of each sequence that this process of a group holds: made once per batch.

        rank r holds the tokens lengths[0] + .. + lengths[r - 1] .. + lengths[r] - 1

    Given as ``shard=`` to ``linear_rope_attention``, the layer and the models, with the tensors of these
    tokens: outputs, positions, states and gradients are then those of one process with all tokens. What the
    ranks send each other is one state each, forward and backward, whatever the lengths. In a group of one
    nothing is sent, and the bits are those of a call without shard. Parameters are copies on each rank: the
    sum of their gradients over the ranks is the gradient, as for parts of a batch.

    Args:
        group: a process group; a DeviceMesh of one dimension or with one that is named "cp"; None: all
            processes, or this one alone where there is no process group.
        lengths: tokens of each rank, the same list everywhere; 0 is allowed.
        cu_seqlens: (s + 1,) integers of packed sequences, of all ranks' tokens. The local ones are
            ``shard.cu_seqlens``, and calls are given none beside the shard.

    Raises:
        ValueError: as many lengths as ranks were expected; cu_seqlens that do not rise from 0 to their sum;
            a mesh of several dimensions without "cp". At the first call, on every rank: ranks that differ in
            what they were given here or there.

    Source: the all-gather of states of LASP-2, arXiv 2502.07563.

    >>> from linrope.distributed import Shard
    >>> tokens = torch.randint(256, (1, 10))
    >>> shard = Shard(lengths=[10])  # without a process group: a group of one
    >>> shard.take(tokens).shape, shard.targets(tokens)[0, -1]
    (torch.Size([1, 10]), tensor(-100))
    """

    def attend(self, request: Request) -> tuple[Tensor, LinearAttentionState | None]:
        """out of this process's tokens, and the last state of all tokens if it is wanted."""
        return send_state(request, self).attend(request)

    def send_state(self, k: Tensor, v: Tensor, /, **options: Unpack[Options]) -> SentState:
        """Begins a call: sends the state of the keys. Give the result to the call as ``shard``, with q.

        What is computed in between does not wait for the other processes. Options as in ``linear_rope_attention``.
        """
        return send_state(Request(q=None, k=k, v=v, **options), self)

    def convolve(
        self,
        convolution: Callable[..., Any],
        x: Tensor,
        key_mask: Tensor | None,
        state: LinearAttentionState | None,
    ) -> tuple[Tensor, Tensor]:
        """A ``ShortConvolution`` of the local x (b, n, c), and the last inputs of all tokens."""
        return convolve_shard(convolution, x, self, key_mask, state)
