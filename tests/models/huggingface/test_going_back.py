"""Caches that are cropped, and generate() with drafts."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope.layer.key_value_state import KeyValueState
from linrope.models.huggingface import LinRopeCache, modeling
from linrope.models.huggingface import cache as cache_module
from tests.models.huggingface.tiny import KINDS, causal_lm, tokens

every_kind = pytest.mark.parametrize("kind", KINDS)
GREEDY = {"do_sample": False, "eos_token_id": None}
TOKENS_BACK = 32  # an eighth of the cache's own, for fewer steps


def recording_cache(model: Any) -> LinRopeCache:
    cache = LinRopeCache(model.config)
    cache.activate_past_recording()
    return cache


@every_kind
@torch.no_grad()
def test_rejected_tokens_leave_no_trace(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(2, 30)
    cache, got = recording_cache(model), []
    for piece, rejected in zip(ids.split([12, 3, 1, 1, 1, 5, 7], 1), (4, 2, 0, 3, 0, 1, 0), strict=True):
        draft = tokens(2, rejected, seed=2)
        got.append(model(torch.cat((piece, draft), 1), cache=cache).logits[:, : piece.shape[1]])
        cache.crop(-rejected)
    assert cache.get_seq_length() == 30
    torch.testing.assert_close(torch.cat(got, 1), model(ids).logits)


@every_kind
@torch.no_grad()
def test_rejected_tokens_leave_no_trace_behind_padding(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = recording_cache(model)
    for stop, rejected in ((8, 4), (10, 2), (12, 0)):
        start = cache.get_seq_length()
        read = torch.cat((ids[:, start:stop], tokens(2, rejected, seed=2)), 1)
        seen = torch.cat((mask[:, :stop], mask.new_ones(2, rejected)), 1)
        got = model(read, attention_mask=seen, cache=cache).logits[:, : stop - start]
        cache.crop(-rejected)
    torch.testing.assert_close(got, model(ids, attention_mask=mask).logits[:, 10:])


@pytest.mark.parametrize("kind", ["hybrid", "gated"])
def test_drafts_give_the_tokens_of_greedy_search(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By prompt lookup, and by a model whose only difference is noise. Padding on the left."""
    model = causal_lm(**KINDS[kind])
    prompt = tokens(1, 10).repeat(1, 2)
    mask = torch.ones_like(prompt)
    mask[:, :4] = 0
    draft: Any = copy.deepcopy(model)
    draft.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    with torch.no_grad():
        for x in draft.parameters():
            x.add_(torch.randn_like(x) * 0.2 * x.square().mean().sqrt())
    crops: list[int] = []
    crop = LinRopeCache.crop
    monkeypatch.setattr(LinRopeCache, "crop", lambda self, count: crops.append(count) or crop(self, count))
    for given in ({}, {"attention_mask": mask}):
        options: dict[str, Any] = {**GREEDY, **given, "max_new_tokens": 12}
        expected = model.generate(prompt, **options)
        for x in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": draft}):
            assert torch.equal(model.generate(prompt, **options, **x), expected)
    assert min(crops) < 0  # some tokens were rejected
    assert 0 in crops


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
@torch.no_grad()
def test_a_copy_of_a_recording_cache_holds_no_layers(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(1, 12)
    cache = recording_cache(model)
    model(ids, cache=cache)
    for fork in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert not any(layer.past for layer in fork.layers)
        assert fork.is_croppable
        torch.testing.assert_close(
            model(ids, cache=fork).logits, model(torch.cat((ids, ids), 1)).logits[:, 12:]
        )
    assert len(pickle.dumps(cache)) < 2 * cache.nbytes + 20_000


@torch.no_grad()
def test_the_past_of_softmax_layers_has_no_keys() -> None:
    model = causal_lm(**KINDS["hybrid"])
    cache = recording_cache(model)
    model(tokens(1, 100), cache=cache)
    for _ in range(20):
        model(tokens(1, 1), cache=cache)
    assert not any(isinstance(call.before, KeyValueState) for layer in cache.layers for call in layer.past)
    cache.crop(-20)
    got = model(tokens(1, 3), cache=cache).logits
    torch.testing.assert_close(got, model(torch.cat((tokens(1, 100), tokens(1, 3)), 1)).logits[:, 100:])


def test_errors_of_transformers_reach_the_caller() -> None:
    model = causal_lm()
    with pytest.raises((RuntimeError, ValueError), match="cache"):
        model.generate(tokens(1, 6), prompt_lookup_num_tokens=3, use_cache=False, max_new_tokens=3)


def test_a_cache_goes_on_after_drafts_and_records_no_more() -> None:
    model, prompt = causal_lm(), tokens(1, 10).repeat(1, 2)
    cache = LinRopeCache(model.config)
    text = model.generate(prompt, cache=cache, prompt_lookup_num_tokens=4, max_new_tokens=8, **GREEDY)
    assert not any(layer.record_past or layer.past for layer in cache.layers)
    more = model.generate(text, cache=cache, max_new_tokens=8, **GREEDY)
    assert torch.equal(more, model.generate(prompt, max_new_tokens=16, **GREEDY))


def test_a_caller_s_recording_goes_on_after_drafts() -> None:
    model = causal_lm()
    cache = recording_cache(model)
    model.generate(tokens(1, 8), cache=cache, prompt_lookup_num_tokens=3, max_new_tokens=5, **GREEDY)
    assert all(layer.record_past for layer in cache.layers)


@torch.no_grad()
def test_a_prepared_step_is_taken_between_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back keeps the states' memory, for which the step was prepared."""
    from linrope.decode.model_step import ModelStep

    taken: list[Tensor] = []
    call = ModelStep.__call__
    monkeypatch.setattr(ModelStep, "__call__", lambda self, x: taken.append(x) or call(self, x))
    model = causal_lm().float()
    prompt = tokens(1, 10).repeat(1, 2)
    options = GREEDY | {"max_new_tokens": 30}
    expected = model.generate(prompt, **options)
    if not taken:
        pytest.skip("no step can be prepared here")
    taken.clear()
    rounds: list[int] = []
    crop = LinRopeCache.crop
    monkeypatch.setattr(LinRopeCache, "crop", lambda self, count: rounds.append(count) or crop(self, count))
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=4, **options), expected)
    singles = len(taken)
    assert any(rounds)
    assert singles > 1


