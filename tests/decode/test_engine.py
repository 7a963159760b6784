"""Continuous batching: text in pieces, random bytes, shares of a step."""

import json
from typing import Any

import pytest
import torch

from linrope.backends import native
from linrope.decode import generate
from linrope.decode.batched import Batched
from linrope.decode.engine import Engine, Generation, choose
from linrope.decode.serving_models import Pool
from linrope.decode.text import Decoder, TextStream, encode
from linrope.layer.states import write_states
from linrope.models import LanguageModel, LanguageModelConfig

hf, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
from transformers import ByT5Tokenizer  # noqa: E402

from linrope.integrations import transformers as linrope_transformers  # noqa: E402
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM  # noqa: E402
from tests.support import families  # noqa: E402


def make(model: Any, slots: int = 1, **options: Any) -> Engine:
    return Engine(model, slots, **{"queue": 0, "budget": 64} | options)


def tiny(**options: Any) -> LanguageModel:
    return LanguageModel(LanguageModelConfig(**{"embed_dim": 32, "num_layers": 2, "num_heads": 2} | options))


def texts_of(engine: Engine, generations: list[Generation]) -> list[str]:
    """The text of each, all of them at once."""
    texts = dict.fromkeys(generations, "")
    assert all(engine.submit(x) for x in generations)
    while engine.running or engine.waiting:
        for x, piece in engine.step():
            texts[x] += piece or ""
    return [*texts.values()]


def test_a_replacement_character_comes_only_for_bytes_that_are_no_character() -> None:
    text = "aé–🐎z"
    for count in range(len(text.encode()) + 1):
        sender, data = TextStream([]), text.encode()[:count]
        pieces = [sender.add(byte)[0] for byte in data]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) + sender.end() == data.decode(errors="replace")
    sender = TextStream([])
    assert [sender.add(byte)[0] for byte in b"a\xff\xc3b"] == ["a", "\ufffd", "", "\ufffdb"]


def test_what_may_begin_a_stop_sequence_is_held_back() -> None:
    text = TextStream([b"abac"])
    assert [text.add(byte) for byte in b"xabab"] == [("x", False), *[("", False)] * 3, ("ab", False)]
    assert [text.add(byte) for byte in b"ac"] == [("", False), ("", True)]


def test_bytes_are_drawn_by_their_probabilities() -> None:
    count = 4000
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(count, 4)
    drawn = [Generation([1], seed=seed) for seed in range(count)]

    def frequencies(temperature: float, top_p: float | None) -> list[float]:
        for x in drawn:
            x.temperature, x.top_p = temperature, top_p
        found = torch.bincount(torch.tensor(choose(drawn, logits)), minlength=4)
        return (found / count).tolist()

    squares = [0.0225, 0.25, 0.0025, 0.09]
    near = {"abs": 0.032}  # four standard deviations
    for all_tokens in (1, None):
        assert frequencies(1, all_tokens) == pytest.approx([0.15, 0.5, 0.05, 0.3], **near)
    assert frequencies(1, 0.75) == pytest.approx([0, 0.625, 0, 0.375], **near)
    assert frequencies(0.5, 1) == pytest.approx([x / sum(squares) for x in squares], **near)
    assert frequencies(1, 0) == frequencies(0, 1) == [0, 1, 0, 0]


def test_a_long_prompt_delays_no_other_request_by_more_than_its_share_of_a_step(model) -> None:
    engine = make(model, slots=4)
    running = Generation([70], max_tokens=1000, temperature=0)
    long, short = (Generation([70] * n, max_tokens=1, temperature=0) for n in (1000, 20))
    engine.submit(running)
    engine.step()
    engine.submit(long)
    engine.step()
    assert engine.submit(short)
    engine.step()
    assert (short.finish_reason, len(long.unread)) == ("length", 1000 - 64 - 44)
    others = [Generation([70] * 30, max_tokens=1, temperature=0) for _ in range(2)]
    assert all(engine.submit(x) for x in others)
    engine.step()
    assert [len(x.unread) for x in (*others, long)] == [9, 9, 1000 - 64 - 44 - 22]
    while long.finish_reason is None:
        generated, unread = running.generated, len(long.unread)
        engine.step()
        assert running.generated == generated + 1
        assert unread - len(long.unread) <= 64
    assert engine.running == [running]


SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3, "eos_token_id": [1, 60], "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "language model": (Pool, lambda: tiny(vocab_size=384)),
    "softmax language model": (Batched, lambda: tiny(vocab_size=384, attention="softmax")),
    "linear": (Pool, lambda: LinRopeForCausalLM(LinRopeConfig(**SIZES))),
    "own head": (Pool, lambda: LinRopeForCausalLM(LinRopeConfig(**SIZES, tie_word_embeddings=False))),
    "hybrid": (Batched, lambda: LinRopeForCausalLM(LinRopeConfig(**SIZES, full_attention_interval=2))),
    "llama": (Batched, lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))),
    "qwen3_5": (Batched, lambda: families.model("qwen3_5", vocab_size=384)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_requests_of_a_model_with_a_tokenizer_get_what_it_generates_alone(kind: str) -> None:
    if kind == "qwen3_5":
        if kind not in families.CONFIGURATIONS or native.why_not() is not None:
            pytest.skip("this transformers lacks Qwen3.5, or there is no native library")
        linrope_transformers.enable(kind)
    torch.manual_seed(0)
    tokenizer, (serving, make_model) = ByT5Tokenizer(), MODELS[kind]
    model, prompts = make_model().eval(), ["Für den Nagel, ein Hufeisen", "x", "Und das Pferd"]
    engine = make(model, slots=2, queue=1, budget=16, tokenizer=tokenizer)
    assert type(engine.serving) is serving
    if serving is Pool and native.why_not() is None:
        assert engine.serving.prepared is not None
    generations = [Generation(engine.encode(x), max_tokens=20, temperature=0) for x in prompts]
    for prompt, text, x in zip(prompts, texts_of(engine, generations), generations, strict=True):
        tokens = torch.tensor([encode(tokenizer, prompt, special=False)])
        if isinstance(model, LanguageModel):
            alone = torch.stack([*generate(model, tokens, 20, temperature=0)], 1)
        else:
            mask = torch.ones_like(tokens)
            alone = model.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False)[
                :, tokens.shape[1] :
            ]
        ended = int(alone[0, -1]) in engine.ends
        assert text == tokenizer.decode(alone[0, : alone.shape[1] - ended], skip_special_tokens=True)
        assert (x.generated, x.finish_reason) == (alone.shape[1], "stop" if ended else "length")
    assert serving is Pool or engine.serving.kept == {}  # ended requests take no memory
    linrope_transformers.disable()


