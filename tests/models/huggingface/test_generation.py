from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from linrope.layer.state import LayerState
from linrope.models.huggingface import LinRopeCache, LinRopeForCausalLM
from tests.models.huggingface.tiny import HYBRID, KINDS, causal_lm, filled_cache, tokens

two_kinds = pytest.mark.parametrize("kind", ["hybrid", "gated"])


@pytest.fixture
def model() -> LinRopeForCausalLM:
    return causal_lm(**HYBRID)


def greedy(model: LinRopeForCausalLM, ids: Tensor, new: int) -> Tensor:
    """By the definition: the whole sequence again for each token."""
    for _ in range(new):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
    return ids


@two_kinds
def test_greedy_is_the_argmax_of_each_call(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(3, 7)
    expected = greedy(model, ids, 8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, pad_token_id=0), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=8, prefill_chunk_size=3), expected)
    embedded = model.generate(inputs_embeds=model.model.embed_tokens(ids), max_new_tokens=8)
    assert torch.equal(embedded, expected[:, 7:])


@two_kinds
def test_left_padded_prompts_give_what_each_gives_alone(kind: str) -> None:
    model, prompts = causal_lm(**KINDS[kind]), [tokens(1, n, seed=n) for n in (3, 9, 6)]
    ids = torch.cat([F.pad(prompt, (9 - prompt.shape[1], 0)) for prompt in prompts])
    for options in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
        both = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=6, **options)
        for prompt, row in zip(prompts, both):
            alone = model.generate(prompt, max_new_tokens=6, **options)
            assert torch.equal(row[9:], alone[0, prompt.shape[1] :])


def test_sampling_follows_the_seed_alone(model: LinRopeForCausalLM) -> None:
    how = {"do_sample": True, "temperature": 1.5, "top_k": 20, "max_new_tokens": 10}
    runs = []
    for seed, cached in ((1, True), (1, False), (2, True)):
        set_seed(seed)
        runs.append(model.generate(tokens(2, 5), use_cache=cached, num_return_sequences=2, **how))
    assert runs[0].shape == (4, 15)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@two_kinds
def test_beam_search_reorders_states(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(2, 6)
    how = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, use_cache=False, **how))


def test_tokens_stream_as_they_come(model: LinRopeForCausalLM) -> None:
    streamer = Mock(spec=BaseStreamer)
    out = model.generate(tokens(1, 5), max_new_tokens=4, streamer=streamer)
    pieces = [call.args[0].flatten() for call in streamer.put.call_args_list]
    assert [len(piece) for piece in pieces] == [5, 1, 1, 1, 1]
    assert torch.equal(torch.cat(pieces), out[0].cpu())
    streamer.end.assert_called_once()


@two_kinds
def test_a_saved_conversation_goes_on(kind: str, tmp_path: Path) -> None:
    model, first, second = causal_lm(**KINDS[kind]), tokens(1, 5), tokens(1, 4, seed=2)
    cache = LinRopeCache(model.config)
    said = model.generate(first, cache=cache, max_new_tokens=3)
    seen = cache.get_seq_length()
    assert seen == 7  # all but the last token, which nothing has read yet
    cache.save(tmp_path / "chat.safetensors")

    prompt = torch.cat((said, second), 1)  # test_resume.py has other ways to go on
    loaded = LinRopeCache.load(tmp_path / "chat.safetensors", first.device)
    assert loaded.get_seq_length() == seen
    out = model.generate(prompt, cache=loaded, max_new_tokens=5)
    assert torch.equal(out, greedy(model, prompt, 5))


def test_the_cache_has_both_of_its_names(model: LinRopeForCausalLM, recwarn, caplog) -> None:
    ids = tokens(1, 9)
    expected = model.generate(ids, max_new_tokens=4)
    for name in ("cache", "past_key_values"):
        cache = filled_cache(model, ids[:, :5])
        assert torch.equal(model.generate(ids, max_new_tokens=4, **{name: cache}), expected)
        out = model(ids[:, :5], use_cache=True)
        assert out.cache is not None
        first = out.logits
        second = model(ids[:, 5:], **({"cache": None, "past_key_values": None} | {name: out.cache})).logits
        torch.testing.assert_close(torch.cat((first, second), 1), model(ids).logits)
    for call in (model, model.model, model.generate):
        with pytest.raises(ValueError, match="cache, past_key_values: got both, expected one"):
            call(ids, cache=cache, past_key_values=LinRopeCache(model.config))
    assert not recwarn.list
    assert "deprecated" not in caplog.text


