import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from linrope import LinearAttentionState
from linrope.models.huggingface import LinRopeCache, LinRopeForCausalLM
from tests.models.huggingface.tiny import HYBRID, KINDS, causal_lm, tokens

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def model() -> LinRopeForCausalLM:
    return causal_lm(**HYBRID)


def greedy(model: LinRopeForCausalLM, ids: Tensor, new: int) -> Tensor:
    """By the definition: the whole sequence again for each token."""
    for _ in range(new):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
    return ids


def best_of_all(model: LinRopeForCausalLM, ids: Tensor, new: int, vocabulary: int) -> Tensor:
    """The likeliest of all continuations: what a beam search as wide as their number finds."""
    grid = torch.cartesian_prod(*[torch.arange(vocabulary)] * new).view(-1, new)
    rows = torch.cat((ids.expand(len(grid), -1), grid), 1)
    logits = model(rows, use_cache=False).logits[:, ids.shape[1] - 1 : -1].float().log_softmax(-1)
    scores = logits.gather(2, grid[..., None]).sum((1, 2))
    return rows[scores.argmax()]


@every_kind
def test_greedy_is_the_argmax_of_each_call(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(3, 7)
    expected = greedy(model, ids, 8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, pad_token_id=0), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=8, prefill_chunk_size=3), expected)
    embedded = model.generate(inputs_embeds=model.model.embed_tokens(ids), max_new_tokens=8)
    assert torch.equal(embedded, expected[:, 7:])


@every_kind
def test_left_padded_prompts_give_what_each_gives_alone(kind: str) -> None:
    model, prompts = causal_lm(**KINDS[kind]), [tokens(1, n, seed=n) for n in (3, 9, 6)]
    ids = torch.cat([F.pad(prompt, (9 - prompt.shape[1], 0)) for prompt in prompts])
    for options in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
        both = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=6, **options)
        for prompt, row in zip(prompts, both):
            alone = model.generate(prompt, max_new_tokens=6, **options)
            assert torch.equal(row[9:], alone[0, prompt.shape[1] :])


def test_sampling_follows_the_seed_alone(model: LinRopeForCausalLM) -> None:
    ids = tokens(2, 5)
    how = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 20,
        "max_new_tokens": 10,
        "num_return_sequences": 2,
    }
    runs = []
    for seed, cached in ((1, True), (1, False), (2, True)):
        set_seed(seed)
        runs.append(model.generate(ids, use_cache=cached, **how))
    assert runs[0].shape == (4, 15)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@every_kind
def test_beam_search_reorders_states(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(2, 6)
    how = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, use_cache=False, **how))


def test_wide_beam_search_finds_the_best_of_all() -> None:
    model, ids = causal_lm(vocab_size=6, **HYBRID), tokens(1, 4) % 6
    found = model.generate(ids, num_beams=36, max_new_tokens=3, length_penalty=0.0)
    assert torch.equal(found[0], best_of_all(model, ids, 3, 6))


class Collector(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten())

    def end(self) -> None:
        self.ended = True


def test_tokens_stream_as_they_come(model: LinRopeForCausalLM) -> None:
    streamer, ids = Collector(), tokens(1, 5)
    out = model.generate(ids, max_new_tokens=4, streamer=streamer)
    assert [len(piece) for piece in streamer.pieces] == [5, 1, 1, 1, 1]
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.pieces), out[0].cpu())


@every_kind
def test_a_saved_conversation_goes_on(kind: str, tmp_path: Path) -> None:
    model, first, second = causal_lm(**KINDS[kind]), tokens(1, 5), tokens(1, 4, seed=2)
    cache = LinRopeCache(model.config)
    said = model.generate(first, past_key_values=cache, max_new_tokens=3)
    seen = cache.get_seq_length()
    assert seen == 7  # all but the last token, which nothing has read yet
    cache.save(tmp_path / "chat.safetensors")

    prompt = torch.cat((said, second), 1)  # test_resume.py has other ways to go on
    loaded = LinRopeCache.load(tmp_path / "chat.safetensors", first.device)
    assert loaded.get_seq_length() == seen
    assert torch.equal(
        model.generate(prompt, past_key_values=loaded, max_new_tokens=5), greedy(model, prompt, 5)
    )


