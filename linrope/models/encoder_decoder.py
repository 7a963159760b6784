"""An encoder, a decoder and cross-attention between them, on linear attention with RoPE, in one file.

    encoder:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    decoder:  x = x + causal_attention(norm(x));  x = x + cross(norm(x), context);  x = x + mlp(norm(x))

Inputs and outputs are vectors (b, n, dim); the caller turns tokens, patches or frames into vectors. A decoder
without context is the trunk of a language model. Its state has a constant size, with a context too.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import Unpack

from linrope.common.argument_checks import check_bools
from linrope.common.keywords import PYTORCH, check_keywords, shows
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.config import DEFAULTS
from linrope.layer.fitting import check_vectors
from linrope.layer.norm import RMSNorm
from linrope.layer.state import LayerState
from linrope.layer.typed_options import BlockOptions
from linrope.models.language_model import SwiGLU


class DecoderState(NamedTuple):
    """The states of a decoder block: one for its tokens, one for the context."""

    tokens: LayerState
    context: LayerState | None


_OPTIONS = {name: default for name, default in DEFAULTS.items() if name != "context_dim"} | {
    "device": None,
    "dtype": None,
}


_FIXED = "nothing: the network inside is SwiGLU, 4 dim wide, behind an RMS norm"
_INSTEAD = PYTORCH | {
    **dict.fromkeys(("d_model", "embed_dim", "hidden_size"), "dim"),
    **dict.fromkeys(("nhead", "num_heads"), "heads"),
    "num_layers": "depth",
    **dict.fromkeys(("dim_feedforward", "hidden_dim", "activation", "norm_first", "layer_norm_eps"), _FIXED),
}


def _factory(attention: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a LinearRoPEAttention that a linear layer and a norm have too.

    Raises TypeError if attention has others than those of a LinearRoPEAttention.
    """
    check_keywords("LinearRoPEAttention", attention, [*_OPTIONS], _INSTEAD)
    return {name: attention[name] for name in ("device", "dtype") if name in attention}


def _check_causal(attention: Mapping[str, Any], expected: bool, instead: str) -> None:
    """Raises unless causal is what the module requires, or absent; instead: what to use for the other value."""
    causal = attention.get("causal", expected)
    check_bools(causal=causal)
    if causal != expected:
        raise ValueError(f"causal={causal}: expected {expected}, or {instead}")


class EncoderBlock(nn.Module):
    """Bidirectional attention and a feed-forward network, each behind a norm and in a residual connection.

    Args:
        dim: the size of the vectors.
        heads: the number of heads, a divisor of dim.
        **attention: further arguments of LinearRoPEAttention, such as feature_map, rotary or num_kv_heads. All parts
            have its device and dtype.
    """

    @shows(_OPTIONS)
    def __init__(self, dim: int, heads: int, **attention: Unpack[BlockOptions]) -> None:
        super().__init__()
        factory = _factory(attention)
        _check_causal(attention, False, "DecoderBlock(dim, heads), which sees the past alone")
        self.attention_norm = RMSNorm(dim, eps=1e-6, **factory)
        self.attention = LinearRoPEAttention(dim, heads, **(attention | {"causal": False}))
        self.feed_forward_norm = RMSNorm(dim, eps=1e-6, **factory)
        self.feed_forward = SwiGLU(dim, 4 * dim, **factory)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """x (b, n, dim) -> the same shape; key_mask (b, n) bool, False: padding; positions as in the attention."""
        x = x + self.attention(self.attention_norm(x), key_mask=key_mask, positions=positions)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class DecoderBlock(nn.Module):
    """Causal attention, attention to a context and a feed-forward network.

    Each is behind a norm and inside a residual connection. Attention to the context has no rotation, since
    the positions of the two sequences are unrelated.

    Args:
        dim: the size of the vectors.
        heads: the number of heads, a divisor of dim.
        context_dim: the size of the context's vectors; None: no cross-attention.
        **attention: further arguments of the causal LinearRoPEAttention, including decay and gates. The cross-attention
            has the same feature_map, normalize and backend, and all parts the same device and dtype.
    """

    @shows(_OPTIONS)
    def __init__(
        self, dim: int, heads: int, context_dim: int | None = None, **attention: Unpack[BlockOptions]
    ) -> None:
        super().__init__()
        factory = _factory(attention)
        _check_causal(attention, True, "EncoderBlock(dim, heads), which sees all tokens")
        self.attention_norm = RMSNorm(dim, eps=1e-6, **factory)
        self.attention = LinearRoPEAttention(dim, heads, **attention)
        self.cross_norm = self.cross = None
        if context_dim is not None:
            names = ("feature_map", "normalize", "backend")
            shared = factory | {name: x for name, x in attention.items() if name in names}
            self.cross_norm = RMSNorm(dim, eps=1e-6, **factory)
            self.cross = LinearRoPEAttention(
                dim, heads, context_dim=context_dim, causal=False, rotary=None, **shared
            )
        self.feed_forward_norm = RMSNorm(dim, eps=1e-6, **factory)
        self.feed_forward = SwiGLU(dim, 4 * dim, **factory)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        state: DecoderState | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """x (b, n, dim), context (b, m, context_dim) -> (b, n, dim), and the state after both."""
        tokens_state, context_state = (None, None) if state is None else state
        y, tokens_state = self.attention(self.attention_norm(x), state=tokens_state, return_state=True)
        x = x + y
        if self.cross is not None and self.cross_norm is not None:
            if context is None:  # the state holds it already
                context = x.new_zeros(len(x), 0, self.cross.context_dim)
            y, context_state = self.cross(
                self.cross_norm(x), context, key_mask=context_mask, state=context_state, return_state=True
            )
            x = x + y
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x, DecoderState(tokens_state, context_state)


