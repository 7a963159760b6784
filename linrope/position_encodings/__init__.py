"""Other position encodings for comparison, and softmax attention that uses them.

Absolute encodings are added to the input of a layer or a model. Relative encodings change the n x m scores of
softmax attention, which linear attention never forms.
"""

import torch
from torch import Tensor

from linrope.layer.key_value_state import KeyValueState
from linrope.position_encodings.absolute import ABSOLUTE, LearnedAbsolute, Sinusoidal
from linrope.position_encodings.relative import RELATIVE, DeBERTa, RelativeEncoding, Shaw, TransformerXL
from linrope.position_encodings.softmax_attention import SoftmaxAttention
from linrope.rotation.rotary import Rotary

__all__ = [
    "ABSOLUTE",
    "RELATIVE",
    "DeBERTa",
    "KeyValueState",
    "LearnedAbsolute",
    "RelativeEncoding",
    "Shaw",
    "Sinusoidal",
    "SoftmaxAttention",
    "TransformerXL",
    "long_term_decay",
]


def long_term_decay(distances: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """RoPE's long-term decay: a bound on <R(p) q, R(p') k> that falls with the distance, though not at every step.

        S_i = sum_{t<i} exp(1j distance theta_t),   decay = mean over i = 1 .. dim/2 of |S_i|

    Let h_t be the product of the t-th pairs of q and k as complex numbers, and 0 after the last pair. Then
    |<R(p) q, R(p') k>| <= dim/2 * decay * max |h_(t+1) - h_t|.

    Args:
        distances: integers of any shape.
        dim: the number of features, even.
        base: the base of theta.

    Returns:
        float64 of the shape of distances.

    Source: RoFormer section 3.4.3 (arXiv 2104.09864).

    >>> from linrope.position_encodings import long_term_decay
    >>> long_term_decay(torch.tensor([0, 50, 250]), dim=128)
    tensor([32.5000, 12.6295,  6.5482], dtype=torch.float64)
    """
    angles = Rotary(dim, base=base).angles(distances).squeeze(-2)
    return torch.polar(torch.ones_like(angles), angles).cumsum(-1).abs().mean(-1)
