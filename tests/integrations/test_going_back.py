"""Caches of recurrent layers that are cropped, and generate() with drafts."""

import copy
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation import GenerationMixin

from linrope.backends import native
from linrope.integrations import transformers as linrope_transformers
from linrope.layer.recording import TOKENS_BACK
from tests.support.families import CACHE, TESTED, cache_of, model, relative, tokens

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
# The older Inkling loses its convolutions' past, and an older generate() finds no cache in Mamba-2.
OLD = Version(transformers.__version__) < Version("5.24")
BROKEN = ("inkling", "mamba2") if OLD else ()
RUN = [x for x in TESTED if x not in ("minimax", *BROKEN)]
every_family = pytest.mark.parametrize("family", RUN)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def recording_cache(family: str, net: nn.Module) -> dict[str, Any]:
    cache = DynamicCache(config=net.config.get_text_config())  # type: ignore[operator, union-attr]
    cache.activate_past_recording()
    return {CACHE[family]: cache}


def read(net: nn.Module, cache: dict[str, Any], ids: Tensor, rejected: Tensor) -> Tensor:
    """The logits of ids, which end a call that reads rejected tokens too."""
    result = net(torch.cat((ids, rejected), 1), use_cache=True, **cache)
    cache_of(result).popitem()[1].crop(-rejected.shape[1])
    return result.logits[:, : ids.shape[1]]


def with_drafts(
    family: str, net: nn.Module, ids: Tensor, drafts: list[int], lengths: Sequence[int] = (16, 3, 1, 1, 3, 1)
) -> Tensor:
    """Reads ids in pieces, with some tokens after each that are removed again; returns the logits of ids.

    drafts: how many of these tokens come after each piece.
    """
    cache = recording_cache(family, net)
    rejected = [tokens(len(ids), n, seed=n) for n in drafts]
    pieces = zip(ids.split([*lengths], 1), rejected, strict=True)
    return torch.cat([read(net, cache, *piece) for piece in pieces], 1)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_rejected_tokens_leave_no_trace(family: str, dtype: torch.dtype) -> None:
    net, ids = model(family, dtype), tokens(2, 25)
    with linrope_transformers.enable(family):
        expected = with_drafts(family, net, ids, [0] * 6)
        got = with_drafts(family, net, ids, [5, 2, 0, 4, 0, 1])
    assert relative(got, expected) < (2e-5 if dtype == torch.float32 else 0.05)


@every_family
@torch.no_grad()
def test_single_tokens_are_removed_as_a_draft_model_does(family: str) -> None:
    net, ids = model(family), tokens(1, 24)

    def after_singles(count: int) -> Tensor:
        """The logits of the last tokens, after count single tokens have been removed again."""
        cache = recording_cache(family, net)
        net(ids[:, :13], use_cache=True, **cache)
        for token in ids[:, 13 : 16 + count].split(1, 1):
            result = net(token, use_cache=True, **cache)
        cache_of(result).popitem()[1].crop(-count)
        pieces = (ids[:, 16:18], *ids[:, 18:].split(1, 1))
        return torch.cat([net(x, use_cache=True, **cache).logits for x in pieces], 1)

    with linrope_transformers.enable(family):
        assert relative(after_singles(4), after_singles(0)) < 2e-5


def drafting(net: nn.Module, noise: float) -> Any:
    """A draft model of four tokens, whose only difference is noise."""
    draft: Any = copy.deepcopy(net)
    draft.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    with torch.no_grad():
        for x in draft.parameters():
            x.add_(torch.randn_like(x) * noise * x.square().mean().sqrt())
    return draft


