"""docs/examples/serve.py in a process of its own, which is killed, started again, and told to end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed (extra dev)")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra serve)")
pytest.importorskip("starlette", reason="Starlette is not installed (extra serve)")

from linrope.models import LanguageModel, LanguageModelConfig, generate  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU"),
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals"),
]

ROOT = Path(__file__).parents[1]
PATIENCE = 60  # seconds until what must happen counts as failed


@contextmanager
def started(*arguments: str) -> Iterator[tuple[Any, Any]]:
    """The server's process, and a client."""
    command = [sys.executable, str(ROOT / "docs" / "examples" / "serve.py"), "--port", "0", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = next(x for x in process.stderr if "running on" in x)
            url = line.partition("running on ")[2].split()[0] + "/v1"
            http = openai.DefaultHttpxClient(trust_env=False)
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
                yield process, client
        finally:
            process.kill()
            process.stderr.close()


def test_sessions_outlive_a_killed_server_and_streams_learn_that_it_ends(tmp_path) -> None:
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2))
    model.save(tmp_path / "model")
    sessions = tmp_path / "sessions"
    arguments = [str(tmp_path / "model"), "--slots", "2", "--budget", "64", "--sessions", str(sessions)]
    names = ["one", "two", "three"]
    answers: dict[str, list[str]] = {name: [] for name in names}

    def ask(client: Any, name: str) -> str:
        prompt = "" if answers[name] else name
        options = {"max_tokens": 2, "temperature": 0, "extra_body": {"session": name}}
        text: str = client.completions.create(model="model", prompt=prompt, **options).choices[0].text
        answers[name].append(text)
        return text

    def ask_on(client: Any, name: str) -> None:
        try:
            while True:
                ask(client, name)
        except openai.APIConnectionError:  # the server was killed
            pass

    with started(*arguments) as (process, client):
        threads = [threading.Thread(target=ask_on, args=(client, name)) for name in names]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE
        while min(map(len, answers.values())) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        for thread in threads:
            thread.join()
    with started(*arguments) as (process, client):
        for name in names:
            count = len(answers[name])  # and perhaps one more that was saved, but not sent
            tokens = torch.tensor([[*name.encode()]])
            whole = [int(x) for x in generate(model, tokens, 2 * count + 4, temperature=0)]
            expected = [bytes(whole[2 * i : 2 * i + 2]).decode(errors="replace") for i in (count, count + 1)]
            assert ask(client, name) in expected

        ends = []

        def read(stream: Any) -> None:
            try:
                ends.append([x.choices[0].finish_reason for x in stream][-1])
            except openai.APIError as error:
                ends.append(error.message)

        options = {"model": "model", "prompt": "x", "max_tokens": 4000, "stream": True}
        streams = [client.completions.create(**options) for _ in range(6)]
        threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0
        assert time.monotonic() - began < 8
        for thread in threads:
            thread.join()
        stopped = "engine: it ended the request with RuntimeError('the engine was stopped')"
        assert len(ends) == 6
        assert {*ends} <= {stopped, "length"}
        assert stopped in ends  # four wait for a slot
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model="model", prompt="x")
