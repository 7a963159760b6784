"""generate() in a graph draws the tokens of launched steps. There is no GPU: tests/support/recorded.py replays them."""

from typing import Any

import pytest
import torch

from linrope.models import LanguageModel, LanguageModelConfig, generate
from tests.support.recorded import Recorder, replaces_cuda

PROMPT = torch.tensor([[1, 2, 3], [40, 50, 60]])
MODELS: dict[str, dict[str, Any]] = {
    "selective rotation": {"rotary": "selective", "forget_gate": {"longest": 64}},
    "delta rule": {"erase_gate": "tied", "forget_gate": {"per": "feature"}},
    "learned map": {"feature_map": "hedgehog", "decay": "spread"},
    "log scales": {"feature_map": "exp", "decay": "learned"},
}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return replaces_cuda(monkeypatch)


def language_model(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2, **({"backend": "eager"} | options))
    return LanguageModel(config).double()


def tokens(model: LanguageModel, **options: Any) -> torch.Tensor:
    return torch.stack([*generate(model, PROMPT, 12, **options)], 1)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_the_tokens_are_those_of_launched_steps(options: dict[str, Any], recorders: list[Recorder]) -> None:
    model, sampling = language_model(**options), {"temperature": 1.5, "top_k": 90, "top_p": 0.95, "seed": 3}
    expected = tokens(model, **sampling)
    assert torch.equal(tokens(model, graph=True, **sampling), expected)
    (recorder,) = recorders
    assert (recorder.runs, recorder.replays) == (3, 8)


def test_every_token_is_kept(recorders: list[Recorder]) -> None:
    """A replay overwrites the graph's memory, not the tokens before."""
    model = language_model()
    assert [x.tolist() for x in generate(model, PROMPT, 9, temperature=0, graph=True)] == [
        x.tolist() for x in generate(model, PROMPT, 9, temperature=0)
    ]


def test_states_that_grow_are_refused(recorders: list[Recorder]) -> None:
    model = language_model(attention="softmax")
    with pytest.raises(ValueError, match="graph=True: got a state of type KeyValueState"):
        tokens(model, graph=True)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(RuntimeError, match="graph=True: got tensors on cpu, expected a CUDA device"):
        generate(language_model(), PROMPT, 3, graph=True)


def test_nan_is_not_sampled() -> None:
    model = language_model()
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="logits: got NaN"):
        tokens(model)
