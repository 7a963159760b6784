"""Checks the tokens that ``generate`` draws from a model, and the errors that it raises."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from linrope.models import LanguageModel, LanguageModelConfig, generate, load_states, save_states


def tiny(**options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(**({"embed_dim": 32, "num_layers": 2, "num_heads": 2} | options))


TINY = tiny()


@pytest.mark.parametrize("options", [{"decay": "learned", "feature_map": "exp"}, {"rotary": "selective"}])
def test_generation_with_gates_is_the_argmax_of_each_call(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    gates = {"forget_gate": True, "short_conv": 4, "qk_norm": True}
    model, tokens = LanguageModel(tiny(**gates, **options)).double(), torch.tensor([[1, 2, 3]])
    for token in generate(model, tokens, 8, temperature=0):
        assert torch.equal(token, model(tokens)[0][:, -1].argmax(-1))
        tokens = torch.cat((tokens, token[:, None]), 1)


def test_generation_with_a_seed_repeats(model: LanguageModel) -> None:
    def run(seed: int) -> torch.Tensor:
        return torch.stack(list(generate(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), 8, seed=seed, **odds)))

    odds = {"top_k": 50, "top_p": 0.9}
    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))


def test_at_the_smallest_temperatures_the_likeliest_token_is_drawn(model: LanguageModel) -> None:
    prompt = torch.tensor([[1, 2, 3]])
    likeliest, *others = (list(generate(model, prompt, 3, temperature=t)) for t in (0, 1e-39, 5e-324))
    assert others == [likeliest, likeliest]


def test_a_long_prompt_is_read_in_pieces(model: LanguageModel) -> None:
    prompt, lengths = torch.randint(256, (1, 2100)), []
    expected = model(prompt)[0][:, -1].argmax(-1)
    model.register_forward_hook(lambda _, inputs, out: lengths.append((inputs[0].shape[1], out[0].shape[1])))
    assert list(generate(model, prompt, 1, temperature=0)) == [expected]
    assert lengths == [(1024, 1), (1024, 1), (52, 1)]  # with the logits of the last token


@pytest.mark.parametrize(
    "options",
    [{}, {"erase_gate": "independent"}, {"qk_norm": True}, {"attention": "softmax"}],
    ids=str,
)
def test_generation_goes_on_from_its_states_and_leaves_those_given(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """In two calls, through a file, as in one; with prepared steps and without."""
    torch.manual_seed(0)
    model, prompt = LanguageModel(tiny(**options)), torch.randint(256, (2, 9))
    whole = torch.stack([*generate(model, prompt, 12, temperature=0)], 1)
    first, states = generate(model, prompt, 5, temperature=0, return_states=True)
    assert states[0].position.tolist() == [9 + 4] * 2
    save_states(states, tmp_path / "states")
    loaded = load_states(tmp_path / "states")
    assert [x.nbytes for x in loaded] == [x.nbytes for x in states]
    for given in (states, loaded):
        second, after = generate(model, first[:, -1:], 7, temperature=0, states=given, return_states=True)
        assert torch.equal(torch.cat((first, second), 1), whole)
        assert after[0].position.tolist() == [9 + 11] * 2
        assert given[0].position.tolist() == [9 + 4] * 2
    again = torch.stack([*generate(model, first[:, -1:], 7, temperature=0, states=states)], 1)
    assert torch.equal(again, second)


def test_top_k_and_top_p_keep_the_right_tokens_and_their_odds() -> None:
    odds = torch.tensor([0.5, 0.3, 0.15, 0.05])
    prompt = torch.zeros(20000, 1, dtype=torch.int64)

    def model(tokens: torch.Tensor, states: object, logits_to_keep: int) -> tuple[torch.Tensor, list[object]]:
        return odds.log().expand(*tokens.shape, 4), []

    for k, p, kept in (
        (None, None, 4),
        (2, None, 2),
        (None, 0.0, 1),
        (None, 0.5, 1),
        (None, 0.8, 2),
        (3, 0.81, 3),
    ):
        (drawn,) = generate(model, prompt, 1, top_k=k, top_p=p, seed=0)  # type: ignore[arg-type]
        expected = odds.double() * (torch.arange(4) < kept)
        # 20000 draws: a standard deviation of at most 0.0036
        found = F.one_hot(drawn, 4).double().mean(0)
        torch.testing.assert_close(found, expected / expected.sum(), atol=0.02, rtol=0)
    (cold,) = generate(model, prompt, 1, temperature=0.1, seed=0)  # type: ignore[arg-type]
    assert (cold == 0).double().mean() > 0.99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_new_tokens": 0, "return_states": True},
            "max_new_tokens=0: expected at least 1 with return_states=True",
        ),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": -0.1}, "top_p=-0.1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, "prompt: got shape"),
    ],
)
def test_generate_refuses(options: dict[str, object], message: str, model: LanguageModel) -> None:
    arguments = {"prompt": torch.tensor([[1]]), "max_new_tokens": 1} | options
    with pytest.raises(ValueError, match=message):
        generate(model, **arguments)  # type: ignore[call-overload]


def test_a_text_is_refused_as_a_prompt(model: LanguageModel) -> None:
    with pytest.raises(
        TypeError, match=r"prompt: got str, expected a tensor \(b, n\) of tokens; of a text's bytes: "
    ):
        generate(model, "def", 5)  # type: ignore[call-overload]
