"""Rotary position embedding: frequencies, angles, rotation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.common.constants import Constant
from linrope.common.names import check_name
from linrope.rotation.angles import LAYOUTS, cos_sin, cos_sin_of_turns, rotate, to_turns
from linrope.rotation.frequencies import MROPE_AXES, read_config, resolve

__all__ = [
    "LAYOUTS",
    "MAX_POSITION",
    "Rotary",
    "cos_sin_of_turns",
    "grid_positions",
    "rotate",
    "spell_out",
    "to_turns",
]

MAX_POSITION = 2**31 - 1


def spell_out(positions: Tensor, n: int) -> Tensor:
    """(b or 1, n) from that, or from the first of consecutive ones, (b or 1, 1); with axes as they are."""
    if positions.shape[1] == n:
        return positions
    return positions + torch.arange(n, device=positions.device)


def grid_positions(*sizes: int, class_tokens: int = 0) -> Tensor:
    """Positions of the cells of a grid, row by row: (n, axes) int64, for a Rotary with axes.

    Args:
        sizes: of the axes, (rows, columns) or (frames, rows, columns); the last one runs fastest.
        class_tokens: tokens without a place that stand before the cells. They get coordinate 0 on every
            axis, and the grid then starts at 1.

    Raises:
        ValueError: no size, a size below 1, class_tokens below 0.

    >>> from linrope.rotation.rotary import grid_positions
    >>> grid_positions(2, 2, class_tokens=1).tolist()
    [[0, 0], [1, 1], [1, 2], [2, 1], [2, 2]]
    """
    if min(sizes, default=0) < 1 or class_tokens < 0:
        raise ValueError(
            f"sizes={sizes}, class_tokens={class_tokens}: expected positive sizes, and 0 or more tokens"
        )
    cells = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes))
    if class_tokens == 0:
        return cells
    return torch.cat((cells.new_zeros(class_tokens, len(sizes)), cells + 1))


class Rotary:
    """RoFormer's rotation R(p): pair number t of the features turns by the angle p theta_t.

        theta_t = base^(-2t / rotary_dim),  t = 0 .. rotary_dim/2 - 1                      (eq. 15)
        (x_2t, x_2t+1) -> (x_2t cos a - x_2t+1 sin a,  x_2t sin a + x_2t+1 cos a),  a = p theta_t

    Angles are formed in float64 from integer positions and are exact to 1e-6 rad up to position
    2^31 - 1; only cos and sin are cast. Plain Python, no parameters: casting a model to half
    precision cannot harm theta. A rotation never changes, as states hold keys that it has turned: theta,
    frequencies and fade are handed out as copies.

    With ``axes``, positions are vectors (images, video) and the angle is a = sum_a p_a theta_at.

    Args:
        dim: number of features f (of the feature map, not of the head, where they differ).
        base: of the frequencies.
        layout: "interleaved" pairs (0, 1), (2, 3), .. (RoFormer, GPT-J); "half" pairs (t, t + rotary_dim/2)
            (GPT-NeoX, Llama).
        rotary_dim: only the first rotary_dim features turn; default: all.
        scaling: {"rope_type": .., "factor": .., ..}, an extension of RoPE by Hugging Face's names and keys:
            linear, ntk, dynamic, yarn, longrope, llama3 or proportional. See ``from_config``.
        theta: the frequencies themselves, (rotary_dim/2,) or, a row per key/value head,
            (g, rotary_dim/2); replaces base. With axes: (axes, rotary_dim/2) or (g, axes, rotary_dim/2).
        axes: number of coordinates of a position; None: positions are plain integers. See ``axial``.
        attention_factor: beside theta, what linear_rope_attention multiplies q and k with before the
            feature map; default 1. Otherwise scaling gives it.
        xpos: length over which pair t also fades by zeta_t = (2t / rotary_dim + 0.4) / 1.4, in the
            numerator (xPos, whose paper takes 512); causal attention only.

    Raises:
        ValueError: odd or non-positive sizes, rotary_dim > dim, base <= 0, unknown layout or scaling,
            missing, unknown or impossible keys of scaling, scaling beside theta or axes, theta of the
            wrong shape or not finite, attention_factor without theta or not positive.

    Source: Su et al. 2021, arXiv 2104.09864; of the extensions: ``linrope.rotation.frequencies``.

    >>> rotary = Rotary(4)
    >>> rotary(torch.tensor([1.0, 0.0, 1.0, 0.0]).view(1, 1, 1, 4), torch.tensor([2])).flatten()
    tensor([-0.4161,  0.9093,  0.9998,  0.0200])
    """

    attention_factor: float  # for q and k before the feature map: linear_rope_attention applies it
    identity: str  # tells apart two rotations whose states must not be mixed
    heads: int  # how many key/value heads have a theta of their own; 1: all share it

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        layout: str = "interleaved",
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
        theta: Tensor | None = None,
        axes: int | None = None,
        attention_factor: float | None = None,
        xpos: float | None = None,
    ) -> None:
        rotary_dim = dim if rotary_dim is None else rotary_dim
        if dim < 2 or dim % 2:
            raise ValueError(f"dim={dim}: expected a positive even number")
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > dim:
            raise ValueError(f"rotary_dim={rotary_dim}: expected an even number from 2 to dim={dim}")
        if not (base > 0 and math.isfinite(base)):
            raise ValueError(f"base={base}: expected a positive finite number")
        check_name("layout", layout, LAYOUTS)
        if scaling is not None and (theta is not None or axes is not None):
            beside = "axes" if theta is None else "theta"
            raise ValueError(f"scaling={scaling!r}: expected None beside {beside}")
        if axes is not None and axes < 1:
            raise ValueError(f"axes={axes}: expected at least 1, or None")
        if axes is not None and theta is None:
            raise ValueError(f"axes={axes}: expected theta beside it, or Rotary.axial")
        if attention_factor is not None:
            if theta is None:
                raise ValueError(f"attention_factor={attention_factor}: expected None without theta")
            if not (attention_factor > 0 and math.isfinite(attention_factor)):
                raise ValueError(f"attention_factor={attention_factor}: expected a positive finite number")
        if xpos is not None and not (xpos > 0 and math.isfinite(xpos)):
            raise ValueError(f"xpos={xpos}: expected a positive finite length, or None")
        self.dim, self.base, self.layout, self.rotary_dim = dim, float(base), layout, rotary_dim
        self.axes, self.xpos = axes, xpos
        self.attention_factor = 1.0 if attention_factor is None else float(attention_factor)
        with torch.inference_mode(False):  # graphs of autograd will save what is made here
            if theta is None:
                method, parameters = resolve({"rope_type": "default"} if scaling is None else scaling)
                self._theta, self.attention_factor = method(rotary_dim, self.base, **parameters)
                extended = f", scaling={method.__name__}{parameters}" if parameters else ""
                source = f"base={self.base}{extended}"
            else:
                self._theta = _own(theta, rotary_dim // 2, axes)
                source = f"theta={self._theta.tolist()}"
            self._frequencies = self._theta.view(-1, axes or 1, rotary_dim // 2).transpose(0, 1)
            self._fade = None if xpos is None else _xpos_fade(dim, rotary_dim, layout, xpos)
            self._turns = Constant(to_turns(self._frequencies))
        self.heads = self._frequencies.shape[1]
        factor = None if attention_factor in (None, 1.0) else self.attention_factor
        options = (("axes", axes), ("attention_factor", factor), ("xpos", xpos))
        more = "".join(f", {name}={value}" for name, value in options if value is not None)
        self.identity = f"Rotary({dim}, {source}, layout={layout!r}, rotary_dim={rotary_dim}{more})"

    @property
    def theta(self) -> Tensor:
        """(p,) or (g, p), with axes (axes, p) or (g, axes, p): float64, radians per position; a copy."""
        return self._theta.clone()

    @property
    def frequencies(self) -> Tensor:
        """theta as (axes or 1, g or 1, p); a copy."""
        return self._frequencies.clone()

    @property
    def fade(self) -> Tensor | None:
        """With xpos: log zeta per position, of each feature, (dim,) float64; a copy."""
        return None if self._fade is None else self._fade.clone()

    @classmethod
    def from_config(
        cls, rope_parameters: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int | None = None,
        layout: str = "half", seq_len: int | None = None,
    ) -> "Rotary":  # fmt: skip
        """The rotation of a Hugging Face model: the theta and attention_factor that transformers gives it.

        Args:
            rope_parameters: the config's, {"rope_type": .., "rope_theta": .., "partial_rotary_factor": ..,
                "factor": .., ..}. Of older configs: rope_scaling, with "type" and with the keys that stood
                beside it put in (rope_theta, original_max_position_embeddings). None counts as absent.
                With "mrope_section" (Qwen2-VL; Qwen3-VL: "mrope_interleaved" as well) positions have three
                coordinates: time, row, column. A token of text has its number in all three.
            head_dim: number of features f.
            max_position_embeddings: the config's; dynamic needs it, others take lengths and factors that
                are missing from it.
            layout: "half", as nearly all models there have it.
            seq_len: the length for which dynamic and longrope choose theta, once and for the whole stream:
                a state holds keys that are rotated already. Default: the trained length.

        Raises:
            ValueError: as the class; an odd number of features to turn; one dict per layer type; sections
                that are not three numbers of pairs, all in all.

        Source: transformers 5.23, modeling_rope_utils.py.

        >>> config = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
        >>> Rotary.from_config(config, head_dim=64, max_position_embeddings=32768).attention_factor
        1.138629436111989
        """
        base, rotary_dim, scaling, axis_of_pair = read_config(
            rope_parameters, head_dim, max_position_embeddings, seq_len
        )
        rotary = cls(head_dim, base=base, layout=layout, rotary_dim=rotary_dim, scaling=scaling)
        if axis_of_pair is None:
            return rotary
        own = torch.tensor(axis_of_pair, device="cpu") == torch.arange(MROPE_AXES, device="cpu")[:, None]
        return cls(
            head_dim, base=base, layout=layout, rotary_dim=rotary_dim, theta=rotary.theta * own,
            axes=MROPE_AXES, attention_factor=rotary.attention_factor,
        )  # fmt: skip

    @classmethod
    def whole_model(
        cls, num_heads: int, head_dim: int, *, base: float = 10000.0, layout: str = "interleaved",
        axes: int | None = None,
    ) -> "Rotary":  # fmt: skip
        """Rotation of the whole d_model vector before its split into heads, as a theta per head.

        theta_t = base^(-2t / d_model), d_model = num_heads * head_dim; head i has its slice. Only the
        interleaved layout keeps the partners of a pair in one head. With ``axes``, for positions on a
        grid, theta is that of ``axial`` with dim = d_model: the first heads turn with the first axis, and
        so on.

        >>> Rotary.whole_model(8, 64).theta.shape
        torch.Size([8, 32])
        """
        if layout != "interleaved":
            raise ValueError(
                f"layout={layout!r}: whole-model rotation needs 'interleaved'; with 'half' the "
                "partners of a pair fall into different heads"
            )
        d_model = num_heads * head_dim
        if axes is None:
            return cls(head_dim, base=base, theta=cls(d_model, base=base).theta.view(num_heads, -1))
        table = cls.axial(d_model, axes, base=base).theta.view(axes, num_heads, -1)
        return cls(head_dim, base=base, theta=table.transpose(0, 1), axes=axes)

    @classmethod
    def axial(
        cls, dim: int, axes: int = 2, *, base: float = 10000.0, layout: str = "interleaved",
        pairs: Sequence[int] | None = None, rotary_dim: int | None = None,
    ) -> "Rotary":  # fmt: skip
        """Rotation for positions on a grid (images, video): each axis turns its own share of the pairs.

            theta_at = base^(-t / pairs_a) for the t-th pair of axis a, 0 for the pairs of other axes

        pairs: how many pairs each axis has; default: rotary_dim/2 divided evenly, the first axes taking
        the rest. rotary_dim: only the first rotary_dim features turn; default: all. ``grid_positions``
        gives the positions.

        >>> Rotary.axial(8)(torch.ones(1, 1, 1, 8), torch.tensor([[3, 0]]))[0, 0, 0, 4:]  # column 0
        tensor([1., 1., 1., 1.])
        """
        all_pairs = (dim if rotary_dim is None else rotary_dim) // 2
        if pairs is None:
            pairs = [(all_pairs + axes - 1 - a) // axes for a in range(axes)]
        if len(pairs) != axes or min(pairs, default=0) < 1 or sum(pairs) != all_pairs:
            raise ValueError(
                f"pairs={list(pairs)}: expected one positive number per axis, {all_pairs} in all"
            )
        theta = torch.block_diag(*(cls(2 * share, base=base).theta for share in pairs))
        return cls(dim, base=base, layout=layout, rotary_dim=rotary_dim, theta=theta, axes=axes)

    def angles(self, positions: Tensor) -> Tensor:
        """positions (.., n) or (.., n, axes) -> angles (.., n, g or 1, rotary_dim/2), rad, float64."""
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"positions: got {positions.dtype}, expected integers")
        frequencies = self._frequencies.to(positions.device)
        if self.axes is None:
            return positions[..., None, None].double() * frequencies[0]
        if positions.ndim < 2 or positions.shape[-1] != self.axes:
            raise ValueError(
                f"positions: got shape {tuple(positions.shape)}, expected (.., axes={self.axes})"
            )
        return (positions[..., None, None].double() * frequencies).sum(-3)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ``angles``, formed in float64 and cast to dtype, without attention_factor."""
        return cos_sin(self.angles(positions), dtype)

    def turns(self, device: torch.device) -> Tensor:
        """frequencies / 2 pi in units of 2^-64 turns, int64: position * turns wraps to the angle.

        Integers that wrap reduce an angle to one turn exactly. theta itself is a float64, so that the
        angle at position 2^31 is off by 5e-7 rad at most, theta being up to 1. All calls share the tensor:
        it is not to be written to.
        """
        return self._turns.on(device)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x (b, n, h, f) to positions (n,) or (b, n), with axes (.., axes), without xpos' fading.

        attention_factor is not applied either: it belongs before the feature map. On cos and sin, as with
        softmax attention, it would scale the numerator alone.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"x: got {x.shape[-1]} features, expected dim={self.dim}")
        cos, sin = self.cos_sin(positions, torch.promote_types(x.dtype, torch.float32))
        heads = self.heads
        if heads > 1:  # query heads that share a key/value head share its theta
            if x.shape[-2] % heads:
                raise ValueError(f"x: got {x.shape[-2]} heads, expected a multiple of theta's {heads}")
            repeats = x.shape[-2] // heads
            cos, sin = cos.repeat_interleave(repeats, -2), sin.repeat_interleave(repeats, -2)
        return rotate(x, cos, sin, self.layout)

    def __repr__(self) -> str:
        return self.identity


def _own(theta: Tensor, pairs: int, axes: int | None) -> Tensor:
    """A copy of the theta that a caller gave, checked."""
    expected = (pairs,) if axes is None else (axes, pairs)
    if theta.shape[-len(expected) :] != expected or theta.ndim - len(expected) not in (0, 1):
        shape = ", ".join(map(str, expected))
        raise ValueError(
            f"theta: got shape {tuple(theta.shape)}, expected ({shape}) or (num_kv_heads, {shape})"
        )
    theta = theta.detach().to("cpu", torch.float64, copy=True)
    if not bool(theta.isfinite().all()):
        raise ValueError(f"theta: got {theta.tolist()}, expected finite numbers")
    return theta


def _xpos_fade(dim: int, rotary_dim: int, layout: str, length: float) -> Tensor:
    """log zeta per position, of each feature: (dim,) float64, 0 for those that do not turn."""
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    zeta = (2 * pairs / rotary_dim + 0.4) / 1.4
    zeta = zeta.repeat_interleave(2) if layout == "interleaved" else torch.cat((zeta, zeta))
    return torch.cat((zeta.log() / length, zeta.new_zeros(dim - rotary_dim)))
