"""docs/examples/serve.py over the loopback, with OpenAI's client, and its parts alone."""

import asyncio
import importlib
import json
import re
import runpy
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed (extra dev)")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra serve)")
pytest.importorskip("starlette", reason="Starlette is not installed (extra serve)")

from linrope.decode import Engine  # noqa: E402
from linrope.models import LanguageModel, generate  # noqa: E402

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU")

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    serve, streaming = map(importlib.import_module, ("serve", "streaming"))
finally:
    sys.path.remove(str(EXAMPLES))

VERSE = "Für den Nagel – ein Hufeisen 🐎. Für das Hufeisen – ein Pferd 🐴. Für das Pferd – ein Reiter 🤺. "
PATIENCE = 30  # seconds until a condition that must come true counts as failed


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "RHYME", VERSE)
        yield streaming.train(40)


class Running:
    """A server on a free port, on a thread of its own."""

    def __init__(
        self, model: Any, slots: int, queue: int, sessions: Path | None = None, tokenizer: Any = None
    ) -> None:
        self.engine = Engine(model, slots, queue, budget=64, tokenizer=tokenizer)
        self.app = serve.Server(self.engine, "verse", sessions)
        config = uvicorn.Config(self.app.app(), port=0, log_level="warning", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> "Running":
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        client, url = openai.DefaultHttpxClient(trust_env=False), f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=client)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join()

    def complete(self, prompt: Any, **options: Any) -> str:
        return self.whole(prompt, **options).choices[0].text

    def whole(self, prompt: Any, **options: Any) -> Any:
        known = {"max_tokens", "temperature", "top_p", "seed", "stop", "stream", "n", "logprobs"}
        more = {name: options.pop(name) for name in list(options) if name not in known}
        return self.client.completions.create(model="verse", prompt=prompt, extra_body=more, **options)

    def free(self) -> int:
        return self.client.get("../health", cast_to=object)["free"]  # type: ignore[index]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(model, slots=16, queue=64, sessions=tmp_path_factory.mktemp("sessions")) as running:
        yield running


def alone(model: LanguageModel, prompt: str | bytes, count: int) -> bytes:
    """The bytes that the model generates from the prompt by itself."""
    tokens = torch.tensor([[*(prompt.encode() if isinstance(prompt, str) else prompt)]])
    return bytes(int(token) for token in generate(model, tokens, count, temperature=0))


def test_32_clients_at_once_each_get_what_the_model_generates_alone(model, server) -> None:
    prompts = [(VERSE * 3)[i : i + 1 + 7 * i] for i in range(32)]

    async def ask(client: Any, i: int) -> tuple[str, Any]:
        options = {"model": "verse", "prompt": prompts[i], "max_tokens": 8 + i, "temperature": 0}
        if i % 2:
            answer = await client.completions.create(**options)
            return answer.choices[0].text, answer.usage
        pieces = [x async for x in await client.completions.create(**options, stream=True)]
        assert [x.choices[0].finish_reason for x in pieces] == [None] * (len(pieces) - 1) + ["length"]
        return "".join(x.choices[0].text for x in pieces), pieces[-1].usage

    async def ask_all() -> list[tuple[str, Any]]:
        http, url = openai.DefaultAsyncHttpxClient(trust_env=False), str(server.client.base_url)
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, http_client=http
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    for i, (text, usage) in enumerate(asyncio.run(ask_all())):
        assert text == alone(model, prompts[i], 8 + i).decode(errors="replace"), i
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompts[i].encode()), 8 + i)
    assert server.free() == 16


