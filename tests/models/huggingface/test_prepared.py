"""generate() by prepared steps: the tokens and the cache of the ordinary calls, and when they are not taken."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope.backends import native
from linrope.decode import why_not
from linrope.decode.model_step import ModelStep
from linrope.models.huggingface import LinRopeForCausalLM, modeling
from linrope.models.huggingface.cache_name import CACHE
from tests.models.huggingface.tiny import KINDS, config, filled_cache, tokens

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each prepared step that is taken."""
    taken, kind, call = [], ModelStep, ModelStep.__call__
    monkeypatch.setattr(kind, "__call__", lambda step, x, *at: (taken.append(len(x)), call(step, x, *at))[1])
    return taken


def causal_lm(**options: Any) -> LinRopeForCausalLM:
    torch.manual_seed(0)
    return LinRopeForCausalLM(config(**options)).eval()


def generate(model: LinRopeForCausalLM, *, ids: Tensor | None = None, **options: Any) -> Any:
    ids = tokens(2, 9) if ids is None else ids
    fixed = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return model.generate(ids, **(fixed | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"forget_gate": False, "attention_bias": True},
        {"erase_gate": "tied"},
        {"forget_gate": {"per": "feature"}},
    ],
    ids=str,
)
def test_tokens_and_cache(options: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_lm(**options)
    got = generate(model, output_logits=True)
    assert steps == [2] * 9
    ids = torch.cat((got.sequences, tokens(2, 3, seed=2)), 1)
    mask = torch.ones_like(ids)  # without it a generated pad token would count as padding
    again = generate(model, ids=ids, attention_mask=mask, cache=got[CACHE])
    monkeypatch.setattr(modeling, "step_of_generate", lambda *_, **__: None)
    expected = generate(model, output_logits=True)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    resumed = generate(model, ids=ids, attention_mask=mask, cache=expected[CACHE])
    assert torch.equal(again.sequences, resumed.sequences)
    assert again[CACHE].get_seq_length() == 9 + 10 + 3 + 10 - 1


def test_a_prompt_of_one_token(steps: list[int]) -> None:
    generate(causal_lm(), ids=tokens(2, 1))
    assert steps == [2] * 9


def test_prompts_with_padding(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, mask = causal_lm(), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    got = generate(model, attention_mask=mask, output_logits=True)
    assert steps == [2] * 9
    alone = generate(model, ids=tokens(2, 9)[:1, 3:])
    assert torch.equal(got.sequences[:1, 9:], alone.sequences[:, 6:])
    monkeypatch.setattr(modeling, "step_of_generate", lambda *_, **__: None)
    expected = generate(model, attention_mask=mask, output_logits=True)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"num_beams": 3}, 1),  # beams put other states into the cache
        ({"use_cache": False}, 0),
        ({"output_hidden_states": True}, 0),
        ({"position_ids": torch.arange(9)[None]}, 0),  # positions of other shapes than the states'
    ],
)
def test_other_calls_take_ordinary_steps(options, most, steps, monkeypatch) -> None:
    model = causal_lm()
    got = generate(model, **options).sequences
    assert len(steps) <= most
    monkeypatch.setattr(modeling, "step_of_generate", lambda *_, **__: None)
    assert torch.equal(got, generate(model, **options).sequences)


def test_hidden_states_are_captured_only_in_calls_that_ask_for_them(steps: list[int]) -> None:
    model = causal_lm()
    generate(model, output_hidden_states=True)  # leaves transformers' hooks on the layers
    generate(model)
    assert steps == [2] * 9
    model.config.output_hidden_states = True
    generate(model)
    model.config.output_hidden_states = False
    model.model.layers[0].register_forward_hook(lambda *_: None)
    generate(model)
    assert steps == [2] * 9


class DoubledMLP(modeling.LinRopeMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledLayer(modeling.LinRopeLayer):
    def forward(self, x: Tensor, **options: Any) -> Any:
        x, state = super().forward(x, **options)
        return 2 * x, state


@pytest.mark.parametrize(("part", "kind"), [("mlp", DoubledMLP), ("", DoubledLayer)])
def test_layers_with_a_forward_of_their_own_take_it(part: str, kind: type, steps: list[int]) -> None:
    model = causal_lm()
    for layer in model.model.layers:
        layer.get_submodule(part).__class__ = kind
    got = generate(model, output_logits=True)
    assert steps == []
    expected = model(got.sequences, use_cache=False).logits[:, 8:-1]
    torch.testing.assert_close(torch.stack(got.logits, 1), expected, rtol=1e-4, atol=1e-4)
    states = [state.detach() for state in model.with_states()(tokens(2, 9))[1]]
    assert f"a module of another kind, {kind.__name__}" in str(why_not(model.with_states(), states))


class Scaled(LinRopeForCausalLM):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        result = super().forward(*arguments, **options)
        return type(result)(**result | {"logits": 2 * result.logits})


def test_a_model_with_a_forward_of_its_own_has_no_call_with_states() -> None:
    with pytest.raises(TypeError, match=r"^with_states: got a Scaled with a forward of its own"):
        Scaled(config()).with_states()


@pytest.mark.parametrize("kind", ["hybrid", "decay", "gated"])
def test_models_without_a_prepared_step(kind: str, steps: list[int]) -> None:
    generate(causal_lm(**KINDS[kind]))
    generate(causal_lm().double())
    assert steps == []


def test_weights_may_change_between_calls_of_generate(steps: list[int]) -> None:
    model = causal_lm()
    first = generate(model).sequences
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    assert not torch.equal(first, generate(model).sequences)
    with torch.no_grad():  # outside of generate: every call reads the weights
        before = model(tokens(2, 1), cache=filled_cache(model, tokens(2, 9))).logits
        model.model.norm.weight.mul_(2)
        after = model(tokens(2, 1), cache=filled_cache(model, tokens(2, 9))).logits
    torch.testing.assert_close(after, 2 * before)
    assert len(steps) == 18
