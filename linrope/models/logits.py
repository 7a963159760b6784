"""Which tokens a language model computes logits for."""

from torch import Tensor

from linrope.common.argument_checks import check_integers


def kept_rows(x: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The vectors x (b, n, dim) of the last so many tokens; 0: of all; a tensor (k,): of the tokens at these indices.

    Raises:
        TypeError, ValueError: logits_to_keep is no integer, or negative.
    """
    if isinstance(logits_to_keep, Tensor):
        return x[:, logits_to_keep]
    check_integers(logits_to_keep=logits_to_keep)
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep={logits_to_keep}: expected at least 0")
    return x[:, -logits_to_keep:] if logits_to_keep else x