@pytest.mark.parametrize("stops", [["🐎"], ["el x", "l – e"], ["absent"]])
def test_the_text_ends_before_a_stop_sequence(stops: list[str], model, server) -> None:
    whole = alone(model, "Für ", 60).decode(errors="replace")
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    end, length = min(ends, default=(len(whole), 0))
    expected = whole[: end + length]
    answer = server.whole("Für ", max_tokens=60, temperature=0, stop=stops)
    pieces = list(server.whole("Für ", max_tokens=60, temperature=0, stop=stops, stream=True))
    assert answer.choices[0].text == "".join(x.choices[0].text for x in pieces) == expected
    for last in (answer, pieces[-1]):
        assert last.choices[0].finish_reason == ("stop" if ends else "length")


def test_a_seed_gives_the_same_text_beside_other_requests(server) -> None:
    options = {"max_tokens": 30, "temperature": 1.5, "top_p": 0.95}
    first = server.complete("Für", seed=1, **options)
    stream = server.whole("Für das", max_tokens=200, stream=True)
    assert server.complete("Für", seed=1, **options) == first
    assert {server.complete("Für", seed=seed, **options) for seed in (2, 3)} != {first}
    stream.close()


def test_a_session_outlives_the_server_and_belongs_to_its_model(model, tmp_path) -> None:
    whole, begin = alone(model, "Das Pferd", 60), True
    for parts in ([whole[:20]], [whole[20:40], whole[40:]]):  # of one server, of the next
        with Running(model, slots=1, queue=0, sessions=tmp_path) as running:
            for part in parts:
                prompt, begin = "Das Pferd" if begin else "", False
                text = running.complete(prompt, max_tokens=20, temperature=0, session="kept")
                assert text == part.decode(errors="replace")
            if part == whole[40:]:
                text = running.complete(" Und das", max_tokens=9, temperature=0, session="kept")
    read = b"Das Pferd" + whole + b" Und das"
    assert text == alone(model, read, 9).decode(errors="replace")
    other = streaming.train(1)
    with Running(other, slots=1, queue=0, sessions=tmp_path) as running:
        with pytest.raises(openai.BadRequestError, match="session: got 'kept', expected one of this model"):
            running.complete("x", session="kept")
        assert len(running.complete("x", session="new", max_tokens=1)) == 1
        (tmp_path / "new.safetensors").write_bytes(b"damaged")
        with pytest.raises(openai.InternalServerError, match="session: the file is damaged: ValueError"):
            running.complete("x", session="new")
        assert running.complete("x", session="newer", max_tokens=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{x}.safetensors" for x in ("kept", "new", "newer")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face format, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LinRopeConfig(
        **sizes, num_attention_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=1
    )
    path = tmp_path_factory.mktemp("folder")
    LinRopeForCausalLM(config).save_pretrained(path)
    transformers.ByT5Tokenizer().save_pretrained(path)
    return path


