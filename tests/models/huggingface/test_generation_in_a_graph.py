"""generate(graph=True) draws the tokens of launched steps. There is no GPU: tests/support/recorded.py replays them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearRoPEAttention
from linrope.models.huggingface import LinRopeForCausalLM, modeling, padding
from linrope.models.huggingface.cache_name import CACHE
from tests.models.huggingface import tiny
from tests.models.huggingface.tiny import KINDS, tokens
from tests.support.recorded import Recorder, replaces_cuda

LINEAR = {name: options for name, options in KINDS.items() if name != "hybrid"}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return replaces_cuda(monkeypatch)


def causal_lm(**options: Any) -> LinRopeForCausalLM:
    """With the backend whose operations the stand-in records."""
    model = tiny.causal_lm(**options)
    for module in model.modules():
        if isinstance(module, LinearRoPEAttention):
            module.backend = "eager"
    return model


def generate(model: LinRopeForCausalLM, ids: Tensor, **options: Any) -> Any:
    fixed = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return model.generate(ids, **(fixed | options))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not look whether the mask has padding, and gets the mask."""
    may_pad = padding.may_pad
    monkeypatch.setattr(padding, "may_pad", lambda mask, n: n == 1 or may_pad(mask, n))
    monkeypatch.setattr(modeling, "may_pad", padding.may_pad)


@pytest.mark.parametrize(("kind", "padded"), [*((kind, True) for kind in LINEAR), ("gated", False)])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_tokens_and_cache(kind: str, padded: bool, recorders: list[Recorder]) -> None:
    model, ids = causal_lm(**LINEAR[kind]), tokens(2, 9)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :4], mask[0, :4] = 0, 0
    expected = generate(model, ids, attention_mask=mask, max_new_tokens=6)
    got = generate(model, ids, attention_mask=mask, max_new_tokens=6, graph=True)
    assert torch.equal(got.sequences, expected.sequences)
    assert [(x.runs, x.replays) for x in recorders] == [(3, 2)]
    assert got[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
    for layer, other in zip(got[CACHE].layers, expected[CACHE].layers, strict=True):
        for name, x in other.state.tensors().items():
            torch.testing.assert_close(layer.state.tensors()[name], x, msg=name)


def test_sampling_and_a_cache_that_goes_on(recorders: list[Recorder]) -> None:
    model, sequences = causal_lm(), []
    for graph in (False, True):
        torch.manual_seed(1)
        how = {"do_sample": True, "temperature": 1.5, "graph": graph}
        first = generate(model, tokens(2, 9), **how)
        ids = torch.cat((first.sequences, tokens(2, 3, seed=2)), 1)
        mask = torch.ones_like(ids)  # without it a generated pad token would count as padding
        sequences.append(generate(model, ids, attention_mask=mask, **{CACHE: first[CACHE]}, **how).sequences)
    assert torch.equal(*sequences)
    assert [x.replays for x in recorders] == [6, 6]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("hybrid", {}, "graph=True: got a state of type KeyValueState"),
        ("gated", {"num_beams": 2}, "graph=True: got other states in the cache"),
        ("gated", {"output_hidden_states": True}, "output_hidden_states: got True with graph=True"),
    ],
)
def test_refusals(kind: str, options: dict[str, Any], message: str, recorders: list[Recorder]) -> None:
    model = causal_lm(**KINDS[kind])
    with pytest.raises(ValueError, match=message):
        generate(model, tokens(2, 9), graph=True, **options)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(RuntimeError, match="graph=True: got tensors on cpu, expected a CUDA device"):
        generate(causal_lm(), tokens(2, 9), graph=True)