class Encoder(nn.Module):
    """A stack of EncoderBlocks and a norm.

    Args:
        dim: the size of the vectors.
        depth: the number of blocks.
        heads: the number of heads, a divisor of dim.
        **attention: further arguments of LinearRoPEAttention. All parts have its device and dtype.

    Raises:
        ValueError: causal=True. A Decoder without context_dim is the causal stack of such blocks.

    >>> from linrope.models.encoder_decoder import Encoder
    >>> Encoder(dim=32, depth=2, heads=4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    @shows(_OPTIONS)
    def __init__(self, dim: int, depth: int, heads: int, **attention: Unpack[BlockOptions]) -> None:
        super().__init__()
        self.dim, factory = dim, _factory(attention)
        instead = "Decoder(dim, depth, heads), which sees the past alone and returns y and its states"
        _check_causal(attention, False, instead)
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, **attention) for _ in range(depth))
        self.norm = RMSNorm(dim, eps=1e-6, **factory)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """x (b, n, dim) -> the same shape; key_mask (b, n) bool, False: padding.

        positions: as in LinearRoPEAttention; with rotary={"axes": 2} the rows and columns (n, 2) of patches.
        """
        check_vectors("x", x, self.dim)
        for block in self.blocks:
            x = block(x, key_mask, positions)
        y: Tensor = self.norm(x)
        return y


class Decoder(nn.Module):
    """A stack of DecoderBlocks and a norm. It reads a sequence at once in training, or continues from states.

    Args:
        dim: the size of the vectors.
        depth: the number of blocks.
        heads: the number of heads, a divisor of dim.
        context_dim: the size of the context's vectors; None: no cross-attention.
        **attention: further arguments of the causal LinearRoPEAttention, as in DecoderBlock.

    Raises:
        ValueError: causal=False, for which there is the Encoder; a context is given although context_dim is None, or
            missing in the first call; a context_mask comes without a context; there are not as many states as blocks.

    >>> from linrope.models.encoder_decoder import Decoder, Encoder
    >>> encoder, decoder = Encoder(32, 2, 4), Decoder(32, 2, 4, context_dim=32, decay="spread")
    >>> context, x = encoder(torch.randn(1, 20, 32)), torch.randn(1, 5, 32)
    >>> y, states = decoder(x, context)
    >>> y_next, states = decoder(x[:, -1:], states=states)  # the states have read the context
    >>> y_next.shape, states[0].context.position
    (torch.Size([1, 1, 32]), tensor([20]))
    """

    @shows(_OPTIONS)
    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        context_dim: int | None = None,
        **attention: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        self.dim, self.context_dim, factory = dim, context_dim, _factory(attention)
        _check_causal(
            attention, True, "Encoder(dim, depth, heads), which sees all tokens and returns y alone"
        )
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads, context_dim, **attention) for _ in range(depth))
        self.norm = RMSNorm(dim, eps=1e-6, **factory)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        states: list[DecoderState] | None = None,
    ) -> tuple[Tensor, list[DecoderState]]:
        """x (b, n, dim), context (b, m, context_dim) -> (b, n, dim) and a state per block.

        With states, a context is appended to the context that they have read.
        """
        if context is not None and self.context_dim is None:
            raise ValueError("context: got a tensor, expected None, since context_dim is None")
        if context is None and states is None and self.context_dim is not None:
            raise ValueError(
                f"context: got None, expected (b, m, {self.context_dim}) or states that have read it"
            )
        if context is None and context_mask is not None:
            raise ValueError(
                "context_mask: got a tensor without a context, expected None: the states remember it"
            )
        if states is not None and len(states) != len(self.blocks):
            raise ValueError(f"states: got {len(states)}, expected one per block, {len(self.blocks)}")
        check_vectors("x", x, self.dim)
        new_states = []
        for index, block in enumerate(self.blocks):
            x, state = block(x, context, context_mask, None if states is None else states[index])
            new_states.append(state)
        return self.norm(x), new_states