def test_a_padded_conversation_goes_on() -> None:
    model = causal_lm(decay="retnet")
    cache = LinRopeCache(model.config)
    one, other, later, last = (tokens(1, n, seed=n) for n in (3, 5, 4, 2))  # of two sequences: two turns each
    first = torch.cat((F.pad(one, (2, 0)), other))
    mask = (first != 0).long()
    how = {"cache": cache, "eos_token_id": None}
    said = model.generate(first, attention_mask=mask, max_new_tokens=3, **how)
    second = torch.cat((later, F.pad(last, (2, 0))))
    mask = torch.cat((mask, torch.ones(2, 3, dtype=mask.dtype), (second != 0).long()), 1)
    both = torch.cat((said, second), 1)
    out = model.generate(both, attention_mask=mask, max_new_tokens=4, **how)[:, -4:]
    for row, turns in zip(out, ((one, later), (other, last))):
        expected = greedy(model, torch.cat((greedy(model, turns[0], 3), turns[1]), 1), 4)
        assert torch.equal(row, expected[0, -4:])


@two_kinds
def test_inference_mode_and_its_end_may_share_a_cache(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(1, 6)
    cache = LinRopeCache(model.config)
    with torch.inference_mode():
        model(ids[:, :4], cache=cache)
        model(ids[:, 4:5], cache=cache)
    out = model.generate(ids, cache=cache, max_new_tokens=3)
    assert torch.equal(out, greedy(model, ids, 3))


def test_only_full_attention_grows(model: LinRopeForCausalLM) -> None:
    cache = LinRopeCache(model.config)
    assert cache.batch_size == -1
    sizes, places = [], set()
    with torch.no_grad():
        for n in (5, 1, 1, 40, 1):
            model(tokens(2, n), cache=cache)
            linear, full = (layer.state for layer in cache.layers)
            sizes.append((linear.sums.kv.shape, full.k.shape[1]))
            places.add(linear.sums.kv.data_ptr())
    assert [length for _, length in sizes] == [5, 6, 7, 47, 48]
    assert {shape for shape, _ in sizes} == {(2, 2, 8, 16)}
    assert len(places) == 2  # single tokens are written into the state of the call before
    assert (cache.batch_size, cache.get_seq_length(), cache.get_max_length()) == (2, 48, -1)


def test_sequences_of_a_cache_are_chosen_and_repeated(model: LinRopeForCausalLM) -> None:
    ids, more = tokens(3, 6), tokens(1, 2, seed=2)
    choices: list[tuple[str, Any, list[int]]] = [
        ("reorder_cache", torch.tensor([2, 0]), [2, 0]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ]
    for method, argument, rows in choices:
        cache = LinRopeCache(model.config)
        getattr(cache, method)(argument)  # before the first token there is nothing to choose
        model(ids, cache=cache)
        getattr(cache, method)(argument)
        later = more.expand(len(rows), -1)
        expected = model(torch.cat((ids[rows], later), 1)).logits[:, 6:]
        torch.testing.assert_close(model(later, cache=cache).logits, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, cache=cache).logits, model(ids).logits)


def test_a_saved_cache_has_every_tensor_of_the_states(tmp_path: Path) -> None:
    class LaterState(LayerState):
        def detach(self) -> LayerState:
            return self

        def tensors(self) -> dict[str, Tensor]:
            return super().tensors() | {"extra": torch.ones(1)}

    cache = filled_cache(causal_lm(decay="spread", feature_map="exp", short_conv=3), tokens(1, 3))
    state = cache.layers[0].state
    cache.layers[0].state = LaterState(state.sums, state.conv)
    cache.save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", "pt") as file:
        saved = {name for name in file.keys() if name.startswith("0.")}  # noqa: SIM118
    assert saved == {f"0.{name}" for name in state.tensors()} | {"0.extra"}


def test_there_is_one_kind_of_cache(model: LinRopeForCausalLM) -> None:
    with pytest.raises(ValueError, match="cache_implementation='static': expected None"):
        model.generate(tokens(1, 6), max_new_tokens=3, cache_implementation="static")


def test_files_that_do_not_fit_are_refused(model: LinRopeForCausalLM, tmp_path: Path) -> None:
    path, ids = tmp_path / "cache.safetensors", tokens(1, 3)
    with pytest.raises(FileNotFoundError, match="no such file"):
        LinRopeCache.load(path)
    cache = filled_cache(model, ids)
    cache.layers[0].state.save(path)
    with pytest.raises(ValueError, match=r"expected 'linrope\.LinRopeCache'"):
        LinRopeCache.load(path)
    cache.save(path)
    loaded = LinRopeCache.load(path, ids.device)
    with pytest.raises(ValueError, match=r"^cache: made with"):
        causal_lm(feature_map="relu", **HYBRID)(ids, cache=loaded)
    with pytest.raises(ValueError, match="cache: got 2 layers, expected 3"):
        causal_lm(num_hidden_layers=3)(ids, cache=loaded)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        LinRopeCache.load(path)
