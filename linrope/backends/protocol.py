"""The names that each module of ``linrope.backends.BACKENDS`` defines."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from linrope.recurrence.call import Call, Gradients, ResultGradients, Results, Sums
from linrope.recurrence.state import LinearAttentionState

# The options that all of linrope's own backends compute, and those of xPos.
COMMON = frozenset(
    (
        *(
            "log_decay",
            "angle_steps",
            "write",
            "key_positions",
            "key_mask",
            "cu_seqlens",
            "causal",
            "normalize",
        ),
        *("eps", "eps_mode", "return_state", "theta_turns", "layout"),
    )
)
XPOS = frozenset(("xpos_log_decay", "distances"))


class Backend(Protocol):
    """Computes a call. A module with these names is a backend."""

    @property
    def MAPS(self) -> Mapping[str, Any]:
        """The elementwise maps that the backend can apply to q and k, by name."""

    @property
    def OPTIONS(self) -> Collection[str]:
        """The optional fields of ``Call`` that the backend computes. It gets no call that has another."""

    @property
    def TAKES_VALUE_GROUPS(self) -> bool:
        """True: the backend takes v with more heads than q and k, and ``write``. False: it gets ``call.expanded()``."""

    @property
    def CLAMPS_GATES(self) -> bool:
        """True: the backend clamps log_decay to MIN_LOG_DECAY itself. False: it never gets lower gates."""

    def why_not(self) -> str | None:
        """The reason why the backend cannot run on this machine; None: it can."""

    def why_not_call(self, call: Call, state: LinearAttentionState | None) -> str | None:
        """The reason why the backend cannot run this call; None: it can."""

    def attend(self, call: Call, state: LinearAttentionState | None) -> tuple[Tensor, Sums | None]:
        """out (b, n, h, e) in v's dtype, and the sums after the last key if ``call.return_state``.

        Without gradients the backend may write into a donated state or a pool's rows. It then returns the state's
        own tensors as the sums.
        """


class ChunkedBackend(Backend, Protocol):
    """A backend with a backward pass of its own; ``bridge.attend`` gives it autograd and torch.compile."""

    def forward(self, call: Call, sums: Sums | None, save: bool) -> Results:
        """out, the last kv and z if wanted, and the tensors that the backward pass needs if ``save``."""

    def backward(self, call: Call, sums: Sums | None, saved: list[Tensor], g: ResultGradients) -> Gradients:
        """The gradients. saved: out, kv and z if ``reads_results``, then the tensors that ``forward`` saved."""

    def new_saved(self, call: Call) -> list[Tensor]:
        """Empty tensors with the shapes and dtypes of those that ``forward`` saves."""

    def reads_results(self, call: Call) -> bool:
        """True if ``backward`` requires out, kv and z."""