@torch.no_grad()
def test_the_past_of_a_long_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cache_module, modeling):
        monkeypatch.setattr(module, "TOKENS_BACK", TOKENS_BACK)
    model, ids = causal_lm(), tokens(1, 3 * TOKENS_BACK)
    cache = recording_cache(model)
    read = 2 * TOKENS_BACK + 14
    out = [model(x, cache=cache).logits for x in ids[:, :read].split([2 * TOKENS_BACK + 9, *(1,) * 5], 1)]
    recorded = sum(call.tokens for call in cache.layers[0].past)
    assert recorded == TOKENS_BACK + 5
    for _ in range(TOKENS_BACK):
        model(ids[:, :1], cache=cache)
    assert sum(call.tokens for call in cache.layers[0].past) == TOKENS_BACK
    with pytest.raises(
        RuntimeError, match=rf"crop\({-TOKENS_BACK - 1}\): expected 0 .. {-TOKENS_BACK}, the tokens"
    ):
        cache.crop(-TOKENS_BACK - 1)
    cache.crop(-TOKENS_BACK)
    out.append(model(ids[:, read : read + 5], cache=cache).logits)
    torch.testing.assert_close(torch.cat(out, 1), model(ids[:, : read + 5]).logits)


def test_a_cache_that_cannot_go_back_says_so() -> None:
    model, ids = causal_lm(), tokens(2, 6)
    cache = LinRopeCache(model.config)
    model(ids, cache=cache)
    assert not cache.is_croppable
    cache.crop(0)
    for count in (-2, 1):
        with pytest.raises(
            RuntimeError, match=rf"crop\({count}\): expected 0 .. 0, the tokens recorded since"
        ):
            cache.crop(count)
    cache = recording_cache(model)
    model(ids, cache=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(RuntimeError, match=r"expected 0 \.\. 0"):
        cache.crop(-1)
    assert cache.get_seq_length() == 6


def test_sampled_tokens_are_drawn_from_the_model_s_own_logits() -> None:
    model, prompt = causal_lm(), tokens(1, 10).repeat(1, 2)
    out = model.generate(
        prompt, max_new_tokens=30, do_sample=True, temperature=0.7, top_k=3, eos_token_id=None,
        prompt_lookup_num_tokens=5, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    expected = model(out.sequences).logits[:, 19:-1]
    torch.testing.assert_close(torch.stack(out.logits, 1), expected.float(), rtol=1e-5, atol=1e-5)