def byte_level_bpe() -> Any:
    """As GPT-2's and Qwen's: the first bytes of a character become a replacement character."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([" der Nagel und das Pferd"] * 5, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=made)


def sentence_pieces() -> Any:
    """As Llama's: bytes for unknown characters, and a text's first space is dropped."""
    pieces = ["▁der", "▁Nagel", "▁und", "▁das", "▁Pferd", "▁", *(f"<0x{i:02X}>" for i in range(256))]
    ids = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(x, -1.0) for x in ids], byte_fallback=True, unk_id=5)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    steps = tokenizers.decoders
    made.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("make_tokenizer", [ByT5Tokenizer, byte_level_bpe, sentence_pieces])
def test_tokens_become_the_text_that_the_tokenizer_makes_of_all_of_them(make_tokenizer, monkeypatch) -> None:
    """In pieces of whole characters, at a cost that does not grow; bytes that are no character do not hold it back."""
    tokenizer, lengths = make_tokenizer(), []
    decode, prompt, text = tokenizer.decode, "das Pferd", " und das Pferd 🐎é – und der Nagel" * 9
    tokens = tokenizer.encode(prompt + text, add_special_tokens=False)
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    monkeypatch.setattr(
        tokenizer, "decode", lambda x, **options: (lengths.append(len(x)), decode(x, **options))[1]
    )
    decoder = Decoder(tokenizer, tokens[:start])
    pieces = [decoder.add([token], last=False).decode() for token in tokens[start:]]
    assert "".join(pieces) == decode(tokens)[len(prompt) :]
    assert max(lengths) <= 10
    horse = tokenizer.encode("🐎", add_special_tokens=False)
    broken = [
        decoder.add([horse[-1]], last=False) for _ in range(50)
    ]  # a character's last byte, again and again
    assert max(lengths) <= 20
    assert len(broken) == 50
    decoder.add([], last=True)
    assert decoder.add(tokens[start:], last=True).decode().endswith(" und der Nagel")


def test_many_prompts_are_read_a_few_at_a_time_the_first_and_the_shortest(model) -> None:
    engine = make(model, slots=9)
    prompts = [Generation([70] * (60 - 5 * i), max_tokens=1, temperature=0) for i in range(9)]
    assert all(engine.submit(x) for x in prompts)
    engine.step()
    assert [x.prompt_tokens - len(x.unread) for x in prompts] == [16, 0, 0, 0, 0, 0, 16, 16, 16]
    steps = 1
    while engine.running:
        engine.step()
        steps += 1
    assert steps <= 9  # 360 bytes; few steps have room left
    assert all(x.generated == 1 for x in prompts)


def test_a_long_prompt_is_read_beside_any_number_of_short_ones(model) -> None:
    engine = make(model, slots=5)
    long = Generation([70] * 100, max_tokens=1)
    engine.submit(long)
    for _ in range(7):  # at least 16 bytes in each step
        while engine.submit(Generation([70] * 40, max_tokens=1)):
            pass
        engine.step()
    assert long.finish_reason == "length"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda _: make(torch.nn.Linear(2, 2)),
            "model: got Linear, expected a LanguageModel, a LinRopeForCausalLM",
        ),
        (lambda model: make(model, slots=0), "slots=0: expected at least 1"),
        (lambda model: make(model, queue=-1), "queue=-1: expected at least 0"),
        (lambda model: make(model, budget=15), "budget=15: expected at least 16"),
        (
            lambda _: make(tiny(vocab_size=300)),
            "tokenizer: got None for 300 tokens, expected the model's tokenizer",
        ),
        (
            lambda model: make(model, tokenizer=ByT5Tokenizer()),
            "tokenizer: got 384 tokens, expected at most .* 256",
        ),
        (lambda model: make(model).submit(Generation([])), "unread: got no tokens"),
        (
            lambda model: make(model).submit(Generation([1, 256])),
            r"unread: got \[1, 256\], expected tokens 0 \.\. 255",
        ),
        (
            lambda _: make(tiny(attention="softmax")).submit(Generation([1], session="x")),
            "session: expected None with LanguageModel, whose states the engine cannot save",
        ),
        (lambda model: make(model).load(Generation([1])), "session: got None"),
        (lambda _: Generation([1, -1]), r"unread: got \[1, -1\], expected tokens 0 \.\."),
        (
            lambda _: Generation([2**70, 1], prefix=1),
            r"unread: got \[1180591620717411303424, 1\], expected tokens",
        ),
        (lambda _: Generation([1], max_tokens=0), "max_tokens=0"),
        (lambda _: Generation([1], temperature=float("nan")), "temperature=nan"),
        (lambda _: Generation([1], temperature=-1.0), r"temperature=-1\.0"),
        (lambda _: Generation([1], temperature=float("inf")), "temperature=inf"),
        (lambda _: Generation([1], top_p=1.5), r"top_p=1\.5"),
        (lambda _: Generation([1], seed=2**64), "seed=18446744073709551616: expected an integer of 64 bits"),
        (lambda _: Generation([1], stops=[b".", b""]), "got an empty sequence"),
    ],
)
def test_what_could_not_run_is_refused(refused, message, model) -> None:
    with pytest.raises(ValueError, match=message):
        refused(model)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda model: Engine("model", 1, 0), "model: got str, expected a LanguageModel or another module"),
        (
            lambda model: make(model).submit("abc"),
            r"generation: got 'abc', expected Generation\(engine.encode",
        ),
        (
            lambda model: Generation("abc"),
            "unread: got 'abc', expected a list of tokens, such as engine.encode",
        ),
        (lambda model: Generation([1], stops="END"), "stops: got 'END', expected a list of texts or bytes"),
    ],
)
def test_other_types_are_refused(refused, message, model) -> None:
    with pytest.raises(TypeError, match=message):
        refused(model)


@pytest.mark.parametrize("unread", [[256], [-1], [1.0], [True], "text", None], ids=repr)
def test_a_session_s_file_with_other_things_than_tokens_is_refused(model, tmp_path, unread) -> None:
    engine = make(model)
    generation = Generation([1], session=tmp_path / "session")
    metadata = {"model": engine.digest, "unread": json.dumps(unread)}
    write_states(generation.session, "linrope.Session", engine.serving.empty, metadata)
    with pytest.raises((TypeError, ValueError), match=r"^unread of .*session: got .*, expected "):
        engine.load(generation)


def test_a_generation_is_loaded_once(model, tmp_path) -> None:
    engine = make(model)
    generation = Generation([1], session=tmp_path / "session")
    metadata = {"model": engine.digest, "unread": "[5]"}
    write_states(generation.session, "linrope.Session", engine.serving.empty, metadata)
    assert engine.load(generation)
    with pytest.raises(ValueError, match="generation: got one that has states, expected a new one"):
        engine.load(generation)
    assert generation.unread == [5, 1]


def test_only_the_states_after_the_end_of_a_session_are_saved(model, tmp_path) -> None:
    """Not those that the session began with, whose next tokens are gone from ``unread``."""
    engine, session = make(model), tmp_path / "session"

    def ended(**options: Any) -> Generation:
        generation = Generation([*b"prompt"], max_tokens=2, **options)
        if generation.session is not None and session.exists():
            assert engine.load(generation)
        engine.submit(generation)
        engine.step()
        return generation

    first = ended(session=session)
    engine.step()
    engine.save(first)
    saved = session.read_bytes()
    running = ended(session=session)
    with pytest.raises(ValueError, match=r"generation: got .* finish_reason=None, expected .* ended"):
        engine.save(running)
    engine.fail(running, RuntimeError("no memory"))
    with pytest.raises(ValueError, match=r"generation: got .* finish_reason='error', expected .* ended"):
        engine.save(running)
    cancelled = ended(session=session)
    cancelled.cancelled = True
    engine.step()
    without = ended()
    engine.step()
    with pytest.raises(ValueError, match="session: got None, expected the file"):
        engine.save(without)
    without.session = session
    for generation in (cancelled, without):
        with pytest.raises(ValueError, match=r"generation: got .* had its session then"):
            engine.save(generation)
    assert session.read_bytes() == saved


def test_a_generation_that_does_not_fit_is_refused_before_it_joins(model) -> None:
    engine = make(model, slots=2)
    two_rows = [state.reorder(torch.tensor([0, 0])) for state in engine.serving.empty]
    others = [tiny(**x)(torch.zeros(1, 0).long())[1] for x in ({"short_conv": None}, {"feature_map": "relu"})]
    wide = [state.to(dtype=torch.float64) for state in engine.serving.empty]
    for states in (two_rows, engine.serving.empty * 2, *others, wide, [1, 2], "two"):
        with pytest.raises((TypeError, ValueError), match=r"states: got .*expected"):
            engine.submit(Generation([1], states=states))
    generation = Generation([1], max_tokens=1)
    assert engine.submit(generation)
    for _ in range(2):
        with pytest.raises(ValueError, match="submitted before"):
            engine.submit(generation)
        engine.step()


def test_a_request_that_a_model_cannot_read_ends_alone() -> None:
    """A table of positions whose size has another name in the config."""
    config = hf.MptConfig(vocab_size=256, d_model=32, n_layers=1, n_heads=2, max_seq_len=48)
    engine = make(hf.MptForCausalLM(config), slots=3, budget=None)
    long_prompt, long_text, good = (
        Generation([1] * n, max_tokens=m, temperature=0) for n, m in ((60, 5), (40, 20), (20, 20))
    )
    pieces = []
    for generation in (long_prompt, long_text, good):
        assert engine.submit(generation)
    while engine.running or engine.waiting:
        pieces += engine.step()
    assert [x.finish_reason for x in (long_prompt, long_text, good)] == ["error", "error", "length"]
    errors = [x for x, text in pieces if isinstance(text, Exception)]
    assert errors == [long_prompt, long_text]
    alone = Generation([1] * 20, max_tokens=20, temperature=0)
    assert texts_of(engine, [alone]) == ["".join(text for x, text in pieces if x is good and text)]
    assert sorted(engine.free) == [0, 1, 2]


def test_a_text_with_a_tokenizer_ends_before_a_stop_text_or_an_end_token(monkeypatch) -> None:
    tokenizer = ByT5Tokenizer()
    engine = make(tiny(vocab_size=384), tokenizer=tokenizer)

    def text(told: str, **options: Any) -> tuple[str, str | None]:
        tokens = iter([*encode(tokenizer, told, special=False), tokenizer.eos_token_id])
        monkeypatch.setattr("linrope.decode.engine.choose", lambda *_: [next(tokens)])
        generation = Generation(engine.encode("x"), **{"max_tokens": 50} | options)
        return texts_of(engine, [generation])[0], generation.finish_reason

    assert text("das Pferd 🐎 und") == ("das Pferd 🐎 und", "stop")
    assert text("das Pferd 🐎 und", stops=["🐎 x", "d 🐎"]) == ("das Pfer", "stop")
    assert text("das Pferd 🐎", stops=[b"x"], max_tokens=9) == ("das Pferd", "length")


def test_an_engine_tells_what_it_runs(model) -> None:
    engine = make(model, slots=2, queue=3)
    for _ in range(3):
        engine.submit(Generation([1]))
    engine.step()
    assert repr(engine) == "Engine(LanguageModel, 2 slots, 2 running, 1 of 3 waiting, budget 64)"


def test_an_engine_runs_a_model_in_bfloat16(model) -> None:
    engine, generation = make(model.bfloat16()), Generation([1, 2], max_tokens=3)
    engine.submit(generation)
    while generation.finish_reason is None:
        engine.step()
    assert generation.generated == 3
