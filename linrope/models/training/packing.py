"""Packs documents into a row of fixed size, so that all batches have the same shapes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linrope.common.argument_checks import check_integer_tensors, check_sizes
from linrope.models.training.batch import NO_TARGET


def pack(documents: Sequence[Tensor], *, tokens: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packs documents into one row whose shapes do not depend on them, as CUDA graphs require.

    Zeros fill the row: a sequence of its own, without targets. Empty sequences fill the bounds. So the loss and its
    gradients are those of the documents alone:

        F.cross_entropy(logits.flatten(0, 1), targets.flatten())        with model(row, cu_seqlens=cu_seqlens)

    Args:
        documents: integers (n,), at most ``sequences`` documents, with at most ``tokens`` tokens in all.
        tokens: the length of the row.
        sequences: the largest number of documents.

    Returns:
        row (1, tokens); targets (1, tokens): the next token, -100 at the end of a document and beyond the last one;
        cu_seqlens (sequences + 2,). All are int64, on the documents' device.

    Raises:
        TypeError: documents are not integers.
        ValueError: there is no document, or they do not fit.

    >>> from linrope.models.training import pack
    >>> documents = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    >>> row, targets, cu_seqlens = pack(documents, tokens=8, sequences=3)
    >>> row[0].tolist(), targets[0].tolist(), cu_seqlens.tolist()
    ([5, 6, 7, 8, 9, 0, 0, 0], [6, 7, -100, 9, -100, -100, -100, -100], [0, 3, 5, 8, 8])
    """
    check_sizes(tokens=tokens, sequences=sequences)
    if not documents:
        raise ValueError("documents: got none, expected at least one")
    for i, document in enumerate(documents):
        check_integer_tensors(**{f"documents[{i}]": document})
        if document.ndim != 1 or not len(document):
            raise ValueError(f"documents[{i}]: got shape {tuple(document.shape)}, expected (n,) with n >= 1")
    total = sum(map(len, documents))
    if len(documents) > sequences or total > tokens:
        raise ValueError(
            f"documents: got {len(documents)} with {total} tokens, expected at most {sequences} with {tokens}"
        )
    device = documents[0].device
    ends = torch.tensor([len(x) for x in documents], device=device).cumsum(0)
    cu_seqlens = torch.full((sequences + 2,), tokens, dtype=torch.int64, device=device)
    cu_seqlens[0], cu_seqlens[1 : len(ends) + 1] = 0, ends
    row = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    row[0, :total] = torch.cat([x.long() for x in documents])
    targets = torch.full_like(row, NO_TARGET)
    targets[0, : total - 1] = row[0, 1:total]
    targets[0, ends - 1] = NO_TARGET
    return row, targets, cu_seqlens
