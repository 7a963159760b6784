"""The methods that the operation and the layer call on a shard, one process's part of the tokens.

``linrope.distributed.Shard`` has them. It imports the operation, so the operation cannot import it.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import Unpack

from linrope.operation.options import Options
from linrope.recurrence.call import Call
from linrope.recurrence.state import LinearAttentionState


@runtime_checkable
class TokenShard(Protocol):
    """The part of each sequence that this process holds."""

    def attend(self, call: Call) -> tuple[Tensor, LinearAttentionState | None]:
        """Returns out for this process's tokens.

        If wanted, also the state after all tokens or, for packed sequences, the states of this rank's own sequences.
        """


def check_shard(shard: object) -> None:
    """Raises TypeError for what is no shard."""
    if not isinstance(shard, TokenShard):
        raise TypeError(f"shard: got {type(shard).__name__}, expected linrope.distributed.Shard or None")


class LayerShard(TokenShard, Protocol):
    """A shard that a layer can use."""

    def send_state(self, k: Tensor, v: Tensor, /, **options: Unpack[Options]) -> TokenShard:
        """Sends the state of these keys to the other processes. Pass the result as ``shard`` to the call with q."""

    def convolve(
        self,
        convolution: Callable[..., Any],
        x: Tensor,
        key_mask: Tensor | None,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Applies a ShortConvolution to x, after the inputs ``before``. Returns the result and the last inputs."""
