"""An encoder, a decoder and cross-attention between them, on linear attention with RoPE.

    encoder:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    decoder:  x = x + causal_attention(norm(x));  x = x + cross(norm(x), context);  x = x + mlp(norm(x))

Inputs and outputs are vectors (b, n, dim); the caller turns tokens, patches or frames into vectors. The decoder's state
has a constant size, with a context too.

    python docs/examples/encoder_decoder.py
"""

from typing import Any

import torch
from torch import Tensor, nn

from linrope import LinearRoPEAttention
from linrope.layer.state import LayerState
from linrope.models.language_model import SwiGLU

State = tuple[LayerState, LayerState | None]  # of a decoder block: of its tokens, and of the context


class EncoderBlock(nn.Module):
    """attention: options of LinearRoPEAttention."""

    def __init__(self, dim: int, heads: int, **attention: Any) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.attention = LinearRoPEAttention(dim, heads, causal=False, **attention)
        self.mlp = SwiGLU(dim, 4 * dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """key_mask (b, n) bool, False: padding. positions: with rotary={"axes": 2} rows and columns (n, 2)."""
        x = x + self.attention(self.attention_norm(x), key_mask=key_mask, positions=positions)
        return x + self.mlp(self.mlp_norm(x))


class DecoderBlock(nn.Module):
    """context_dim: the size of the context's vectors; None: no cross-attention.

    Attention to the context has no rotation, since the positions of the two sequences are unrelated.
    """

    def __init__(self, dim: int, heads: int, context_dim: int | None = None, **attention: Any) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.attention, self.mlp = LinearRoPEAttention(dim, heads, **attention), SwiGLU(dim, 4 * dim)
        self.context_dim = context_dim
        if context_dim is not None:
            self.cross_norm = nn.RMSNorm(dim, eps=1e-6)
            self.cross = LinearRoPEAttention(dim, heads, context_dim=context_dim, causal=False, rotary=None)

    def forward(
        self, x: Tensor, context: Tensor | None, context_mask: Tensor | None, state: State | None
    ) -> tuple[Tensor, State]:
        tokens, read = (None, None) if state is None else state
        y, tokens = self.attention(self.attention_norm(x), state=tokens, return_state=True)
        x = x + y
        if self.context_dim is not None:
            if context is None:  # the state has read it
                context = x.new_zeros(len(x), 0, self.context_dim)
            options = {"key_mask": context_mask, "state": read, "return_state": True}
            y, read = self.cross(self.cross_norm(x), context, **options)
            x = x + y
        return x + self.mlp(self.mlp_norm(x)), (tokens, read)


class Encoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, **attention: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, **attention) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, key_mask, positions)
        return self.norm(x)


class Decoder(nn.Module):
    """Reads a sequence at once in training, or continues from a state per block."""

    def __init__(
        self, dim: int, depth: int, heads: int, context_dim: int | None = None, **attention: Any
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads, context_dim, **attention) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        states: list[State] | None = None,
    ) -> tuple[Tensor, list[State]]:
        """With states, a context is appended to the context that they have read."""
        new = []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, context, context_mask, state)
            new.append(state)
        return self.norm(x), new


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    encoder, decoder = Encoder(64, 2, 4), Decoder(64, 2, 4, context_dim=64, decay="spread")
    context, x = encoder(torch.randn(1, 200, 64)), torch.randn(1, 20, 64)
    whole, _ = decoder(x, context)
    y, states = decoder(x[:, :10], context)
    pieces = [y]
    for token in x[:, 10:].split(1, 1):
        y, states = decoder(token, states=states)  # the states have read the context
        pieces.append(y)
    difference = (torch.cat(pieces, 1) - whole).abs().max()
    print(f"10 tokens and 10 steps are the whole sequence, to {difference:.0e}")
    print(f"each block's state has read {states[0][1].position.item()} vectors of context")


if __name__ == "__main__":
    main()