def test_a_folder_in_hugging_face_format_is_served_with_its_tokenizer(
    folder, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", str(folder), "--slots", "1", "--budget", "64"])
    monkeypatch.setattr(serve.Http, "run", Mock())
    serve.main()
    serve.Http.run.assert_called_once()
    assert ": Engine(LinRopeForCausalLM, 1 slots, 0 running, 0 of 64 waiting" in capsys.readouterr().out

    model, tokenizer = serve.load_pretrained(folder), serve.tokenizer_beside(folder, 384)
    tokens = tokenizer("Für den Nagel", add_special_tokens=False, return_tensors="pt")
    whole = model.generate(**tokens, max_new_tokens=20, do_sample=False)[0, tokens.input_ids.shape[1] :]
    with Running(model, slots=2, queue=0, sessions=tmp_path, tokenizer=tokenizer) as running:
        options = {"max_tokens": 10, "temperature": 0, "session": "kept"}
        answers = [running.whole(prompt, **options) for prompt in ("Für den Nagel", [])]
        text = "".join(x.choices[0].text for x in answers)
        assert text == tokenizer.decode(whole, skip_special_tokens=True)
        assert [x.usage.prompt_tokens for x in answers] == [len("Für den Nagel".encode()), 0]
        metrics = running.client.get("../metrics", cast_to=str)
    assert "# TYPE linrope_requests_total counter\nlinrope_requests_total 2\n" in metrics
    assert "linrope_generated_tokens_total 20\n" in metrics
    assert "# TYPE linrope_slots gauge\nlinrope_slots 2\n" in metrics


def test_a_slow_client_gets_all_that_came_in_one_event() -> None:
    async def ask() -> list[str]:
        generation = serve.Generation([1], inbox=asyncio.Queue())
        for piece in ("a", "b", "c", None):
            generation.inbox.put_nowait(piece)
        return [x async for x in serve.Answer(Mock(), generation, stream=True).pieces()]

    assert asyncio.run(ask()) == ["abc"]


def raw(server: Running, body: dict[str, Any]) -> socket.socket:
    """Sends a request; the caller reads the answer, or not."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_client_gives_its_slot_back(stream: bool, server, monkeypatch) -> None:
    step, go_on = server.engine.step, threading.Semaphore(0)
    monkeypatch.setattr(server.engine, "step", lambda: (go_on.acquire(timeout=PATIENCE), step())[1])
    connections = [raw(server, {"prompt": "F", "max_tokens": 4000, "stream": stream}) for _ in range(3)]
    wait_until(lambda: len(server.engine.waiting) == 3)
    go_on.release()  # one step, in which all three join
    wait_until(lambda: [x.generated for x in server.engine.running] == [1, 1, 1])
    assert server.free() == 13
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as if killed
        connection.close()
    wait_until(lambda: all(x.cancelled for x in server.engine.running))
    assert [x.generated for x in server.engine.running] == [1, 1, 1]
    go_on.release()
    wait_until(lambda: server.free() == 16)
    monkeypatch.undo()
    assert server.complete("Für", max_tokens=1)


def test_clients_that_leave_while_a_prompt_is_read_and_a_text_streams_change_no_other_s(
    model, server
) -> None:
    reading = raw(server, {"prompt": VERSE * 300, "max_tokens": 1})
    streaming = raw(server, {"prompt": "F", "max_tokens": 4000, "stream": True})
    wait_until(lambda: {len(x.unread) > 1 for x in server.engine.running} == {True, False})
    other = server.whole("Für", max_tokens=90, temperature=0, stream=True)
    text = next(other).choices[0].text
    for connection in (reading, streaming):
        connection.close()
    text += "".join(x.choices[0].text for x in other)
    assert text == alone(model, "Für", 90).decode(errors="replace")
    wait_until(lambda: server.free() == 16)


def test_a_request_past_a_model_s_positions_gets_400(server, monkeypatch) -> None:
    monkeypatch.setattr(server.engine, "longest", 48)
    message = "prompt: got 45 tokens, expected at most 39 with max_tokens=9"
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.complete("x" * 45, max_tokens=9)
    assert caught.value.code == "context_length_exceeded"
    assert server.whole("x" * 39, max_tokens=9).usage.completion_tokens == 9


def test_a_full_queue_refuses_with_429_until_there_is_room(model, monkeypatch) -> None:
    with Running(model, slots=1, queue=1) as running:
        step, go_on = running.engine.step, threading.Event()
        monkeypatch.setattr(running.engine, "step", lambda: (go_on.wait(PATIENCE), step())[1])
        connections = [raw(running, {"prompt": "Für", "max_tokens": 3}) for _ in range(2)]
        wait_until(lambda: len(running.engine.waiting) == 2)
        message = "queue: all 1 slots and 1 places are taken"
        with pytest.raises(openai.RateLimitError, match=message) as caught:
            running.complete("Für")
        assert caught.value.response.headers["retry-after"] == "1"
        go_on.set()
        for connection in connections:
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()
        assert running.complete("Für", max_tokens=1)


def test_a_session_is_in_use_until_it_is_saved_even_if_the_client_leaves(server, monkeypatch) -> None:
    save, saving, go_on = server.engine.save, threading.Event(), threading.Event()
    monkeypatch.setattr(server.engine, "save", lambda x: (saving.set(), go_on.wait(PATIENCE), save(x))[2])
    connection = raw(server, {"prompt": "F", "session": "left", "max_tokens": 1})
    assert saving.wait(PATIENCE)
    connection.close()
    with pytest.raises(openai.ConflictError, match="session: 'left' is in use"):
        server.complete("x", session="left")
    go_on.set()
    wait_until(lambda: not server.app.sessions_in_use)
    assert server.complete("", session="left", max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_cannot_be_saved_is_reported_and_stays_as_it_was(stream, server, monkeypatch) -> None:
    options = {"session": "full", "max_tokens": 9, "temperature": 0}
    server.complete("Für", **options)
    before = (server.app.sessions / "full.safetensors").read_bytes()
    monkeypatch.setattr(
        "linrope.common.files.save_file", Mock(side_effect=OSError(28, "No space left on device"))
    )
    with pytest.raises(openai.APIError, match="session: not saved, it is as before: OSError"):
        list(server.whole("", stream=stream, **options))
    assert (server.app.sessions / "full.safetensors").read_bytes() == before


WRONG = {
    "temperature: got 2.5, expected a number from 0 to 2": {"temperature": 2.5},
    "temperature: got True": {"temperature": True},
    "top_p: got -0.1, expected a number from 0 to 1": {"top_p": -0.1},
    "max_tokens: got 0, expected an integer from 1 to 4096": {"max_tokens": 0},
    "seed: got 'x', expected an integer": {"seed": "x"},
    "stop: got 5, expected at most 4 texts": {"stop": 5},
    "stop: got 101 bytes, expected at most 100": {"stop": "x" * 101},
    r"stop: got \['a', 'a', 'a', 'a', 'a'\]": {"stop": ["a"] * 5},
    "stream: got 'yes', expected true or false": {"stream": "yes"},
    "n: got 2, expected 1": {"n": 2},
    "logprobs: got 5, expected None": {"logprobs": 5},
    "arguments: got 'top_k', expected some of": {"top_k": 5},
    r"prompt: got None, expected text": {"prompt": None},
    r"prompt: got \[256\], expected text, or its tokens as a list of integers 0 .. 255": {"prompt": [256]},
    r"prompt: got '\\ud800'": {"prompt": "\ud800"},
    "prompt: got '', expected at least 1 token": {"prompt": ""},
    "prompt: got 70000 tokens, expected at most 65536": {"prompt": "x" * 70_000},
    r"session: got '\.\./a', expected 1 to 64 of the characters": {"session": "../a"},
    r"session: got 'a\\n'": {"session": "a\n"},
    "prefix: got 7, expected text": {"prefix": 7},
    "prefix: got 'a', expected none with a session": {"prefix": "a", "session": "a"},
    "prompt: got 70003 tokens, expected at most 65536": {"prefix": "x" * 70_000, "prompt": "abc"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_values_get_400_with_what_was_expected(message: str, server) -> None:
    name = message.partition(":")[0]
    data = json.dumps({"prompt": "x"} | WRONG[message]).encode()
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.post("/completions", content=data, cast_to=object)
    assert re.match(message, caught.value.body["message"])
    assert (caught.value.param, caught.value.type) == (name, "invalid_request_error")
    if "at most 65536" in message:
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{", 400, "body: expected JSON"),
        (b"\xff\xfe", 400, "body: expected JSON"),
        (b"[" * 100_000, 400, "body: expected JSON"),
        (b"[1]", 400, "body: got [1], expected a JSON object"),
        (b'{"prompt": "x", "model": "gpt"}', 404, "model: got 'gpt', expected 'verse'"),
        (b'"' + b"x" * 600_000 + b'"', 413, "body: got more than 524288 bytes"),
    ],
)
def test_bodies_that_are_no_requests_are_refused(data: bytes, status: int, message: str, server) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        server.client.post("/completions", content=data, cast_to=object)
    assert caught.value.status_code == status
    assert message in caught.value.body["message"]


def test_unknown_paths_and_methods_are_refused_in_the_same_format(server) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions: Not Found"):
        server.client.chat.completions.create(model="verse", messages=[])
    with pytest.raises(openai.APIStatusError, match="GET /v1/completions: Method Not Allowed") as caught:
        server.client.get("/completions", cast_to=object)
    assert caught.value.response.headers["allow"] == "POST"


def test_the_model_is_listed_and_found_by_its_name(server) -> None:
    assert [x.id for x in server.client.models.list()] == ["verse"]
    assert server.client.models.retrieve("verse").owned_by == "linrope"
    with pytest.raises(openai.NotFoundError, match="model: got 'org/other', expected 'verse'") as caught:
        server.client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_only_the_last_piece_of_a_stream_has_the_usage(server) -> None:
    with raw(server, {"prompt": "F", "max_tokens": 3, "stream": True}) as connection:
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(10_000)
    pieces = [json.loads(piece) for piece in re.findall(rb"data: (\{.*\})", data)]
    assert ["usage" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}


def test_a_server_without_a_folder_for_sessions_refuses_them(model) -> None:
    message = "session: got 'a', expected none, because the server was started without --sessions"
    with Running(model, slots=1, queue=0) as running, pytest.raises(openai.BadRequestError, match=message):
        running.complete("x", session="a")


def test_a_prefix_is_put_before_the_prompt_and_read_once(model, server) -> None:
    def hits() -> int:
        text = server.client.get("../metrics", cast_to=str)
        return int(re.search(r"^linrope_prefix_hits_total (\d+)$", text, re.MULTILINE)[1])

    before = hits()
    for i, (prefix, prompt) in enumerate(
        [("Für den ", "Nagel"), ("Für den ", "Reiter"), ("Für den Nagel", "")]
    ):
        answer = server.whole(prompt, prefix=prefix, max_tokens=9, temperature=0)
        assert answer.choices[0].text == alone(model, prefix + prompt, 9).decode(errors="replace")
        assert answer.usage.prompt_tokens == len((prefix + prompt).encode())
        assert hits() == before + min(i, 1)
    assert server.complete("Für", prefix="", max_tokens=1)


def test_a_step_that_fails_is_reported_and_the_server_goes_on(server, monkeypatch) -> None:
    monkeypatch.setattr(server.engine, "_read", Mock(side_effect=RuntimeError("out of order")))
    with pytest.raises(openai.InternalServerError, match="out of order"):
        server.complete("Für")
    with pytest.raises(openai.APIError, match="out of order"):
        list(server.whole("Für", stream=True))
    monkeypatch.undo()
    assert server.complete("Für", max_tokens=1)
    assert server.free() == 16


@pytest.mark.parametrize(("name", "value", "low"), [("slots", 0, 1), ("prefix-bytes", -1, 0)])
def test_options_that_cannot_serve_are_refused(name, value, low, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", f"--{name}", str(value), "no-such-folder"])
    with pytest.raises(SystemExit):
        serve.main()
    assert f"--{name}: got {value}, expected at least {low}" in capsys.readouterr().err


def test_what_cannot_be_served_is_one_line(model, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model.save(tmp_path / "model")
    file = tmp_path / "config.json"
    for arguments, message in (
        ([str(tmp_path / "none")], "none: expected a folder with checkpoints"),
        ([str(tmp_path)], "no file named model.safetensors"),
        ([str(tmp_path / "model"), "--sessions", str(file)], f"File exists: '{file}'"),
    ):
        monkeypatch.setattr(sys, "argv", ["serve.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            serve.main()
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit, match=r"^serve.py: uvicorn is missing; install linrope\[serve\]$"):
        runpy.run_path(str(EXAMPLES / "serve.py"))
