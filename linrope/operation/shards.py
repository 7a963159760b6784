"""What the operation and the layer expect of a shard, a process's part of the tokens.

``linrope.distributed.Shard`` is one. It stands on the operation, which does not import it.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import Unpack

from linrope.operation.request import Options, Request
from linrope.sequence.state import LinearAttentionState


@runtime_checkable
class TokenShard(Protocol):
    """The part of each sequence that this process holds."""

    def attend(self, request: Request) -> tuple[Tensor, LinearAttentionState | None]:
        """out of this process's tokens, and the last state of all tokens if it is wanted."""


class LayerShard(TokenShard, Protocol):
    """A shard that a layer can use."""

    def send_state(self, k: Tensor, v: Tensor, /, **options: Unpack[Options]) -> TokenShard:
        """Sends the state of the keys to the other processes. The result stands for the shard in the call with q."""

    def convolve(
        self,
        convolution: Callable[..., Any],
        x: Tensor,
        key_mask: Tensor | None,
        state: LinearAttentionState | None,
    ) -> tuple[Tensor, Tensor]:
        """A ShortConvolution of x, and its last inputs."""