HALF = ("granitemoehybrid", "falcon_h1", "kimi_linear", "olmo_hybrid", "qwen3_5")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(x, torch.float32) for x in RUN] + [(x, torch.bfloat16) for x in HALF if x in RUN],
    ids=str,
)
def test_drafts_give_the_tokens_of_greedy_search(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By prompt lookup, and by a model whose only difference is noise. Padding on the left."""
    net = model(family, dtype)
    prompt = tokens(1, 12).repeat(1, 2)
    padded, mask = prompt.clone(), torch.ones_like(prompt)
    padded[:, :5], mask[:, :5] = 0, 0
    draft = drafting(net, noise=0.05)
    drafts = [{"prompt_lookup_num_tokens": 4}]
    if family != "mamba2":  # transformers asks a draft's cache for its length, which Mamba-2's does not know
        drafts.append({"assistant_model": draft})
    crops: list[int] = []
    crop = DynamicCache.crop
    monkeypatch.setattr(DynamicCache, "crop", lambda self, count: crops.append(count) or crop(self, count))
    with linrope_transformers.enable(family):
        for given in ({"inputs": prompt}, {"inputs": padded, "attention_mask": mask}):
            options: dict[str, Any] = given | GREEDY | {"max_new_tokens": 20}
            expected = net.generate(**options)  # type: ignore[operator]
            for x in drafts:
                crops.clear()
                assert torch.equal(net.generate(**options, **x), expected)  # type: ignore[operator]
                assert min(crops) < 0  # some tokens were rejected
                assert len(crops) < 40  # and some were not


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_5"])
def test_sampled_tokens_are_drawn_from_the_model_s_own_logits(family: str) -> None:
    net: Any = model(family)
    with linrope_transformers.enable(family):
        out = net.generate(
            tokens(1, 12).repeat(1, 2), max_new_tokens=30, do_sample=True, temperature=0.7, top_k=3, eos_token_id=None,
            prompt_lookup_num_tokens=5, return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
        expected = net(out.sequences).logits[:, 23:-1].detach()
    assert relative(torch.stack(out.logits, 1), expected) < 2e-5


@pytest.mark.long
@torch.no_grad()
def test_drafts_leave_the_distribution_of_samples_as_it_is() -> None:
    """Pearson's statistic of the first three tokens, of which each has two possible values."""
    net: Any = model("qwen3_5")
    draft = drafting(net, noise=0.5)
    prompt, draws = tokens(1, 9), 2000
    options = {"do_sample": True, "top_k": 2, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 4}
    counts: Counter[tuple[int, ...]] = Counter()
    with linrope_transformers.enable("qwen3_5"):
        for seed in range(draws):
            torch.manual_seed(seed)
            text = net.generate(prompt, assistant_model=draft, **options)
            counts[tuple(text[0, 9:12].tolist())] += 1
        expected: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            longer = {}
            for text, p in expected.items():
                likely = net(torch.tensor([[*prompt[0].tolist(), *text]])).logits[0, -1].topk(2)
                for token, share in zip(
                    likely.indices.tolist(), likely.values.softmax(-1).tolist(), strict=True
                ):
                    longer[(*text, token)] = p * share
            expected = longer
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[x] - draws * p) ** 2 / (draws * p) for x, p in expected.items())
    assert statistic < 24.3  # 7 degrees of freedom: exceeded once in 1,000


@every_family
@torch.no_grad()
def test_recording_may_begin_after_a_prompt(family: str) -> None:
    net, ids = model(family), tokens(1, 21)
    with linrope_transformers.enable(family):
        cache = {CACHE[family]: DynamicCache(config=net.config.get_text_config())}  # type: ignore[operator, union-attr]
        net(ids[:, :15], use_cache=True, **cache)
        cache[CACHE[family]].activate_past_recording()
        read(net, cache, ids[:, 15:17], tokens(1, 4, seed=2))
        got = read(net, cache, ids[:, 17:], ids[:, :0])
        expected = with_drafts(family, net, ids, [0] * 3, [15, 2, 4])[:, 17:]
    assert relative(got, expected) < 2e-5


@torch.no_grad()
def test_the_past_of_a_long_text_is_bounded() -> None:
    family = "qwen3_5"
    net, ids = model(family), tokens(1, 3 * TOKENS_BACK)
    with linrope_transformers.enable(family):
        cache = recording_cache(family, net)
        for piece in ids.split((2 * TOKENS_BACK + 50, TOKENS_BACK - 51, 1), 1):
            net(piece, use_cache=True, **cache)
        (made,) = cache.values()
        past = made.layers[0].linrope_past
        assert TOKENS_BACK <= past.tokens <= 2 * TOKENS_BACK
        assert sum(x.untyped_storage().nbytes() // x.nbytes for x in past.calls[0].values()) == len(
            past.calls[0]
        )
        with pytest.raises(
            RuntimeError, match=rf"got {past.tokens + 1} tokens, expected at most {past.tokens}"
        ):
            made.crop(-past.tokens - 1)
        made.crop(-TOKENS_BACK)
        got = net(ids[:, 2 * TOKENS_BACK : 2 * TOKENS_BACK + 9], use_cache=True, **cache).logits
        expected = net(ids[:, : 2 * TOKENS_BACK + 9], use_cache=False, logits_to_keep=9).logits
    assert relative(got, expected) < 2e-5


@pytest.mark.parametrize(
    "other", ["reorder_cache", "reset", "gradients", "transformers alone", "transformers in between"]
)
def test_a_cache_that_cannot_go_back_says_so(other: str) -> None:
    family = "qwen3_5"
    net, ids = model(family), tokens(1, 8)
    with linrope_transformers.enable(family):
        cache = recording_cache(family, net)
        (made,) = cache.values()
        if other == "transformers alone":
            linrope_transformers.disable(family)
        with torch.set_grad_enabled(other == "gradients"):
            net(ids, use_cache=True, **cache)
            if other == "transformers in between":
                linrope_transformers.disable(family)
                net(ids[:, :3], use_cache=True, **cache)
        linrope_transformers.enable(family)
        if other == "reorder_cache":
            made.reorder_cache(torch.tensor([0]))
        elif other == "reset":
            made.reset()
        assert not made.is_croppable
        with pytest.raises(
            RuntimeError, match="got 2 tokens, expected at most 0, those that linrope has recorded"
        ):
            made.crop(-2)
        if other == "transformers in between":
            made.crop(0)  # from here on all is recorded
            with torch.no_grad():
                net(ids, use_cache=True, **cache)
            made.crop(-2)


