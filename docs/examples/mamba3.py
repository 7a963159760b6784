"""Mamba-3's mixer (SISO) from parts of linrope. It loads the weights of mamba_ssm's ``Mamba3`` by their names.

    z, x, B, C, dt, A, trap, angle = W u                                   dt, A, trap: a number per head
    k, q   = norm(B) + B_bias, norm(C) + C_bias                            shared by the heads of a group
    dt     = softplus(dt + dt_bias)        a = -max(softplus(A), floor) dt        lambda = sigmoid(trap)
    S_t    = e^a_t (S_(t-1) + (1 - lambda_t) dt_t k_(t-1) x_(t-1)^T) + lambda_t dt_t k_t x_t^T
    y_t    = W_out ((S_t^T q_t + D x_t) * silu(z_t))                        with the norm: norm(S^T q + D x) * silu(z)

k and q turn at token t by the sum of pi tanh(angle) dt over the tokens so far. The recurrence with its rotation is one
call of ``linear_rope_attention`` on keys that are shifted by a token; what follows it is one call of ``gated_norm``.

    python docs/examples/mamba3.py

Source: Mamba-3 (arXiv 2603.15569), and github.com/state-spaces/mamba, mamba_ssm/modules/mamba3.py.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope import LinearAttentionState, linear_rope_attention
from linrope.ops import gated_norm
from linrope.recurrence.packing import at_last, previous
from linrope.rotation.angles import cos_sin
from linrope.rotation.rotary import rotate


def heavy_tail(x: Tensor) -> Tensor:
    """1 + x for x >= 0, else 1 / (1 - x), which mamba_ssm's sources use for A since June 2026."""
    return x.clamp(min=0) + 1 / (1 - x.clamp(max=0))


class State(NamedTuple):
    """The sums, which lack the last token, and the key, the value and lambda dt of that token."""

    sums: LinearAttentionState
    key: Tensor
    value: Tensor
    weight: Tensor

    def donate(self) -> "State":
        return self._replace(sums=self.sums.donate())


def trapezoidal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    share: Tensor,
    write: Tensor,
    log_decay: Tensor,
    angle_steps: Tensor,
    cu_seqlens: Tensor | None = None,
    state: State | None = None,
) -> tuple[Tensor, State]:
    """The exponential-trapezoidal rule, in which a token's key and value enter the sums at the token and at the next.

        S_t   = e^(a_t) (S_(t-1) + (1 - lambda_t) w_t K_(t-1) v_(t-1)^T) + lambda_t w_t K_t v_t^T
        out_t = S_t^T R(Theta_t) q_t                                         K_t = R(Theta_t) k_t

    It is computed by sums of keys that are shifted by a token, to which each token's own term is added:

        T_t   = e^(a_t) (T_(t-1) + (lambda_(t-1) w_(t-1) + (1 - lambda_t) w_t) K_(t-1) v_(t-1)^T)
        out_t = T_t^T R(Theta_t) q_t + lambda_t w_t <q_t, k_t> v_t

    q, k (b, n, h, d), v (b, n, h, e), share (lambda), write (w) and log_decay (a) (b, n, h), angle_steps
    (b, n, h, pairs). No output depends on a later token, bit for bit.
    """
    here = k, v, share * write
    begins = [x.new_zeros(1, *x.shape[2:]) for x in here] if state is None else state[1:]
    key, value, weight = (previous(x, first, cu_seqlens) for x, first in zip(here, begins, strict=True))
    cos, sin = cos_sin(angle_steps.double(), torch.promote_types(key.dtype, torch.float32))
    key = rotate(key, cos, -sin, "interleaved")  # by the angle between the two tokens
    out, sums = linear_rope_attention(
        q,
        key,
        value.to(key.dtype),
        feature_map=None,
        normalize=False,
        log_decay=log_decay,
        angle_steps=angle_steps,
        write=log_decay.exp() * (weight + (1 - share) * write),
        cu_seqlens=cu_seqlens,
        state=None if state is None else state.sums,
        return_state=True,
    )
    wide = torch.promote_types(q.dtype, torch.float32)
    own = ((q.to(wide) * k.to(wide)).sum(-1) * here[2])[..., None] * v
    ends = (at_last(x, first, cu_seqlens) for x, first in zip(here, begins, strict=True))
    return (out + own).to(v.dtype), State(sums, *ends)


