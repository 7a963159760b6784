"""A step in a graph does what a launched step does. There is no GPU: tests/support/recorded.py replays operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.cuda_graphs import GraphedStep
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import pack
from tests.support.recorded import Recorder, replaces_cuda

Step = Callable[..., Any]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return replaces_cuda(monkeypatch)


def training_step(**options: Any) -> tuple[LanguageModel, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    config = LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2, backend="eager", **options)
    model = LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)

    def step(tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        logits, _ = model(tokens, cu_seqlens=cu_seqlens, return_states=False)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def rows(count: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(256, (count, 2, 71))
    return [(x[:, :-1], x[:, 1:]) for x in tokens]


def packed(count: int) -> list[tuple[Tensor, ...]]:
    """Batches of one to four documents in rows of 90 tokens."""
    batches = []
    for i in range(count):
        lengths = [(20, 1, 33, 7), (90,), (3, 80), (64, 20, 2)][i % 4]
        documents = [torch.randint(256, (length,)) for length in lengths]
        batches.append(pack(documents, tokens=90, sequences=4))
    return batches


OPTIONS: dict[str, dict[str, Any]] = {
    "default block": {},
    "gates and learned map": {
        "forget_gate": {"longest": 64},
        "rotary": "selective",
        "feature_map": "hedgehog",
    },
    "delta rule": {"erase_gate": "tied"},
    "log scales": {"feature_map": "exp", "decay": "learned"},
}


@pytest.mark.parametrize(
    ("name", "batches"),
    [*((name, packed) for name in OPTIONS), ("default block", rows)],
)
def test_training_in_a_graph(name: str, batches: Callable[[int], Any], recorders: list[Recorder]) -> None:
    """Losses and weights of six steps, the last three of which are replays, with a learning rate that changes."""
    results = []
    data = batches(6)
    for graph in (False, True):
        model, optimizer, step = training_step(**OPTIONS[name])
        run: Step = GraphedStep(step) if graph else step
        losses = []
        for i, batch in enumerate(data):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (i + 1))
            losses.append(run(*batch).detach())
        results.append([torch.stack(losses), *model.state_dict().values()])
    (recorder,) = recorders
    assert (recorder.runs, recorder.replays) == (3, 3)
    assert len(set(results[0][0].tolist())) == 6
    for launched, graphed in zip(*results, strict=True):
        torch.testing.assert_close(graphed, launched, rtol=1e-5, atol=1e-6)


def test_results_keep_their_values_and_structure(recorders: list[Recorder]) -> None:
    step = GraphedStep(lambda x, y: {"sum": x + y, "rest": (x - y, None)}, warmup=1)
    found = [step(torch.tensor([float(i)]), torch.tensor([1.0])) for i in range(5)]
    assert [float(x["sum"]) for x in found] == [1, 2, 3, 4, 5]
    assert [float(x["rest"][0]) for x in found] == [-1, 0, 1, 2, 3]
    assert found[-1]["rest"][1] is None
    assert recorders[0].runs == 1


def test_a_value_in_python_is_not_computed_again(recorders: list[Recorder]) -> None:
    """The stand-in shows what a CUDA graph would do."""
    count = iter(range(10))
    step = GraphedStep(lambda x: x + next(count), warmup=1)
    assert [float(step(torch.zeros(1))) for _ in range(4)] == [0, 1, 1, 1]


def test_random_numbers_continue(recorders: list[Recorder]) -> None:
    def draws(wrap: Callable[[Step], Step]) -> Tensor:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        step = wrap(lambda x: x + F.dropout(torch.ones(9)) + torch.empty(9).exponential_(generator=generator))
        return torch.stack([step(torch.zeros(9)) for _ in range(6)])

    assert torch.equal(draws(lambda step: GraphedStep(step, warmup=2)), draws(lambda step: step))


@pytest.mark.parametrize(
    "step",
    [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0]), lambda x: x.cpu(),
     lambda x: x * x.tolist()[0]],
)  # fmt: skip
def test_what_waits_for_the_device_is_refused(step: Step, recorders: list[Recorder]) -> None:
    run = GraphedStep(step, warmup=1)
    run(torch.ones(2))
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        run(torch.ones(2))


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ((X, 1.0), TypeError, r"tensors\[1\]: got float, expected torch.Tensor"),
        ((X,), ValueError, r"tensors: got 1, expected 2, as in the first call"),
        (
            (X, X.double()),
            TypeError,
            r"tensors\[1\]: got torch.float64, expected torch.float32, as in the first",
        ),
        (
            (X[:1], X),
            ValueError,
            r"tensors\[0\]: got shape \(1, 3\), expected \(2, 3\), as in the first call",
        ),
        ((X, X.to("meta")), ValueError, r"tensors\[1\]: got device meta, expected cpu"),
        ((X.clone().requires_grad_(), X), ValueError, r"tensors\[0\]: got a tensor that requires gradients"),
    ],
)
def test_other_tensors_are_refused(
    tensors: tuple[Any, ...], error: type[Exception], message: str, recorders: list[Recorder]
) -> None:
    step = GraphedStep(lambda x, y: x + y)
    step(X, X)
    with pytest.raises(error, match=message):
        step(*tensors)


def test_other_refusals(recorders: list[Recorder]) -> None:
    with pytest.raises(ValueError, match="warmup=0: expected at least 1"):
        GraphedStep(lambda x: x, warmup=0)
    with pytest.raises(ValueError, match="tensors: got none"):
        GraphedStep(lambda: None)()
    with pytest.raises(TypeError, match="function: returned float, expected tensors"):
        GraphedStep(lambda x: 1.0)(X)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match="autocast: got a call inside"),
    ):
        GraphedStep(lambda x: x)(X)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(RuntimeError, match="tensors: got tensors on cpu, expected a CUDA device"):
        GraphedStep(lambda x: x)(X)
