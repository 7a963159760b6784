"""Rotary position embedding: frequencies, angles, rotation."""

import math
from difflib import get_close_matches

import torch
from torch import Tensor

LAYOUTS = ("interleaved", "half")
MAX_POSITION = 2**31 - 1


class Rotary:
    """RoFormer's rotation R(p): pair number t of the features turns by the angle p theta_t.

        theta_t = base^(-2t / rotary_dim),  t = 0 .. rotary_dim/2 - 1                      (eq. 15)
        (x_2t, x_2t+1) -> (x_2t cos a - x_2t+1 sin a,  x_2t sin a + x_2t+1 cos a),  a = p theta_t

    Angles are formed in float64 from integer positions and are exact to 1e-6 rad up to position
    2^31 - 1; only cos and sin are cast. Plain Python, no parameters: casting a model to half
    precision cannot harm theta.

    Args:
        dim: number of features f (of the feature map, not of the head, where they differ).
        base: of the frequencies.
        layout: "interleaved" pairs (0, 1), (2, 3), .. (RoFormer, GPT-J); "half" pairs (t, t + rotary_dim/2)
            (GPT-NeoX, Llama).
        rotary_dim: only the first rotary_dim features turn; default: all.
        scaling: None.
        theta: the frequencies themselves, (rotary_dim/2,) or, a row per key/value head,
            (g, rotary_dim/2); replaces base.

    Raises:
        ValueError: odd or non-positive sizes, rotary_dim > dim, base <= 0, unknown layout or scaling,
            theta of the wrong shape.

    Source: Su et al. 2021, arXiv 2104.09864.

    >>> rotary = Rotary(4)
    >>> rotary(torch.tensor([1.0, 0.0, 1.0, 0.0]).view(1, 1, 1, 4), torch.tensor([2])).flatten()
    tensor([-0.4161,  0.9093,  0.9998,  0.0200])
    """

    theta: Tensor  # (p,) or (g, p) float64, radians per position

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        layout: str = "interleaved",
        rotary_dim: int | None = None,
        scaling: None = None,
        theta: Tensor | None = None,
    ) -> None:
        rotary_dim = dim if rotary_dim is None else rotary_dim
        if dim < 2 or dim % 2:
            raise ValueError(f"dim={dim}: expected a positive even number")
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > dim:
            raise ValueError(f"rotary_dim={rotary_dim}: expected an even number from 2 to dim={dim}")
        if not (base > 0 and math.isfinite(base)):
            raise ValueError(f"base={base}: expected a positive finite number")
        if layout not in LAYOUTS:
            near = get_close_matches(str(layout), LAYOUTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}{hint}")
        if scaling is not None:
            raise ValueError(f"scaling={scaling!r}: expected None, the only one known")
        self.dim, self.base, self.layout, self.rotary_dim = dim, float(base), layout, rotary_dim
        if theta is None:
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
            self.theta = self.base**-exponents
        else:
            if theta.ndim not in (1, 2) or theta.shape[-1] != rotary_dim // 2:
                raise ValueError(
                    f"theta: got shape {tuple(theta.shape)}, expected ({rotary_dim // 2},) "
                    f"or (num_kv_heads, {rotary_dim // 2})"
                )
            self.theta = theta.detach().to("cpu", torch.float64, copy=True)
        self._turns: dict[torch.device, Tensor] = {}
        source = f"base={self.base}" if theta is None else f"theta={self.theta.tolist()}"
        # Tells apart two rotations whose states must not be mixed.
        self.identity = f"Rotary({dim}, {source}, layout={layout!r}, rotary_dim={rotary_dim})"

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

    def angles(self, positions: Tensor) -> Tensor:
        """positions (..., n) -> angles (..., n, g or 1, rotary_dim/2) in rad, float64."""
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"positions: got {positions.dtype}, expected integers")
        theta = self.theta.to(positions.device)
        if theta.ndim == 1:
            theta = theta[None]
        return positions[..., None, None].double() * theta

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ``angles``, formed in float64 and cast to dtype."""
        angles = self.angles(positions)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def turns(self, device: torch.device) -> Tensor:
        """theta / 2 pi in units of 2^-64 turns, (1 or g, p) int64: position * turns wraps to the angle.

        Integers that wrap reduce an angle to one turn exactly. theta itself is a float64, so that the
        angle at position 2^31 is off by 3e-7 rad at most, as with ``angles``.
        """
        if device not in self._turns:
            turns = self.theta.view(-1, self.rotary_dim // 2) / (2 * math.pi)
            turns = turns - turns.round()  # -1/2 .. 1/2
            self._turns[device] = (turns * 2.0**64).clamp_max(2.0**63 - 1024).to(torch.int64).to(device)
        return self._turns[device]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_turns": {}}  # copies make their own

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x (b, n, h, f) to positions (n,) or (b, n); float16 and bfloat16 turn in float32."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"x: got {x.shape[-1]} features, expected dim={self.dim}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = self.cos_sin(positions, wide.dtype)
        if self.theta.ndim == 2:  # query heads that share a key/value head share its theta
            if x.shape[-2] % len(self.theta):
                raise ValueError(
                    f"x: got {x.shape[-2]} heads, expected a multiple of theta's {len(self.theta)}"
                )
            repeats = x.shape[-2] // len(self.theta)
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