def test_a_padded_conversation_goes_on() -> None:
    model = causal_lm(decay="retnet")
    turns = [tokens(1, n, seed=n) for n in (3, 5, 4, 2)]  # of two sequences: two turns each
    first = torch.cat((F.pad(turns[0], (2, 0)), turns[1]))
    cache, mask = LinRopeCache(model.config), (first != 0).long()
    said = model.generate(
        first, attention_mask=mask, past_key_values=cache, max_new_tokens=3, eos_token_id=None
    )
    second = torch.cat((turns[2], F.pad(turns[3], (2, 0))))
    mask = torch.cat((mask, torch.ones(2, 3, dtype=mask.dtype), (second != 0).long()), 1)
    out = model.generate(
        torch.cat((said, second), 1), attention_mask=mask, past_key_values=cache, max_new_tokens=4
    )[:, -4:]
    for row, (one, two) in enumerate(((turns[0], turns[2]), (turns[1], turns[3]))):
        expected = greedy(model, torch.cat((greedy(model, one, 3), two), 1), 4)
        assert torch.equal(out[row], expected[0, -4:])


def test_a_copy_forks_a_sequence(model: LinRopeForCausalLM) -> None:
    ids, cache = tokens(1, 6), LinRopeCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for seed in (2, 3):
        prompt = torch.cat((ids, tokens(1, 3, seed=seed)), 1)
        out = model.generate(prompt, past_key_values=copy.deepcopy(cache), max_new_tokens=4)
        assert torch.equal(out, greedy(model, prompt, 4))
    assert cache.get_seq_length() == 6


@every_kind
def test_inference_mode_and_its_end_may_share_a_cache(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(1, 6)
    cache = LinRopeCache(model.config)
    with torch.inference_mode():
        model(ids[:, :4], past_key_values=cache)
        model(ids[:, 4:5], past_key_values=cache)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=3)
    assert torch.equal(out, greedy(model, ids, 3))


def test_only_full_attention_grows(model: LinRopeForCausalLM) -> None:
    cache = LinRopeCache(model.config)
    assert cache.batch_size == -1
    sizes, places = [], set()
    with torch.no_grad():
        for n in (5, 1, 1, 40, 1):
            model(tokens(2, n), past_key_values=cache)
            linear, full = (layer.state for layer in cache.layers)
            sizes.append((linear.kv.shape, full.k.shape[1]))
            places.add(linear.kv.data_ptr())
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
        model(ids, past_key_values=cache)
        getattr(cache, method)(argument)
        later = more.expand(len(rows), -1)
        expected = model(torch.cat((ids[rows], later), 1)).logits[:, 6:]
        torch.testing.assert_close(model(later, past_key_values=cache).logits, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_a_saved_cache_has_every_tensor_of_the_states(tmp_path: Path) -> None:
    @dataclass(frozen=True, eq=False, repr=False)
    class LaterState(LinearAttentionState):
        extra: Tensor | None = None

        def tensors(self) -> dict[str, Tensor]:
            return super().tensors() | {"extra": self.extra}

    model, path = causal_lm(decay="spread", feature_map="exp", short_conv=3), tmp_path / "cache"
    cache = LinRopeCache(model.config)
    model(tokens(1, 3), past_key_values=cache)
    state = cache.layers[0].state
    cache.layers[0].state = LaterState(
        **{f.name: getattr(state, f.name) for f in fields(state)}, extra=torch.ones(1)
    )
    cache.save(path)
    with safe_open(path, "pt") as file:
        saved = {name for name in file.keys() if name.startswith("0.")}  # noqa: SIM118
    assert saved == {f"0.{name}" for name in state.tensors()} | {"0.extra"}


def test_a_state_cannot_be_rolled_back(model: LinRopeForCausalLM) -> None:
    ids, cache = tokens(1, 6), LinRopeCache(model.config)
    for how in ({"assistant_model": causal_lm()}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model.generate(ids, max_new_tokens=3, **how)
    model(ids, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"crop\(-2\): a state sums all tokens"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="cache_implementation='static': expected None"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static")


def test_files_that_do_not_fit_are_refused(model: LinRopeForCausalLM, tmp_path: Path) -> None:
    path, cache, ids = tmp_path / "cache.safetensors", LinRopeCache(model.config), tokens(1, 3)
    with pytest.raises(FileNotFoundError, match="no such file"):
        LinRopeCache.load(path)
    model(ids, past_key_values=cache)
    cache.layers[0].state.save(path)
    with pytest.raises(ValueError, match=r"expected 'linrope\.LinRopeCache'"):
        LinRopeCache.load(path)
    cache.save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        LinRopeCache.load(path)
    cache.save(path)
    loaded = LinRopeCache.load(path, ids.device)
    with pytest.raises(ValueError, match="state: made with"):
        causal_lm(feature_map="relu", **HYBRID)(ids, past_key_values=loaded)
    with pytest.raises(ValueError, match="past_key_values: got 2 layers, expected 3"):
        causal_lm(num_hidden_layers=3)(ids, past_key_values=loaded)
