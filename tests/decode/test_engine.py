"""Continuous batching: text in pieces, random bytes, shares of a step."""

import pytest
import torch

from linrope.backends import native
from linrope.decode import generate
from linrope.decode.engine import Engine, Generation, TextStream, choose
from linrope.models import LanguageModel, LanguageModelConfig


def make(model: LanguageModel, slots: int = 1, **options: int) -> Engine:
    return Engine(model, slots, **{"queue": 0, "budget": 64} | options)


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

    def frequencies(temperature: float, top_p: float) -> list[float]:
        for x in drawn:
            x.temperature, x.top_p = temperature, top_p
        found = torch.bincount(torch.tensor(choose(drawn, logits)), minlength=4)
        return (found / count).tolist()

    squares = [0.0225, 0.25, 0.0025, 0.09]
    near = {"abs": 0.032}  # four standard deviations
    assert frequencies(1, 1) == pytest.approx([0.15, 0.5, 0.05, 0.3], **near)
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


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
@pytest.mark.parametrize("gates", [{"erase_gate": "tied"}, {"forget_gate": {"per": "feature"}},
                                   {"erase_gate": "independent", "forget_gate": {"per": "feature", "bound": 5}},
                                   {"num_value_heads": 4}], ids=str)  # fmt: skip
def test_requests_get_in_prepared_steps_what_the_model_generates_for_each_alone(gates) -> None:
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2, **gates))
    engine = make(model, slots=2, queue=3)
    assert engine.prepared is not None
    prompts = torch.randint(32, 127, (5, 40)).tolist()
    prompts = [prompt[:length] for prompt, length in zip(prompts, (40, 3, 17, 30, 1), strict=True)]
    texts = {Generation(list(prompt), max_tokens=20, temperature=0): "" for prompt in prompts}
    assert all(engine.submit(x) for x in texts)
    while engine.running or engine.waiting:
        for x, piece in engine.step():
            texts[x] += piece or ""
    for prompt, text in zip(prompts, texts.values(), strict=True):
        alone = generate(model, torch.tensor([prompt]), 20, temperature=0)
        assert text == bytes(map(int, alone)).decode(errors="replace")


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
        (lambda model: make(model, slots=0), "slots=0: expected at least 1"),
        (lambda model: make(model, queue=-1), "queue=-1: expected at least 0"),
        (lambda model: make(model, budget=15), "budget=15: expected at least 16"),
        (lambda _: make(LanguageModel(LanguageModelConfig(vocab_size=300))), "model: got .*300 tokens"),
        (lambda _: make(LanguageModel(LanguageModelConfig(attention="softmax"))), "model: got .*'softmax'"),
        (lambda model: make(model).submit(Generation([])), "unread: got no bytes"),
        (lambda model: make(model).load(Generation([1])), "session: got None"),
        (lambda _: Generation([1, 256]), r"unread: got \[1, 256\], expected a list of bytes, 0 \.\. 255"),
        (lambda _: Generation([1], max_tokens=0), "max_tokens=0"),
        (lambda _: Generation([1], temperature=float("nan")), "temperature=nan"),
        (lambda _: Generation([1], temperature=-1.0), r"temperature=-1\.0"),
        (lambda _: Generation([1], top_p=1.5), r"top_p=1\.5"),
        (lambda _: Generation([1], stops=[b".", b""]), "got an empty sequence"),
    ],
)
def test_what_could_not_run_is_refused(refused, message, model) -> None:
    with pytest.raises(ValueError, match=message):
        refused(model)


@pytest.mark.parametrize("unread", [[256], [-1], [1.0], [True], "text", None, torch.tensor([1])], ids=repr)
def test_a_session_s_file_with_other_things_than_bytes_is_refused(model, tmp_path, unread) -> None:
    engine = make(model)
    generation = Generation([1], session=tmp_path / "session")
    torch.save({"model": engine.digest, "states": engine.empty, "unread": unread}, generation.session)
    with pytest.raises(
        ValueError, match=r"^unread of .*session: got .*, expected a list of bytes, 0 \.\. 255$"
    ):
        engine.load(generation)


def test_a_generation_that_does_not_fit_is_refused_before_it_joins(model) -> None:
    engine = make(model, slots=2)
    two_rows = [state.reorder(torch.tensor([0, 0])) for state in engine.empty]
    for states in (two_rows, engine.empty * 2):
        with pytest.raises(ValueError, match="states: got shapes"):
            engine.submit(Generation([1], states=states))
    generation = Generation([1], max_tokens=1)
    assert engine.submit(generation)
    for _ in range(2):
        with pytest.raises(ValueError, match="submitted before"):
            engine.submit(generation)
        engine.step()


def test_an_engine_runs_a_model_in_bfloat16(model) -> None:
    engine, generation = make(model.bfloat16()), Generation([1, 2], max_tokens=3)
    engine.submit(generation)
    while generation.finish_reason is None:
        engine.step()
    assert generation.generated == 3
