"""Going on from a cache: the tokens of one sequence, or an error that names the length of the mask."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from linrope.models.huggingface import LinRopeCache, LinRopeForCausalLM
from tests.models.huggingface.tiny import KINDS, causal_lm, filled_cache, tokens

SEEN, NEW = 7, 4  # tokens in the cache, and tokens that it has not seen


@pytest.fixture(params=["hybrid", "gated"])
def model(request: pytest.FixtureRequest) -> LinRopeForCausalLM:
    return causal_lm(**KINDS[request.param])


@pytest.fixture
def cache(model: LinRopeForCausalLM) -> LinRopeCache:
    return filled_cache(model, tokens(1, SEEN))


def whole(new: int = NEW) -> Tensor:
    return torch.cat((tokens(1, SEEN), tokens(1, new, seed=2)), 1)


def ones(n: int | None) -> Tensor | None:
    return None if n is None else torch.ones(1, n, dtype=torch.long)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prefill_chunk_size": 2}], ids=str)
def test_all_tokens_or_the_new_ones_under_a_whole_mask_go_on(model, cache, how) -> None:
    if "prefill_chunk_size" in how and Version(transformers.__version__) < Version("5.21"):
        pytest.skip(f"transformers {transformers.__version__}: its chunks ignore the tokens in the cache")
    cache.batch_repeat_interleave(how.get("num_beams", 1))
    for new in (1, 2 * SEEN):
        prompt = whole(new)
        expected = model.generate(prompt, max_new_tokens=3, **how)[:, -3:]
        for ids, mask in ((prompt, None), (prompt, ones(SEEN + new)), (prompt[:, SEEN:], ones(SEEN + new))):
            own = copy.deepcopy(cache)  # a fork of the sequence
            out = model.generate(ids, attention_mask=mask, cache=own, max_new_tokens=3, **how)
            assert torch.equal(out[:, -3:], expected)


@pytest.mark.parametrize(
    ("sent", "mask", "expected"),
    [
        ("new", None, rf"got None .* expected shape \(1, {SEEN + NEW}\)"),
        ("new", NEW, rf"got shape \(1, {NEW}\) .* expected shape \(1, {SEEN + NEW}\)"),
        ("new", SEEN + NEW + 1, rf"expected shape \(1, {SEEN + NEW}\)"),
        ("whole", SEEN + NEW + 1, rf"expected .* or \(1, {SEEN + NEW}\) if they are all"),
        ("seen", None, rf"got None .* expected shape \(1, {2 * SEEN}\)"),
    ],
)
def test_a_missing_or_wrong_mask_is_refused_with_the_right_length(model, cache, sent, mask, expected) -> None:
    ids = {"new": whole()[:, SEEN:], "whole": whole(), "seen": whole()[:, :SEEN]}[sent]
    before = copy.deepcopy(cache.layers[0].state)
    with pytest.raises(ValueError, match=f"^attention_mask: .*{expected}"):
        model.generate(ids, attention_mask=ones(mask), cache=cache, max_new_tokens=5)
    assert cache.get_seq_length() == SEEN
    assert torch.equal(cache.layers[0].state.sums.kv, before.sums.kv)


def test_embeddings_are_those_of_all_tokens(model: LinRopeForCausalLM, cache: LinRopeCache) -> None:
    def generate(x: Tensor, mask: Tensor | None) -> Tensor:
        own = copy.deepcopy(cache)
        return model.generate(inputs_embeds=x, attention_mask=mask, cache=own, max_new_tokens=5)

    embedded = model.model.embed_tokens(whole())
    assert torch.equal(generate(embedded, None), model.generate(whole(), max_new_tokens=5)[:, -5:])
    for mask in (None, ones(SEEN + NEW)):
        with pytest.raises(ValueError, match=rf"inputs_embeds: got {NEW} tokens, expected the cache's"):
            generate(embedded[:, SEEN:], mask)
    with pytest.raises(ValueError, match=rf"attention_mask: got shape \(1, {NEW}\), expected \(1, 11\)"):
        generate(embedded, ones(NEW))


def test_a_first_call_needs_a_mask_of_the_inputs_or_none(model: LinRopeForCausalLM) -> None:
    for more in ({}, {"cache": LinRopeCache(model.config)}):
        for n in (SEEN - 1, SEEN + 1):
            with pytest.raises(ValueError, match=rf"attention_mask: got shape .*, expected \(1, {SEEN}\)"):
                model.generate(tokens(1, SEEN), attention_mask=ones(n), max_new_tokens=2, **more)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["hybrid", "gated"])
@torch.no_grad()
def test_rows_go_on_from_a_padded_cache_with_a_whole_mask_or_none(kind: str, side: str) -> None:
    """States count tokens without padding, and full attention keeps its mask: none is needed.

    Each row gets the logits that it gets alone, whatever the masked span holds.
    """
    model, new = causal_lm(**KINDS[kind]), tokens(2, NEW, seed=2)
    rows, padding = (tokens(1, 3), tokens(1, 5, seed=3)), (2, 0) if side == "left" else (0, 2)
    alone = [model(torch.cat((row, new[i : i + 1]), 1)).logits[:, -NEW:] for i, row in enumerate(rows)]
    mask = torch.cat((F.pad(torch.ones_like(rows[0]), padding), torch.ones_like(rows[1])))
    both = torch.cat((mask, torch.ones_like(new)), 1)
    for held in (0, 7):
        first = torch.cat((F.pad(rows[0], padding, value=held), rows[1]))
        cache = filled_cache(model, first, attention_mask=mask)
        for given in (None, both):
            logits = model(new, attention_mask=given, cache=copy.deepcopy(cache)).logits
            torch.testing.assert_close(logits, torch.cat(alone))
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(2, 4\), expected \(2, 9\)"):
        model(new, attention_mask=torch.ones_like(new), cache=cache)
