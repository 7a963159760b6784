"""The decoding loop: from its second step on, a step goes straight to the kernel.

A step's kernel takes some microseconds. Checking and resolving every argument in Python takes several times as long.
So the first step that overwrites a donated state attaches a ``DecodingLoop`` to the state that it returns. The loop
holds the settings of that step, checked and resolved. If the next call passes the same objects as settings,
``DecodingLoop.step`` calls the kernel at once. The kernel checks the token's tensors itself, before it writes
anything. If any setting differs, ``step`` returns None, and ``linear_rope_attention`` makes an ordinary call, with
every check.

A loop may use decay (fixed or learned), gates (log_decay), angle_steps and write, in any combination. It requires the
native backend and a feature map that this backend applies itself. Gradients, explicit positions, masks and packed
sequences rule it out.
"""

from dataclasses import fields
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from linrope.backends import native
from linrope.backends.protocol import Backend
from linrope.common.private_names import forward_mode, watched
from linrope.operation.request import Request, Settings, TokenLayout
from linrope.recurrence.call import Call
from linrope.recurrence.decay import MIN_LOG_DECAY, clamp_gates
from linrope.recurrence.state import LinearAttentionState

_LAYOUT = tuple(field.name for field in fields(TokenLayout))
# All steps of a loop have the same Settings. Their TokenLayout is all None: including it here ends the loop when a call
# passes one of its fields.
_settings_of = itemgetter(*[field.name for field in fields(Settings)], *_LAYOUT)
_memory_of = attrgetter("kv", "z", "angle", "position")
_inputs_of = itemgetter("log_decay", "angle_steps", "decay", "write")


def loop_after(request: Request, call: Call, backend: Backend) -> "DecodingLoop | None":
    """The loop to attach to the next state. None: the next step requires the checks again."""
    state = request.state
    direct = (
        backend is native
        and state is not None
        and state.donated
        and state.slots is None
        and call.k.shape[1] == 1
        and call.causal
        and call.q is request.q  # Python applied neither a feature map nor an attention factor
        and call.k is request.k
        and all(getattr(request, name) is None for name in _LAYOUT)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
    return DecodingLoop(request, call) if direct else None


class DecodingLoop:
    """The settings that all steps of one decoding loop share, checked and resolved by its first step."""

    def __init__(self, request: Request, call: Call) -> None:
        assert request.state is not None
        self.state = request.state  # its dtypes and its memory were checked
        self.settings = _settings_of(vars(request))
        self.has_gates = request.log_decay is not None
        self.has_angle_steps = request.angle_steps is not None
        self.has_write = request.write is not None
        # PyTorch does not count every write to a tensor, so decay is compared by value.
        self.decay = None if request.decay is None else request.decay.tolist()
        self.log_decay = None  # (1, 1, g): log gamma, without the gates
        if request.decay is not None:
            self.log_decay = request.decay.double().log().clamp(min=MIN_LOG_DECAY)[None, None]
        self.prepared = native.PreparedStep(call, request.state)

    def step(self, state: LinearAttentionState, arguments: dict[str, Any]) -> Tensor | None:
        """Computes out and overwrites the state with the next one. None: not a step of this loop; nothing is written.

        arguments: the fields of a ``Request`` by name, except state and return_state.
        """
        log_decay, angle_steps, decay, write = _inputs_of(arguments)
        if not state.donated or not all(map(is_, _memory_of(state), _memory_of(self.state))):
            return None
        if self.has_gates != (log_decay is not None) or self.has_angle_steps != (angle_steps is not None):
            return None
        if self.has_write != (write is not None):
            return None
        if not all(map(is_, _settings_of(arguments), self.settings)):
            return None
        if torch.is_grad_enabled() or watched() or forward_mode():
            return None
        try:
            if (None if decay is None else decay.tolist()) != self.decay:
                return None
            if self.log_decay is not None and log_decay is not None:
                if float(log_decay.max()) > 0:  # the kernel would see the sum only
                    return None
                log_decay = clamp_gates(log_decay) + self.log_decay
            elif self.log_decay is not None:
                log_decay = self.log_decay
            token = {"q": arguments["q"], "k": arguments["k"], "v": arguments["v"], "write": write}
            token |= {"log_decay": log_decay, "angle_steps": angle_steps}
            return self.prepared(token)
        except (RuntimeError, ValueError, TypeError, AttributeError):  # the ordinary call then raises
            return None
