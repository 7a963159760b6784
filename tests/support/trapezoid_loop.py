"""Mamba-3's recurrence as a plain loop over the tokens of one sequence, from the paper (arXiv 2603.15569, section 3.1).

It shares no code with the library.

    h_t = alpha_t h_(t-1) + beta_t B_(t-1) x_(t-1)^T + gamma_t B_t x_t^T        y_t = h_t^T C_t
    alpha = e^a    beta = (1 - lambda) w e^a    gamma = lambda w                 w = dt in the paper

B and C are the keys and queries, rotated at each token by the sum of the angles so far.
"""

from torch import Tensor


def turned(x: Tensor, angles: Tensor, layout: str) -> Tensor:
    """x (f,) with its first pairs turned by the angles (pairs,)."""
    y, pairs = x.clone(), len(angles)
    for i in range(pairs):
        first, second = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + pairs)
        y[first] = x[first] * angles[i].cos() - x[second] * angles[i].sin()
        y[second] = x[first] * angles[i].sin() + x[second] * angles[i].cos()
    return y


def trapezoidal_loop(
    q: Tensor, k: Tensor, v: Tensor, share: Tensor, write: Tensor, log_decay: Tensor, angles: Tensor,
    layout: str = "interleaved",
) -> Tensor:  # fmt: skip
    """q (n, h, f), k (n, g, f), v (n, g, e); share, write, log_decay (n, g) -> y (n, h, e).

    log_decay is each token's whole log decay, and angles (n, g, pairs) are each token's whole angles, summed up.
    """
    (n, h, f), (_, g, e) = q.shape, v.shape
    y = v.new_zeros(n, h, e)
    for head in range(h):
        kv = head // (h // g)
        state, last_key, last_value = v.new_zeros(f, e), v.new_zeros(f), v.new_zeros(e)
        for t in range(n):
            key, query = (turned(x, angles[t, kv], layout) for x in (k[t, kv], q[t, head]))
            alpha, dt, own = log_decay[t, kv].exp(), write[t, kv], share[t, kv]
            beta, gamma = (1 - own) * dt * alpha, own * dt
            state = alpha * state + beta * last_key.outer(last_value) + gamma * key.outer(v[t, kv])
            y[t, head] = query @ state
            last_key, last_value = key, v[t, kv]
    return y