class Mamba3(nn.Module):
    """u (b, n, d_model) -> y (b, n, d_model). The arguments are those of mamba_ssm's Mamba3 with is_mimo=False.

    a_activation: softplus, as in mamba_ssm 2.3.2, or ``heavy_tail``, as in its sources since. The weights
    do not tell which of the two they were trained with.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        a_activation=F.softplus,
    ) -> None:
        super().__init__()
        self.d_inner = expand * d_model
        self.headdim, self.nheads = headdim, self.d_inner // headdim
        self.d_state, self.ngroups = d_state, ngroups
        self.pairs = int(d_state * rope_fraction) // 2  # only the first 2 * pairs features of k and q turn
        self.A_floor, self.a_activation = A_floor, a_activation
        self.sizes = [*[self.d_inner] * 2, *[ngroups * d_state] * 2, *[self.nheads] * 3, self.pairs]
        self.in_proj = nn.Linear(d_model, sum(self.sizes), bias=False)
        dt = torch.exp(torch.empty(self.nheads).uniform_(math.log(0.001), math.log(0.1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.B_bias = nn.Parameter(torch.ones(self.nheads, 1, d_state))
        self.C_bias = nn.Parameter(torch.ones(self.nheads, 1, d_state))
        self.B_norm, self.C_norm = nn.RMSNorm(d_state, eps=1e-5), nn.RMSNorm(d_state, eps=1e-5)
        self.D = nn.Parameter(torch.ones(self.nheads))
        self.norm = nn.RMSNorm(self.d_inner, eps=1e-5) if is_outproj_norm else None
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Training, a prompt, a piece of one, and a step of one token are this one call."""
        z, x, B, C, *gates = self.in_proj(u).split(self.sizes, -1)
        dt, A, trap, angle = (gate.to(torch.promote_types(u.dtype, torch.float32)) for gate in gates)
        x = x.unflatten(-1, (self.nheads, self.headdim))
        k = self.per_head(self.B_norm(B.unflatten(-1, (self.ngroups, self.d_state))), self.B_bias)
        q = self.per_head(self.C_norm(C.unflatten(-1, (self.ngroups, self.d_state))), self.C_bias)
        dt = F.softplus(dt + self.dt_bias)
        out, last = trapezoidal_attention(
            q,
            k,
            x,
            share=trap.sigmoid(),
            write=dt,
            log_decay=-self.a_activation(A).clamp(min=self.A_floor) * dt,
            angle_steps=math.pi * angle.tanh()[:, :, None] * dt[..., None],  # (b, n, heads, pairs)
            cu_seqlens=cu_seqlens,
            state=state,
        )
        weight = None if self.norm is None else self.norm.weight.view(self.nheads, self.headdim)
        y = gated_norm(out, weight, eps=1e-5, gate=z, v=x, skip=self.D, skip_order="before")
        y = self.out_proj(y)
        return (y, last) if return_state else y

    def per_head(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (b, n, groups, d_state), shared by the heads of each group, plus the bias of each head."""
        return (x.repeat_interleave(self.nheads // self.ngroups, 2) + bias[:, 0]).to(x.dtype)


@torch.no_grad()
def main(length: int = 500, steps: int = 20) -> None:
    torch.manual_seed(0)
    mixer = Mamba3(d_model=128, d_state=64, headdim=32)
    u = torch.randn(1, length + steps, 128)
    whole = mixer(u)
    y, state = mixer(u[:, :length], return_state=True)
    pieces = [y]
    for token in u[:, length:].split(1, 1):
        y, state = mixer(token, state=state.donate(), return_state=True)  # overwrites the state's memory
        pieces.append(y)
    difference = (torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max()
    assert difference < 1e-5, difference
    size = sum(x.nbytes for x in (*state.sums.tensors().values(), *state[1:]))
    print(f"a prompt of {length} tokens and {steps} steps are the whole sequence, to {difference:.0e}")
    print(f"the state has {size:,} bytes, after {state.sums.position.item()} tokens as after one")


if __name__ == "__main__":
    main()
