"""Rotary position embedding: the class ``Rotary``, and positions on a grid.

b batch, n tokens, h query heads, g key/value heads, f features, pairs = rotary_dim / 2.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.common.argument_checks import (
    check_integer_tensors,
    check_integers,
    check_name,
    check_numbers,
    check_sizes,
)
from linrope.common.class_names import name_of
from linrope.common.constants import Constant
from linrope.rotation.angles import LAYOUTS, cos_sin, cos_sin_of_turns, rotate, to_turns, units_to_features
from linrope.rotation.frequencies import MROPE_AXES, checked_copy, read_config, resolve

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
_LONG_LIST = re.compile(r"\[[\[\]0-9e., +-]{100,}\]")  # matches long lists of numbers, nested or not


def spell_out(positions: Tensor, n: int) -> Tensor:
    """One position per token, (b or 1, n). positions of shape (b or 1, 1) are the first of n consecutive ones."""
    if positions.shape[1] == n:
        return positions
    return positions + torch.arange(n, device=positions.device)


def grid_positions(*sizes: int, class_tokens: int = 0) -> Tensor:
    """Positions of the cells of a grid, row by row: (n, axes) int64, for a Rotary with axes.

    Args:
        sizes: the length of each axis, (rows, columns) or (frames, rows, columns). The last axis runs fastest.
        class_tokens: the number of tokens that precede the cells and have no place on the grid. They get coordinate 0
            on every axis, and the grid then starts at 1.

    Raises:
        ValueError: there is no size, a size is below 1, or class_tokens is below 0.

    >>> from linrope.rotation.rotary import grid_positions
    >>> grid_positions(2, 2, class_tokens=1).tolist()
    [[0, 0], [1, 1], [1, 2], [2, 1], [2, 2]]
    """
    if min(sizes, default=0) < 1 or class_tokens < 0:
        raise ValueError(
            f"sizes={sizes}, class_tokens={class_tokens}: expected positive sizes and 0 or more tokens"
        )
    cells = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes))
    if class_tokens == 0:
        return cells
    return torch.cat((cells.new_zeros(class_tokens, len(sizes)), cells + 1))


class Rotary:
    """RoFormer's rotation R(p), which rotates feature pair l by the angle p theta_l.

        theta_l = base^(-2l / rotary_dim),  l = 0 .. rotary_dim/2 - 1                      (eq. 15)
        (x_2l, x_2l+1) -> (x_2l cos a - x_2l+1 sin a,  x_2l sin a + x_2l+1 cos a),  a = p theta_l

    Angles are computed from integer positions, in float64 (``angles``) or in 64-bit integers that wrap
    (``turns_per_position``). Up to position 2^31 - 1 and theta = 1 they are exact to 1e-6 rad. Only cos and sin are
    cast. A Rotary is not a module and has no parameters, so casting a model to half precision does not touch theta. It
    never changes, because states hold keys that it has rotated: theta, frequencies and xpos_log_decay are returned as
    copies, and none of its names can be set. A subclass may change the angles; it then defines its own ``identity``.

    With ``axes``, positions are vectors (images, video), and pair t turns by sum_a p_a theta[a, t] over the axes a.

    Args:
        dim: number of features f: the feature map's feature_dim, which may differ from the head's size. With
            rope_order="before" it is the head's size.
        base: base of the frequencies.
        layout: "interleaved" pairs (0, 1), (2, 3), .. (RoFormer, GPT-J); "half" pairs (t, t + rotary_dim/2)
            (GPT-NeoX, Llama).
        rotary_dim: only the first rotary_dim features turn. Default: all.
        scaling: {"rope_type": .., "factor": .., ..}, an extension of RoPE under Hugging Face's names and keys:
            linear, ntk, dynamic, yarn, longrope, llama3 or proportional. See ``from_config``.
        theta: the frequencies, in radians per position, in place of base: (rotary_dim/2,), or (g, rotary_dim/2) with
            one row per key/value head. With axes: (axes, rotary_dim/2) or (g, axes, rotary_dim/2).
        axes: number of coordinates of a position. None: positions are plain integers. See ``axial``.
        attention_factor: the factor by which linear_rope_attention multiplies q and k before the feature map. It may
            be given only with theta, where its default is 1. Otherwise scaling determines it.
        xpos: number of positions over which pair t also decays by zeta_t = (2t / rotary_dim + 0.4) / 1.4, in the
            numerator. This is xPos, whose paper uses 512. Causal attention only.

    Raises:
        TypeError: a size is not an integer, or base is not a number.
        ValueError: a size is odd or not positive, rotary_dim > dim, base <= 0, the layout or rope_type is unknown,
            a key of scaling is missing, unknown or impossible, scaling is given with theta or axes, xpos is given with
            axes or is not positive, theta has the wrong shape or is not finite, or attention_factor is given without
            theta or is not positive.

    Source: Su et al. 2021, arXiv 2104.09864. ``linrope.rotation.frequencies`` names the extensions' sources.

    >>> rotary = Rotary(4)
    >>> rotary(torch.tensor([1.0, 0.0, 1.0, 0.0]).view(1, 1, 1, 4), torch.tensor([2])).flatten()
    tensor([-0.4161,  0.9093,  0.9998,  0.0200])
    """

    attention_factor: float  # linear_rope_attention multiplies q and k by it before the feature map
    heads: int  # number of key/value heads that theta has a row for; 1: all heads share one theta

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
        check_integers(dim=dim, rotary_dim=rotary_dim)
        check_sizes(axes=axes)
        check_numbers(base=base, attention_factor=attention_factor, xpos=xpos)
        if dim < 2 or dim % 2:
            raise ValueError(f"dim={dim}: expected a positive even number")
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > dim:
            raise ValueError(f"rotary_dim={rotary_dim}: expected an even number from 2 to dim={dim}")
        if not (base > 0 and math.isfinite(base)):
            raise ValueError(f"base={base}: expected a positive finite number")
        check_name("layout", layout, LAYOUTS)
        if scaling is not None and (theta is not None or axes is not None):
            other = "axes" if theta is None else "theta"
            raise ValueError(f"scaling={scaling!r}: expected None if {other} is given")
        if axes is not None and theta is None:
            raise ValueError(f"axes={axes}: expected theta too, or use Rotary.axial")
        if attention_factor is not None:
            if theta is None:
                raise ValueError(f"attention_factor={attention_factor}: expected None without theta")
            if not (attention_factor > 0 and math.isfinite(attention_factor)):
                raise ValueError(f"attention_factor={attention_factor}: expected a positive finite number")
        if xpos is not None and not (xpos > 0 and math.isfinite(xpos)):
            raise ValueError(f"xpos={xpos}: expected a positive finite length, or None")
        if xpos is not None and axes is not None:
            raise ValueError(f"xpos={xpos}: expected None if axes is given")
        xpos = None if xpos is None else float(xpos)
        self.dim, self.base, self.layout, self.rotary_dim = dim, float(base), layout, rotary_dim
        self.axes, self.xpos = axes, xpos
        self.attention_factor = 1.0 if attention_factor is None else float(attention_factor)
        with torch.inference_mode(False):  # autograd saves these tensors, and cannot save inference tensors
            if theta is None:
                method, parameters = resolve({"rope_type": "default"} if scaling is None else scaling)
                self._theta, self.attention_factor = method(rotary_dim, self.base, **parameters)
                scaled = f", scaling={method.__name__}{parameters}" if parameters else ""
                source = f"base={self.base}{scaled}"
            else:
                self._theta = checked_copy(theta, rotary_dim // 2, axes)
                source = f"theta={self._theta.tolist()}"
            frequencies = self._theta.view(-1, axes or 1, rotary_dim // 2).transpose(0, 1)
            self._xpos_log_decay = None if xpos is None else _xpos_log_decay(dim, rotary_dim, layout, xpos)
            self._frequencies, self._turns = Constant(frequencies), Constant(to_turns(frequencies))
        self.heads = frequencies.shape[1]
        factor = None if attention_factor in (None, 1.0) else self.attention_factor
        options = (("axes", axes), ("attention_factor", factor), ("xpos", xpos))
        suffix = "".join(f", {name}={value}" for name, value in options if value is not None)
        settings = f"{dim}, {source}, layout={layout!r}, rotary_dim={rotary_dim}{suffix}"
        self._identity = f"{name_of(type(self))}({settings})"

    def __setattr__(self, name: str, value: Any) -> None:
        if "_identity" in vars(self) and name in _NAMES:
            raise AttributeError(f"{name}: a Rotary never changes, expected another one, or a subclass")
        super().__setattr__(name, value)

    @property
    def identity(self) -> str:
        """Differs between rotations whose states must not be mixed."""
        return self._identity

    @property
    def theta(self) -> Tensor:
        """A copy of theta, in radians per position: float64 (p,) or (g, p), with axes (axes, p) or (g, axes, p)."""
        return self._theta.clone()

    @property
    def frequencies(self) -> Tensor:
        """A copy of theta in the shape (axes or 1, g or 1, p)."""
        return self._frequencies.on(torch.device("cpu")).clone()

    @property
    def xpos_log_decay(self) -> Tensor | None:
        """With xpos, a copy of the log decay per position of each feature, (dim,) float64."""
        return None if self._xpos_log_decay is None else self._xpos_log_decay.clone()

    @classmethod
    def from_config(
        cls,
        rope_parameters: Mapping[str, Any],
        *,
        head_dim: int,
        max_position_embeddings: int | None = None,
        layout: str = "half",
        seq_len: int | None = None,
    ) -> "Rotary":
        """Builds the rotation of a Hugging Face model, with the theta and attention_factor that transformers uses.

        Args:
            rope_parameters: the config's rope_parameters, {"rope_type": .., "rope_theta": ..,
                "partial_rotary_factor": .., "factor": .., ..}. From an older config, pass rope_scaling (with "type")
                and add the keys that stand beside it there (rope_theta, original_max_position_embeddings). A key with
                the value None counts as absent. With "mrope_section" (Qwen2-VL, and Qwen3-VL with
                "mrope_interleaved" as well) positions have three coordinates: time, row, column. A text token has
                its position in all three.
            head_dim: number of features f.
            max_position_embeddings: the config's trained length. dynamic requires it. The other methods use it for
                lengths and factors that rope_parameters lacks.
            layout: nearly all Hugging Face models use "half".
            seq_len: the length for which dynamic and longrope choose theta. The choice holds for the whole stream,
                because a state holds keys that are already rotated. Default: the trained length.

        Raises:
            ValueError: as for the class. Also if an odd number of features would turn, if rope_parameters has one
                dict per layer type, or if mrope_section is not three numbers of pairs that add up to all pairs.

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
        on_axis = torch.tensor(axis_of_pair, device="cpu") == torch.arange(MROPE_AXES, device="cpu")[:, None]
        return cls(
            head_dim,
            base=base,
            layout=layout,
            rotary_dim=rotary_dim,
            theta=rotary.theta * on_axis,
            axes=MROPE_AXES,
            attention_factor=rotary.attention_factor,
        )

    @classmethod
    def whole_model(
        cls,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 10000.0,
        layout: str = "interleaved",
        axes: int | None = None,
    ) -> "Rotary":
        """Rotates the whole d_model vector before its split into heads, by giving each head its own theta.

        theta_l = base^(-2l / d_model) with d_model = num_heads * head_dim, and head i has the i-th slice of it. Only
        the interleaved layout keeps the partners of a pair in one head. With ``axes``, for positions on a grid, theta
        is sliced from ``axial`` with dim = d_model: the first heads turn with the first axis, and so on.

        >>> Rotary.whole_model(8, 64).theta.shape
        torch.Size([8, 32])
        """
        if layout != "interleaved":
            raise ValueError(
                f"layout={layout!r}: whole-model rotation requires 'interleaved': 'half' puts the "
                "partners of a pair into different heads"
            )
        check_sizes(num_heads=num_heads)
        check_integers(head_dim=head_dim)
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim={head_dim}: expected a positive even number")
        d_model = num_heads * head_dim
        if axes is None:
            return cls(head_dim, base=base, theta=cls(d_model, base=base).theta.view(num_heads, -1))
        table = cls.axial(d_model, axes, base=base).theta.view(axes, num_heads, -1)
        return cls(head_dim, base=base, theta=table.transpose(0, 1), axes=axes)

    @classmethod
    def axial(
        cls,
        dim: int,
        axes: int = 2,
        *,
        base: float = 10000.0,
        layout: str = "interleaved",
        pairs: Sequence[int] | None = None,
        rotary_dim: int | None = None,
    ) -> "Rotary":
        """Builds a rotation for positions on a grid (images, video), where each axis turns a part of the pairs.

            theta[a, t] = base^(-u / pairs[a]) if pair t is the u-th pair of axis a, else 0

        pairs is the number of pairs of each axis. Default: rotary_dim/2 divided evenly, where the first axes take the
        remainder. Only the first rotary_dim features turn; default: all. ``grid_positions`` makes the positions.

        >>> Rotary.axial(8)(torch.ones(1, 1, 1, 8), torch.tensor([[3, 0]]))[0, 0, 0, 4:]  # column 0
        tensor([1., 1., 1., 1.])
        """
        check_integers(axes=axes)
        all_pairs = cls(dim, base=base, layout=layout, rotary_dim=rotary_dim).rotary_dim // 2
        if pairs is None:
            if not 1 <= axes <= all_pairs:
                raise ValueError(f"axes={axes}: expected 1 to {all_pairs}, at most one per pair")
            pairs = [(all_pairs + axes - 1 - a) // axes for a in range(axes)]
        if len(pairs) != axes or min(pairs, default=0) < 1 or sum(pairs) != all_pairs:
            raise ValueError(
                f"pairs={list(pairs)}: expected one positive number per axis, {all_pairs} in all"
            )
        theta = torch.block_diag(*(cls(2 * count, base=base).theta for count in pairs))
        return cls(dim, base=base, layout=layout, rotary_dim=rotary_dim, theta=theta, axes=axes)

    def angles(self, positions: Tensor) -> Tensor:
        """The angles at positions (.., n) or (.., n, axes): (.., n, g or 1, rotary_dim/2) float64, in radians."""
        check_integer_tensors(positions=positions)
        frequencies = self._frequencies.on(positions.device)
        if self.axes is None:
            return positions[..., None, None].double() * frequencies[0]
        if positions.ndim < 2 or positions.shape[-1] != self.axes:
            raise ValueError(
                f"positions: got shape {tuple(positions.shape)}, expected (.., axes={self.axes})"
            )
        return (positions[..., None, None].double() * frequencies).sum(-3)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ``angles``, computed in float64 and cast to dtype, without attention_factor."""
        return cos_sin(self.angles(positions), dtype)

    def turns_per_position(self, device: torch.device) -> Tensor:
        """``frequencies`` as int64 in units of 2^-64 turns per position. A position times these wraps to the angle.

        Integers that wrap reduce an angle to one turn exactly. The remaining error is that of theta, a float64: for
        theta up to 1 the angle at position 2^31 is off by at most 5e-7 rad. All callers share the tensor: do not
        write to it.
        """
        return self._turns.on(device)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x (b, n, h, f) to positions (n,) or (b, n), with axes (.., axes).

        It applies neither the decay of xpos nor attention_factor. The latter belongs before the feature map: on cos
        and sin, as in softmax attention, it would scale only the numerator.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(f"x: got {x.shape[-1]} features, expected dim={self.dim}")
        cos, sin = self.cos_sin(positions, torch.promote_types(x.dtype, torch.float32))
        if self.heads > 1:  # query heads that share a key/value head share its theta
            if x.shape[-2] % self.heads:
                raise ValueError(f"x: got {x.shape[-2]} heads, expected a multiple of theta's {self.heads}")
            repeats = x.shape[-2] // self.heads
            cos, sin = cos.repeat_interleave(repeats, -2), sin.repeat_interleave(repeats, -2)
        return rotate(x, cos, sin, self.layout)

    def __eq__(self, other: object) -> bool:
        """True for a rotation that turns the same features by the same angles; a Rotary never changes.

        A subclass may turn by other angles, so each of its objects equals itself alone.
        """
        return self is other or (
            type(self) is type(other) is Rotary and self._identity == vars(other)["_identity"]
        )

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return _LONG_LIST.sub("[..]", self.identity)


# Rotary's methods and attributes, which cannot be set after __init__
_NAMES = frozenset((*vars(Rotary), *vars(Rotary(2))))


def _xpos_log_decay(dim: int, rotary_dim: int, layout: str, length: float) -> Tensor:
    """The log decay per position of each feature, log(zeta) / length, or 0 if it does not turn: (dim,) float64."""
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    zeta = (2 * pairs / rotary_dim + 0.4) / 1.4
    units = torch.cat((zeta.log() / length, zeta.new_zeros(dim - rotary_dim)))
    return units_to_features(units, rotary_dim // 2, layout)
