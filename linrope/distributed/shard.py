"""The public object of this package: the shard of a batch that a process holds."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from linrope.distributed.attend import SentState, send_state
from linrope.distributed.convolve import convolve_shard
from linrope.distributed.layout import Layout
from linrope.operation.options import Options
from linrope.recurrence.call import Call
from linrope.recurrence.state import LinearAttentionState


class Shard(Layout):
    """The contiguous part of each sequence that this process of a group holds. Make one per batch.

        rank r holds lengths[r] tokens, from token lengths[0] + .. + lengths[r - 1] on

    Pass it as ``shard=`` to ``linear_rope_attention``, the layer and the models, together with the tensors of this
    rank's tokens. Outputs, positions, states and gradients are then those of one process with all tokens. The ranks
    send one state each in the forward pass (two in bidirectional calls of packed sequences) and its gradient in the
    backward pass, whatever the lengths. With erase the states pass from rank to rank, one head after the other. In a
    group of one nothing is sent, and the result is bit for bit that of a call without shard. Each rank has a copy of
    the parameters, and their gradient is the sum of the ranks' gradients, as for parts of a batch.

    Args:
        group: a process group; or a DeviceMesh of one dimension or with a dimension named "cp"; or None for all
            processes (this one alone if there is no process group).
        lengths: the number of tokens of each rank. All ranks pass the same list, which may contain 0.
        cu_seqlens: (s + 1,) integers, the bounds of packed sequences among all ranks' tokens. ``shard.cu_seqlens``
            has the local bounds. Do not pass cu_seqlens to calls that get the shard.

    Raises:
        TypeError: lengths or cu_seqlens are not integers.
        ValueError: there are not as many lengths as ranks, cu_seqlens do not rise from 0 to the sum of lengths, or a
            mesh of several dimensions lacks "cp". The first call raises on every rank if the ranks' arguments to the
            shard or to the call differ.

    Source: the all-gather of states of LASP-2, arXiv 2502.07563.

    >>> from linrope.distributed import Shard
    >>> tokens = torch.randint(256, (1, 10))
    >>> shard = Shard(lengths=[10])  # without a process group: a group of one
    >>> shard.take(tokens).shape, shard.targets(tokens)[0, -1]
    (torch.Size([1, 10]), tensor(-100))
    """

    def attend(self, call: Call) -> tuple[Tensor, LinearAttentionState | None]:
        """Returns out for this process's tokens.

        If wanted, also the state after all tokens or, for packed sequences, the states of this rank's own sequences.
        """
        return send_state(call, self).attend(call)

    def send_state(self, k: Tensor, v: Tensor, /, **options: Unpack[Options]) -> SentState:
        """Begins a call by sending the state of the keys. Pass the result as ``shard`` to the call with q.

        Work between the two calls overlaps with the communication. With erase only positions and angles are sent
        here. The options are those of ``linear_rope_attention``.
        """
        return send_state(Call(q=None, k=k, v=v, **options), self)

    def convolve(
        self,
        convolution: Callable[..., Any],
        x: Tensor,
        key_mask: Tensor | None,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Applies a ``ShortConvolution`` to the local x (b, n, c). Also returns the last inputs.

        before (s, taps - 1, c): the inputs before the whole sequences; None: zeros. The last inputs are those of all
        ranks' tokens or, for packed sequences, of each local sequence.
        """
        return convolve_shard(convolution, x, self, key_mask, before)
