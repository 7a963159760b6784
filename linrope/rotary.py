"""Rotary position embedding: frequencies, angles, rotation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.frequencies import read_config, resolve
from linrope.names import check_name

LAYOUTS = ("interleaved", "half")
MAX_POSITION = 2**31 - 1


def spell_out(positions: Tensor, n: int) -> Tensor:
    """(b or 1, n) from that, or from the first of consecutive ones, (b or 1, 1); with axes as they are."""
    if positions.shape[1] == n:
        return positions
    return positions + torch.arange(n, device=positions.device)


class Rotary:
    """RoFormer's rotation R(p): pair number t of the features turns by the angle p theta_t.

        theta_t = base^(-2t / rotary_dim),  t = 0 .. rotary_dim/2 - 1                      (eq. 15)
        (x_2t, x_2t+1) -> (x_2t cos a - x_2t+1 sin a,  x_2t sin a + x_2t+1 cos a),  a = p theta_t

    Angles are formed in float64 from integer positions and are exact to 1e-6 rad up to position
    2^31 - 1; only cos and sin are cast. Plain Python, no parameters: casting a model to half
    precision cannot harm theta.

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
        xpos: length over which pair t also fades by zeta_t = (2t / rotary_dim + 0.4) / 1.4, in the
            numerator (xPos, whose paper takes 512); causal attention only.

    Raises:
        ValueError: odd or non-positive sizes, rotary_dim > dim, base <= 0, unknown layout or scaling,
            missing, unknown or impossible keys of scaling, scaling beside theta or axes, theta of the
            wrong shape.

    Source: Su et al. 2021, arXiv 2104.09864; of the extensions: ``linrope.frequencies``.

    >>> rotary = Rotary(4)
    >>> rotary(torch.tensor([1.0, 0.0, 1.0, 0.0]).view(1, 1, 1, 4), torch.tensor([2])).flatten()
    tensor([-0.4161,  0.9093,  0.9998,  0.0200])
    """

    theta: Tensor  # (p,) or (g, p), with axes (axes, p) or (g, axes, p): float64, radians per position
    frequencies: Tensor  # the same as (axes or 1, g or 1, p)
    fade: Tensor | None  # (dim,) float64: log zeta per position, of each feature
    attention_factor: float  # for q and k before the feature map: linear_rope_attention applies it

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
        if xpos is not None and not (xpos > 0 and math.isfinite(xpos)):
            raise ValueError(f"xpos={xpos}: expected a positive finite length, or None")
        self.dim, self.base, self.layout, self.rotary_dim = dim, float(base), layout, rotary_dim
        self.axes, self.xpos = axes, xpos
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
        self.attention_factor = 1.0
        if theta is None:
            if axes is not None:
                raise ValueError(f"axes={axes}: expected theta beside it, or Rotary.axial")
            named = {"rope_type": "default"} if scaling is None else scaling
            method, parameters = resolve(named)
            self.theta, self.attention_factor = method(rotary_dim, self.base, **parameters)
            source = f"base={self.base}" + (f", scaling={method.__name__}{parameters}" if parameters else "")
        else:
            expected = (rotary_dim // 2,) if axes is None else (axes, rotary_dim // 2)
            if theta.shape[-len(expected) :] != expected or theta.ndim - len(expected) not in (0, 1):
                shape = ", ".join(map(str, expected))
                raise ValueError(
                    f"theta: got shape {tuple(theta.shape)}, expected ({shape}) or (num_kv_heads, {shape})"
                )
            self.theta = theta.detach().to("cpu", torch.float64, copy=True)
            source = f"theta={self.theta.tolist()}"
        self.frequencies = self.theta.view(-1, axes or 1, rotary_dim // 2).transpose(0, 1)
        self.fade = None
        if xpos is not None:
            zeta = (2 * pairs / rotary_dim + 0.4) / 1.4
            zeta = zeta.repeat_interleave(2) if layout == "interleaved" else torch.cat((zeta, zeta))
            self.fade = torch.cat((zeta.log() / xpos, zeta.new_zeros(dim - rotary_dim)))
        self._turns: dict[torch.device, Tensor] = {}
        more = "".join(f", {k}={v}" for k, v in (("axes", axes), ("xpos", xpos)) if v is not None)
        # Tells apart two rotations whose states must not be mixed.
        self.identity = f"Rotary({dim}, {source}, layout={layout!r}, rotary_dim={rotary_dim}{more})"

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
            head_dim: number of features f.
            max_position_embeddings: the config's; dynamic needs it, others take lengths and factors that
                are missing from it.
            layout: "half", as nearly all models there have it.
            seq_len: the length for which dynamic and longrope choose theta, once and for the whole stream:
                a state holds keys that are rotated already. Default: the trained length.

        Raises:
            ValueError: as the class; an odd number of features to turn; one dict per layer type.

        Source: transformers 5.23, modeling_rope_utils.py.

        >>> config = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
        >>> Rotary.from_config(config, head_dim=64, max_position_embeddings=32768).attention_factor
        1.138629436111989
        """
        base, rotary_dim, scaling = read_config(rope_parameters, head_dim, max_position_embeddings, seq_len)
        return cls(head_dim, base=base, layout=layout, rotary_dim=rotary_dim, scaling=scaling)

    @classmethod
    def whole_model(
        cls, num_heads: int, head_dim: int, *, base: float = 10000.0, layout: str = "interleaved"
    ) -> "Rotary":
        """Rotation of the whole d_model vector before its split into heads, as a theta per head.

        theta_t = base^(-2t / d_model), d_model = num_heads * head_dim; head i has its slice. Only the
        interleaved layout keeps the partners of a pair in one head.

        >>> Rotary.whole_model(8, 64).theta.shape
        torch.Size([8, 32])
        """
        if layout != "interleaved":
            raise ValueError(
                f"layout={layout!r}: whole-model rotation needs 'interleaved'; with 'half' the "
                "partners of a pair fall into different heads"
            )
        table = cls(num_heads * head_dim, base=base).theta.view(num_heads, -1)
        return cls(head_dim, base=base, theta=table)

    @classmethod
    def axial(
        cls, dim: int, axes: int = 2, *, base: float = 10000.0, layout: str = "interleaved",
        pairs: Sequence[int] | None = None,
    ) -> "Rotary":  # fmt: skip
        """Rotation for positions on a grid (images, video): each axis turns its own share of the pairs.

            theta_at = base^(-t / pairs_a) for the t-th pair of axis a, 0 for the pairs of other axes

        pairs: how many pairs each axis has; default: dim/2 divided evenly, the first axes taking the rest.

        >>> Rotary.axial(8)(torch.ones(1, 1, 1, 8), torch.tensor([[3, 0]]))[0, 0, 0, 4:]  # column 0
        tensor([1., 1., 1., 1.])
        """
        if pairs is None:
            pairs = [(dim // 2 + axes - 1 - a) // axes for a in range(axes)]
        if len(pairs) != axes or min(pairs, default=0) < 1 or sum(pairs) != dim // 2:
            raise ValueError(f"pairs={list(pairs)}: expected one positive number per axis, {dim // 2} in all")
        shares = [cls(2 * share, base=base).theta for share in pairs]
        return cls(dim, base=base, layout=layout, theta=torch.block_diag(*shares), axes=axes)

    def angles(self, positions: Tensor) -> Tensor:
        """positions (.., n) or (.., n, axes) -> angles (.., n, g or 1, rotary_dim/2), rad, float64."""
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"positions: got {positions.dtype}, expected integers")
        frequencies = self.frequencies.to(positions.device)
        if self.axes is None:
            return positions[..., None, None].double() * frequencies[0]
        if positions.ndim < 2 or positions.shape[-1] != self.axes:
            raise ValueError(
                f"positions: got shape {tuple(positions.shape)}, expected (.., axes={self.axes})"
            )
        return (positions[..., None, None].double() * frequencies).sum(-3)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ``angles``, formed in float64 and cast to dtype, without attention_factor."""
        angles = self.angles(positions)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def turns(self, device: torch.device) -> Tensor:
        """frequencies / 2 pi in units of 2^-64 turns, int64: position * turns wraps to the angle.

        Integers that wrap reduce an angle to one turn exactly. theta itself is a float64, so that the
        angle at position 2^31 is off by 3e-7 rad at most, as with ``angles``.
        """
        if device not in self._turns:
            turns = self.frequencies.contiguous() / (2 * math.pi)
            turns = turns - turns.round()  # -1/2 .. 1/2
            self._turns[device] = (turns * 2.0**64).clamp_max(2.0**63 - 1024).to(torch.int64).to(device)
        return self._turns[device]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_turns": {}}  # copies make their own

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x (b, n, h, f) to positions (n,) or (b, n), with axes (.., axes), without xpos' fading.

        attention_factor is not applied either: it belongs before the feature map. On cos and sin, as with
        softmax attention, it would scale the numerator alone.
        float16 and bfloat16 turn in float32.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"x: got {x.shape[-1]} features, expected dim={self.dim}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = self.cos_sin(positions, wide.dtype)
        heads = self.frequencies.shape[1]
        if heads > 1:  # query heads that share a key/value head share its theta
            if x.shape[-2] % heads:
                raise ValueError(f"x: got {x.shape[-2]} heads, expected a multiple of theta's {heads}")
            repeats = x.shape[-2] // heads
            cos, sin = cos.repeat_interleave(repeats, -2), sin.repeat_interleave(repeats, -2)
        turned, rest = wide[..., : self.rotary_dim], wide[..., self.rotary_dim :]
        if self.layout == "interleaved":
            x1, x2 = turned[..., 0::2], turned[..., 1::2]
            pairs = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)
        else:
            x1, x2 = turned.chunk(2, -1)
            pairs = torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)
        return torch.cat((pairs, rest), -1).to(x.dtype)

    def __repr__(self) -> str:
        return self.identity


# TEMPORARY (merged from branch rotary)
def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    p = cos.shape[-1]
    turned, rest = wide[..., : 2 * p], wide[..., 2 * p :]
    if layout == "interleaved":
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, -1)
        pairs = torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)
    return torch.cat((pairs, rest), -1).to(x.dtype)


def to_turns(radians: Tensor) -> Tensor:
    x = radians.detach().double() * (1 / (2 * math.pi))
    x = x - x.round()
    return torch.where(x == 0.5, -0.5, x).mul(2.0**64).to(torch.int64)


def cos_sin_of_turns(turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a = turns.double() * (2 * math.pi / 2.0**64)
    return a.cos().to(dtype), a.sin().to(dtype)
