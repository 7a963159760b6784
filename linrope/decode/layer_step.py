"""A layer's decoding step with a state of its own, checked once."""

import torch
from torch import Tensor

from linrope.common.writable import check_slots
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.state import LayerState
from linrope.layer.step import LayerStep


class PreparedLayer:
    """Runs a LinearRoPEAttention on one token of each sequence, and overwrites the state in place.

    ``prepare`` makes it, and says what it is for.
    """

    def __init__(self, layer: LinearRoPEAttention, state: LayerState) -> None:
        self.state, self._step, self._dim = state, LayerStep(layer), layer.embed_dim
        self._memory = [
            state.sums.kv,
            state.sums.z,
            state.position,
            *([] if state.conv is None else [state.conv]),
        ]

    @torch.no_grad()
    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x (b, 1, embed_dim) -> y of the same shape. Overwrites the state with the next one.

        slots (b,) int64, all different: the row of the state for each sequence of this call. Default: all rows.
        """
        rows = len(self.state.position)
        if slots is not None:
            check_slots(slots, rows, self.state.position.device)
            slots = slots.long().contiguous()
        expected = rows if slots is None else len(slots), 1, self._dim
        if x.shape != expected or x.dtype != torch.float32:
            raise ValueError(f"x: got {x.dtype} {tuple(x.shape)}, expected torch.float32 {expected}")
        return self.of_rows(x, slots)

    def of_rows(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """The step without checks: x (b, 1, embed_dim) or (b, embed_dim), contiguous float32."""
        return self._step(x, self._memory, slots)
