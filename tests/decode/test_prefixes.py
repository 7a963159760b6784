"""Prefixes that requests share: read once, kept within bytes, and never waited for in vain."""

from typing import Any

import pytest
import torch

from linrope.decode import Engine, Generation, prefixes
from linrope.decode.batched import Batched
from linrope.decode.separate import Separate
from linrope.decode.serving_models import Pool
from linrope.models import LanguageModel, LanguageModelConfig
from tests.support.engines import SIZES, Recorded, finish

hf = pytest.importorskip("transformers")

from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM  # noqa: E402
from tests.support import families  # noqa: E402

WINDOW = {"num_key_value_heads": 2, "sliding_window": 16}
MODELS = {
    "pool": (Pool, lambda: LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))),
    "linrope": (Batched, lambda: LinRopeForCausalLM(LinRopeConfig(**SIZES, full_attention_interval=2))),
    "window": (Separate, lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, **WINDOW))),
} | (
    {"qwen3_5": (Batched, lambda: families.model("qwen3_5", vocab_size=256))}
    if "qwen3_5" in families.CONFIGURATIONS
    else {}
)  # fmt: skip


def make(kind: str, **options: Any) -> Engine:
    torch.manual_seed(0)
    serving, model = MODELS[kind]
    engine = Engine(model(), **{"slots": 3, "queue": 4, "budget": 32} | options)
    assert type(engine.serving) is serving
    engine.ends = set()
    return engine


def requests_of(prefix: list[int], tails: list[list[int]], given: bool = True) -> list[Any]:
    options = {"max_tokens": 6, "temperature": 0, "prefix": len(prefix) if given else 0}
    return [Recorded(prefix + tail, **options) for tail in tails]


def count_reads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the pieces of prompts that the model reads, but for single tokens, which may be decoded."""
    counts: list[int] = []
    read = engine.serving.read

    def counted(slots: list[int], pieces: list[list[int]], ended: list[int]) -> Any:
        counts.extend(len(x) for x in pieces if len(x) > 1)
        return read(slots, pieces, ended)

    monkeypatch.setattr(engine.serving, "read", counted)
    return counts


PREFIX, TAILS = [*range(7, 57)], [[4] * 20, [5], [6, 9], [5]]


@pytest.mark.parametrize("kind", MODELS)
def test_a_prefix_is_read_once_and_changes_no_token(kind, monkeypatch) -> None:
    engine = make(kind)
    expected = requests_of(PREFIX, TAILS, given=False)
    for x in expected:
        finish(engine, [x])
    counts, requests = count_reads(engine, monkeypatch), requests_of(PREFIX, TAILS)
    finish(engine, requests)
    assert [x.tokens for x in requests] == [x.tokens for x in expected]
    assert sum(counts) == len(PREFIX) + sum(len(x) for x in TAILS if len(x) > 1)
    assert engine.prefixes.hits == 3
    other = requests_of([*PREFIX[:-1], 99], [[5]])
    finish(engine, other)
    assert engine.prefixes.hits == 3
    assert [x.prompt_tokens for x in requests] == [len(PREFIX) + len(x) for x in TAILS]


def test_the_prefixes_used_least_recently_are_given_up(monkeypatch) -> None:
    engine = make("pool")
    a, b, c = ([x] * 20 for x in (1, 2, 3))
    finish(engine, requests_of(a, [[5]]))
    size = engine.prefixes.nbytes
    assert size == sum(x.nbytes for x in engine.serving.empty)
    engine.prefixes.most_bytes = 5 * size // 2
    for prefix, hits in ((b, 0), (a, 1), (c, 1), (a, 2), (b, 2), (a, 3), (c, 3)):
        finish(engine, requests_of(prefix, [[5]]))
        assert engine.prefixes.hits == hits
        assert engine.prefixes.nbytes <= 2 * size


@pytest.mark.parametrize("prefix_bytes", [0, 1])
@pytest.mark.parametrize("kind", MODELS)
def test_a_prefix_that_is_too_large_is_read_as_any_text(kind, prefix_bytes, monkeypatch) -> None:
    engine = make(kind, prefix_bytes=prefix_bytes)
    expected = requests_of(PREFIX, TAILS, given=False)
    finish(engine, expected)
    requests = requests_of(PREFIX, TAILS[:3])
    finish(engine, requests)
    assert [x.tokens for x in requests] == [x.tokens for x in expected[:3]]
    assert (engine.prefixes.hits, engine.prefixes.kept, engine.prefixes.nbytes) == (0, {}, 0)
    later = requests_of(PREFIX, TAILS[:3])
    assert all(engine.submit(x) for x in later)
    engine.step()
    assert engine.running == later  # none waits for another


@pytest.mark.parametrize("leaves", ["cancelled", "raises"])
@pytest.mark.parametrize("kind", ["linrope", "pool"])
def test_those_that_wait_for_a_prefix_go_on_without_its_reader(kind, leaves, monkeypatch) -> None:
    engine = make(kind)
    expected = requests_of(PREFIX, TAILS, given=False)
    finish(engine, expected)
    requests, other = requests_of(PREFIX, TAILS), Recorded([8], max_tokens=2)
    assert all(engine.submit(x) for x in (*requests, other))
    engine.step()
    assert engine.running == [requests[0], other]  # which does not wait
    assert requests[0].prefix_unread == len(PREFIX) - 32
    if leaves == "cancelled":
        requests[0].cancelled = True
    elif kind == "linrope":
        engine.serving.kept[requests[0].slot] = "no states"
    else:
        monkeypatch.setattr(engine.serving, "pool", None)
        with pytest.raises(TypeError, match="not iterable"):
            engine.step()
        monkeypatch.undo()
        for x in [*engine.running]:  # as run() does
            engine.fail(x, TypeError())
    finish(engine, [])
    assert [x.tokens for x in requests] == [[], *(x.tokens for x in expected[1:])]
    assert engine.prefixes.hits == 2
    assert sorted(engine.free) == [0, 1, 2]


def test_a_prefix_that_does_not_fit_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="prefix=3: expected 0 to 2, less than the prompt's tokens"):
        Generation([1, 2, 3], prefix=3)
    with pytest.raises(ValueError, match="prefix=-1: expected 0 to 2"):
        Generation([1, 2, 3], prefix=-1)
    with pytest.raises(TypeError, match="prefix"):
        Generation([1, 2, 3], prefix=1.0)
    with pytest.raises(ValueError, match="prefix=2: expected 0 with a session"):
        Generation([1, 2, 3], prefix=2, session=tmp_path)
    engine = make("pool")
    with pytest.raises(ValueError, match="prefix=2: expected 0 with states"):
        engine.submit(Generation([1, 2, 3], prefix=2, states=engine.serving.empty))
    with pytest.raises(ValueError, match="prefix_bytes=-1: expected at least 0"):
        make("pool", prefix_bytes=-1)


def test_a_prefix_that_finds_no_memory_is_not_kept(monkeypatch) -> None:
    engine = Engine(
        LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2)), 1, queue=1, budget=64
    )

    def no_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(prefixes.copy, "deepcopy", no_memory)
    requests = [Recorded([5] * 40, prefix=20, max_tokens=3, temperature=0) for _ in range(2)]
    finish(engine, requests)
    assert [x.finish_reason for x in requests] == ["length"] * 2
    assert engine.prefixes.nbytes == engine.prefixes.hits == 0
