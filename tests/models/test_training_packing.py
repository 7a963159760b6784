"""Documents in a row of fixed size have the losses and gradients that they have alone."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import native
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import pack

DOCUMENTS = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)) for n in (20, 2, 70)]


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_losses_and_gradients_are_those_of_the_documents(backend: str) -> None:
    if backend == "native" and (reason := native.why_not()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2, backend=backend))

    def gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    row, targets, cu_seqlens = pack(DOCUMENTS, tokens=110, sequences=6)
    logits, _ = model(row, cu_seqlens=cu_seqlens)
    found = gradients(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    losses = [
        F.cross_entropy(model(x[None, :-1])[0][0], x[1:], reduction="sum") for x in DOCUMENTS
    ]  # fmt: skip
    expected = gradients(torch.stack(losses).sum() / sum(len(x) - 1 for x in DOCUMENTS))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


def test_a_full_row_has_an_empty_rest() -> None:
    row, targets, cu_seqlens = pack(
        [torch.tensor([3, 4], dtype=torch.int32), torch.tensor([5])], tokens=3, sequences=2
    )
    assert row.tolist() == [[3, 4, 5]]
    assert targets.tolist() == [[4, -100, -100]]
    assert cu_seqlens.tolist() == [0, 2, 3, 3]


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ([], ValueError, "documents: got none"),
        ([torch.ones(2)], TypeError, r"documents\[0\]: got torch.float32"),
        ([torch.ones(2, dtype=int), torch.ones(1, 2, dtype=int)], ValueError, r"documents\[1\]: got shape \(1, 2\)"),
        ([torch.ones(0, dtype=int)], ValueError, r"documents\[0\]: got shape \(0,\), expected \(n,\) with n >= 1"),
        ([torch.ones(5, dtype=int)], ValueError, "got 1 with 5 tokens, expected at most 2 with 4"),
        ([torch.ones(1, dtype=int)] * 3, ValueError, "got 3 with 3 tokens, expected at most 2 with 4"),
    ],
)  # fmt: skip
def test_refusals(documents: list[Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack(documents, tokens=4, sequences=2)