def test_a_cache_given_to_generate_records_no_more_afterwards() -> None:
    net: Any = model("qwen3_5")
    prompt = tokens(1, 12).repeat(1, 2)
    cache = DynamicCache(config=net.config)
    with linrope_transformers.enable("qwen3_5"):
        options = GREEDY | {CACHE["qwen3_5"]: cache, "max_new_tokens": 8}
        text = net.generate(prompt, prompt_lookup_num_tokens=4, **options)
        assert not cache.layers[0].record_past
        assert cache.layers[0].linrope_past is None
        more = net.generate(text, **options)
        expected = net.generate(prompt, **GREEDY, max_new_tokens=16)
    assert torch.equal(more, expected)


@pytest.mark.parametrize(("length", "new"), [(1, 1), (1, 2), (2, 1)])
def test_a_cache_goes_on_after_a_very_short_text_with_drafts(length: int, new: int) -> None:
    net: Any = model("qwen3_5")
    prompt, cache = tokens(1, length), DynamicCache(config=net.config)
    with linrope_transformers.enable("qwen3_5"):
        options = GREEDY | {CACHE["qwen3_5"]: cache}
        text = net.generate(prompt, prompt_lookup_num_tokens=3, max_new_tokens=new, **options)
        more = net.generate(text, max_new_tokens=5, **options)
        assert torch.equal(more, net.generate(prompt, max_new_tokens=new + 5, **GREEDY))


def test_a_caller_s_recording_goes_on_after_drafts() -> None:
    net: Any = model("qwen3_5")
    cache = recording_cache("qwen3_5", net)
    with linrope_transformers.enable("qwen3_5"):
        net.generate(tokens(1, 8), prompt_lookup_num_tokens=3, max_new_tokens=5, **GREEDY, **cache)
    assert all(x.record_past for cached in cache.values() for x in cached.layers if hasattr(x, "record_past"))


@torch.no_grad()
def test_a_refused_crop_changes_no_layer() -> None:
    net = model("qwen3_5", layer_types=["full_attention", "linear_attention"])
    with linrope_transformers.enable("qwen3_5"):
        cache = recording_cache("qwen3_5", net)
        (made,) = cache.values()
        net(tokens(1, 20), use_cache=True, **cache)
        made.crop(0)
        net(tokens(1, 2), use_cache=True, **cache)
        with pytest.raises(RuntimeError, match="got 5 tokens, expected at most 2"):
            made.crop(-5)
        assert made.get_seq_length() == 22


@every_family
@torch.no_grad()
def test_padding_and_copies_go_back(family: str) -> None:
    net, ids = model(family), tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = {"attention_mask": mask}
    if "position_ids" in inspect.signature(net.forward).parameters:
        padded["position_ids"] = positions

    def read_padded(cache: dict[str, Any], start: int, stop: int) -> Tensor:
        given = {"attention_mask": mask[:, :stop]}
        if "position_ids" in padded:
            given["position_ids"] = positions[:, start:stop]
        logits: Tensor = net(ids[:, start:stop], use_cache=True, **given, **cache).logits
        return logits

    with linrope_transformers.enable(family):
        cache = recording_cache(family, net)
        read_padded(cache, 0, 9)
        read_padded(cache, 9, 14)
        fork = copy.deepcopy(cache)
        for x in (*cache.values(), *fork.values()):
            x.crop(-4)
        expected = recording_cache(family, net)
        read_padded(expected, 0, 9)
        read_padded(expected, 9, 10)
        last = read_padded(expected, 10, 14)
        assert relative(read_padded(cache, 10, 14), last) < 2e-5
        assert relative(read_padded(fork, 10, 14), last) < 2e-5


def test_disable_puts_everything_back() -> None:
    kind = type(model("qwen3_5"))
    names = ("crop", "is_croppable", "reset", "reorder_cache")
    before = [getattr(LinearAttentionCacheLayerMixin, name) for name in names]
    assert kind._is_stateful
    with linrope_transformers.enable("qwen3_5", "mamba2"):
        assert not kind._is_stateful
        linrope_transformers.disable("mamba2")
        assert LinearAttentionCacheLayerMixin.crop is not before[0]
    assert kind._is_stateful
    assert [getattr(LinearAttentionCacheLayerMixin, name) for name in names] == before
    assert not hasattr(GenerationMixin._assisted_decoding, "__wrapped__")
    with pytest.raises(ValueError, match="stateful"):
        model("qwen3_5").generate(tokens(1, 8), prompt_lookup_num_tokens=3)  # type: ignore[operator]
