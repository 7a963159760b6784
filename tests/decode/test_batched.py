"""Hybrids and softmax models in one batched call: what each request gets, and what goes wrong for one alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version

from linrope.backends import native
from linrope.decode.batched import Batch, Batched
from linrope.decode.engine import Engine
from linrope.decode.request import Generation
from linrope.decode.separate import Separate
from linrope.models import LanguageModel, LanguageModelConfig
from tests.support.engines import SIZES, Recorded, finish

hf = pytest.importorskip("transformers")

from linrope.integrations import transformers as linrope_transformers  # noqa: E402
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM  # noqa: E402
from tests.support import families  # noqa: E402

SHARED_HEADS = SIZES | {"num_key_value_heads": 2}
SOFTMAX = SHARED_HEADS | {"max_position_embeddings": 2048}


def of_family(family: str) -> Callable[[], Any]:
    def make() -> Any:
        if family not in families.CONFIGURATIONS:
            pytest.skip(f"this transformers lacks {family}")
        return families.model(family, vocab_size=256)

    return make


MODELS: dict[str, Callable[[], Any]] = {
    **{
        x: of_family(x) for x in ("qwen3_5", "kimi_linear", "granitemoehybrid", "falcon_h1", "mamba2", "lfm2")
    },
    "linrope": lambda: LinRopeForCausalLM(LinRopeConfig(**SHARED_HEADS, full_attention_interval=2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SOFTMAX)),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    model.generation_config.eos_token_id = None
    return model


def alone(model: Any, generation: Generation, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": generation.max_tokens}
    return model.generate(tokens, do_sample=False, pad_token_id=0, **options)[0, len(prompt) :].tolist()


@pytest.fixture(params=[False, True], ids=["transformers", "linrope"])
def enabled(request) -> Any:
    if not request.param:
        yield False
        return
    if native.why_not() is not None:
        pytest.skip(str(native.why_not()))
    with linrope_transformers.enable():
        yield True


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("kind", MODELS)
def test_requests_that_join_and_leave_get_what_the_model_generates_for_each_alone(kind, enabled) -> None:
    if enabled and kind not in families.CONFIGURATIONS:
        pytest.skip("enable() does not change this model")
    if kind == "falcon_h1" and not enabled and Version(hf.__version__) < Version("5.23"):
        pytest.skip("this transformers' own Falcon-H1 does not continue from its cache")
    model, prompts, counts = made(kind), prompts_of((40, 1, 17, 70, 5)), (6, 10, 3, 5, 7)
    engine = Engine(model, slots=3, queue=5, budget=16)
    assert type(engine.serving) is Batched
    requests = [Recorded(list(x), max_tokens=n, temperature=0) for x, n in zip(prompts, counts, strict=True)]
    assert all(engine.submit(x) for x in requests[:2])
    for _ in range(4):
        engine.step()
    finish(engine, requests[2:])
    for prompt, x in zip(prompts, requests, strict=True):
        assert x.tokens == alone(model, x, prompt)
    assert engine.serving.kept == engine.serving.batch_of == {}
    assert all(x.fixed == x.growing == [] for x in engine.serving.batches.values())


def test_sequences_of_very_different_lengths_have_batches_of_their_own() -> None:
    model, prompts = made("llama"), prompts_of((506, 508, 20))
    engine = Engine(model, slots=3, queue=0, budget=2048)
    requests = [Recorded(list(x), max_tokens=10, temperature=0) for x in prompts]
    assert all(engine.submit(x) for x in requests)
    for _ in range(6):
        engine.step()
    assert sorted(sorted(x.slots) for x in engine.serving.batches.values()) == [[0, 2], [1]]
    finish(engine, [])
    for prompt, x in zip(prompts, requests, strict=True):
        assert x.tokens == alone(model, x, prompt)


class Sums:
    """A model of one sum: the rows of a batch without a model."""

    longest = None

    def view(self, fixed: list[Any], growing: list[Any]) -> list[Any]:
        return [*fixed, *growing]

    def decode(self, view: list[Any], tokens: Any, lengths: Any, columns: int) -> Any:
        view[1][torch.arange(len(tokens)), :, lengths] = tokens[:, None, :].float()
        view[0].add_(tokens)
        return torch.cat((view[0], view[1][:, 0, :columns].sum(1)), 1)


def test_the_last_row_takes_the_place_of_one_that_leaves() -> None:
    batch = Batch(Sums())
    for slot, length in ((7, 3), (5, 1), (2, 6)):
        batch.add(slot, [torch.full((1, 1), float(length))], [torch.ones(1, 1, length, 1)], length)
    assert batch.decode(torch.tensor([[1], [2], [3]])).tolist() == [[4, 4], [3, 3], [9, 9]]
    fixed, growing, length = batch.tensors(7)
    assert (fixed[0].tolist(), growing[0].flatten().tolist(), length) == ([[4]], [1, 1, 1, 1], 4)
    batch.remove(7)
    assert (batch.slots, batch.lengths) == ([2, 5], [7, 2])
    assert batch.decode(torch.tensor([[1], [1]])).tolist() == [[10, 10], [4, 4]]
    batch.add(9, [torch.zeros(1, 1)], [torch.ones(1, 1, 0, 1)], 0)  # where a longer sequence was
    assert batch.decode(torch.tensor([[0], [0], [5]]))[2].tolist() == [5, 5]


def test_a_first_row_that_finds_no_memory_leaves_an_idle_batch_without_any() -> None:
    batch = Batch(Sums())
    with pytest.raises(RuntimeError, match="memory"):
        batch.add(0, [torch.zeros(1, 1)], [torch.ones(1, 1, 0, 1)], 2**50)
    assert batch.slots == batch.fixed == batch.growing == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: hf.MistralForCausalLM(hf.MistralConfig(**SOFTMAX, sliding_window=8)),
            "layers of another kind in the cache, DynamicSlidingWindowLayer",
        ),
        (
            lambda: hf.GPTNeoForCausalLM(hf.GPTNeoConfig(
                vocab_size=256, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
                window_size=8, initializer_range=0.3,
            )),
            "sequences that are decoded together get other logits than alone",
        ),
        (
            lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SOFTMAX, rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64, "factor": 2.0,
            })),
            "longrope, whose angles depend on the longest sequence of a call",
        ),
    ],
    ids=["window", "window in the layer", "longrope"],
)  # fmt: skip
def test_a_model_whose_sequences_would_change_each_other_reads_them_one_after_another(make, reason) -> None:
    torch.manual_seed(0)
    engine = Engine(make(), slots=2, queue=0, budget=16)
    assert type(engine.serving) is Separate
    assert engine.serving.reason == reason


def test_a_model_in_half_precision_whose_logits_are_float32_is_batched() -> None:
    if "nemotron_h" not in families.CONFIGURATIONS:
        pytest.skip("this transformers lacks Nemotron-H")
    model = families.model("nemotron_h", torch.bfloat16, vocab_size=256)
    assert type(Engine(model, slots=2, queue=0, budget=16).serving) is Batched


def test_positions_of_a_table_are_batched_up_to_its_end() -> None:
    config = hf.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=48)
    engine = Engine(hf.GPT2LMHeadModel(config), slots=2, queue=0)  # measures its budget below 48 tokens
    assert type(engine.serving) is Batched
    with pytest.raises(
        ValueError, match="unread, max_tokens: got 49 tokens together, expected at most 48, for"
    ):
        engine.submit(Generation([5] * 29, max_tokens=20))
    requests = [Recorded([5] * n, max_tokens=20, temperature=0) for n in (28, 4)]
    finish(engine, requests)
    assert [len(x.tokens) for x in requests] == [20, 20]


def test_sequences_of_states_that_do_not_grow_have_one_batch() -> None:
    engine = Engine(families.model("mamba2", vocab_size=256), slots=3, queue=0, budget=1024)
    requests = [Recorded([7] * n, max_tokens=4, temperature=0) for n in (5, 600, 4200)]
    finish(engine, requests)
    assert len(engine.serving.batches) == 1


def test_a_batch_gives_memory_back_while_a_sequence_goes_on() -> None:
    engine = Engine(made("llama"), slots=16, queue=0, budget=512)
    long = Recorded([7] * 3, max_tokens=60, temperature=0)
    expected = Recorded([7] * 3, max_tokens=60, temperature=0)
    finish(engine, [expected])
    assert all(engine.submit(x) for x in [long, *(Recorded([9] * 450, max_tokens=5) for _ in range(15))])
    sizes = []
    while engine.running or engine.waiting:
        engine.step()
        sizes.append(sum(x.nbytes for batch in engine.serving.batches.values() for x in batch.growing))
    assert max(sizes) > 30 * sizes[-2]
    assert long.tokens == expected.tokens


FAULTY = {"pool": lambda: LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))} | {
    x: lambda x=x: made(x) for x in ("qwen3_5", "linrope")
}


def faulty(kind: str) -> tuple[Any, list[str]]:
    """A model, and a list in which a test puts "prompt" or "text" to let the calls raise that read these."""
    torch.manual_seed(0)
    model, raising = FAULTY[kind](), []
    embedding = model.embed if kind == "pool" else model.get_input_embeddings()

    def check(_: Any, inputs: tuple[Any, ...]) -> None:
        if raising == ["text" if inputs[0].shape[1] == 1 else "prompt"]:
            raise RuntimeError("on purpose")

    embedding.register_forward_pre_hook(check)
    return model, raising


def tokens_alone(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        x = Recorded(list(prompt), max_tokens=count, temperature=0)
        finish(engine, [x])
        found.append(x.tokens)
    return found


@pytest.mark.parametrize("kind", FAULTY)
def test_a_client_that_leaves_changes_nothing_for_the_others(kind) -> None:
    model, _ = faulty(kind)
    engine, prompts = Engine(model, slots=4, queue=1, budget=64), prompts_of((9, 200, 12, 30, 4))
    expected = tokens_alone(engine, prompts, 8)
    decoding, reading, first, second, waiting = (
        Recorded(list(x), max_tokens=8, temperature=0) for x in prompts
    )
    assert all(engine.submit(x) for x in (decoding, reading, first, second, waiting))
    assert not engine.submit(Generation([1]))  # the queue is full
    while not first.tokens:
        engine.step()
    assert decoding.tokens
    assert len(reading.unread) > 1
    for x in (decoding, reading, waiting):
        x.cancelled = True
    finish(engine, [])
    assert [first.tokens, second.tokens] == expected[2:4]
    assert (waiting.slot, sorted(engine.free)) == (-1, [0, 1, 2, 3])
    assert tokens_alone(engine, prompts[:2], 8) == expected[:2]


@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.parametrize("where", ["prompt", "text"])
def test_a_call_that_raises_ends_the_sequences_in_it(kind, where) -> None:
    """A batch reads each prompt by itself, so that only the texts of a call end together; a pool's step is one."""
    model, raising = faulty(kind)
    engine, prompts = Engine(model, slots=3, queue=0, budget=16), prompts_of((10, 12, 80))
    expected = tokens_alone(engine, prompts, 5)
    requests = [Recorded(list(x), max_tokens=5, temperature=0) for x in prompts]
    assert all(engine.submit(x) for x in requests)
    while len(requests[0].tokens) < 2:
        engine.step()
    raising.append(where)
    answers: list[tuple[Generation, Any]] = []

    def send(pieces: Any) -> None:
        answers.extend(pieces)
        raising.clear()
        if not engine.running:
            engine.stop()

    engine.run(send)
    ended = requests if kind == "pool" else requests[2:] if where == "prompt" else requests[:2]
    assert [x for x, piece in answers if isinstance(piece, RuntimeError)] == ended
    for x, tokens in zip(requests, expected, strict=True):
        assert x.finish_reason == ("error" if x in ended else "length")
        assert x in ended or x.tokens == tokens
    assert sorted(engine.free) == [0, 1, 2]
    engine.stopped = False
    assert tokens_alone(engine, prompts[:2], 5) == expected[:2]


@pytest.mark.parametrize("kind", ["pool", "linrope"])
def test_an_engine_that_is_stopped_answers_those_that_run_or_wait(kind) -> None:
    model, _ = faulty(kind)
    engine = Engine(model, slots=2, queue=2, budget=16)
    requests = [Generation(x, max_tokens=100) for x in prompts_of((3, 40, 3))]
    assert all(engine.submit(x) for x in requests)
    answers: list[tuple[Generation, Any]] = []

    def send(pieces: Any) -> None:
        answers.extend(pieces)
        engine.stop()

    engine.run(send)
    last = [(x, str(piece)) for x, piece in answers if not isinstance(piece, str)]
    assert last == [(x, "the engine was stopped") for x in requests]
    assert [x.finish_reason for x in requests] == ["error"] * 3
    assert (engine.running, engine.waiting, sorted(engine.free)) == ([], [], [0, 1])
    assert not engine.submit(Generation([1]))
