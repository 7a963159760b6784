"""What a backend is: the module-level names that ``linrope.backends`` expects of each of the four."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from linrope.backends.call import Call, Gradients, Results, Sums
from linrope.sequence.state import LinearAttentionState


class Backend(Protocol):
    """Computes a call. A module with these names is a backend."""

    @property
    def MAPS(self) -> Mapping[str, Any]:
        """The elementwise maps that it applies to q and k itself, by name."""

    def why_not(self) -> str | None:
        """Why it can run no call at all on this machine; None: it can."""

    def supports(self, call: Call, state: LinearAttentionState | None) -> str | None:
        """Why it cannot run this call; None: it can."""

    def attend(self, call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
        """out (b, n, h, e) in v's dtype, and the sums after the last key if ``call.want_state``.

        Without gradients it may write into the memory of a donated state or of a pool's rows. The sums are then
        the state's own tensors.
        """


class ChunkedBackend(Backend, Protocol):
    """A backend with a backward pass of its own; ``operators.attend`` gives it autograd and torch.compile."""

    def forward(self, call: Call, sums: Sums | None, save: bool) -> Results:
        """out, the last kv and z if wanted, and the tensors that the backward pass needs if ``save``."""

    def backward(
        self,
        call: Call,
        sums: Sums | None,
        results: list[Tensor],
        g_out: Tensor | None,
        g_kv: Tensor | None,
        g_z: Tensor | None,
    ) -> Gradients:
        """The gradients. results: what forward saved, after out, kv and z if it reads them."""

    def new_saved(self, call: Call) -> list[Tensor]:
        """Empty tensors with the shapes and dtypes of what forward saves."""

    def reads_results(self, call: Call) -> bool:
        """Whether the backward pass needs out, kv and z."""
