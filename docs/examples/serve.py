"""An OpenAI-compatible completions server with continuous batching.

    python docs/examples/serve.py               # trains a small model for some seconds and serves it
    python docs/examples/serve.py runs/demo     # serves a checkpoint of `linrope train`
    python docs/examples/serve.py FOLDER        # serves a model in Hugging Face format, with its tokenizer

A request may name a session: the server then saves its states, and the next request of the session continues from
them. Or it may have a prefix, a text in front of the prompt that other requests share, which the server reads once.
There is no authentication: keep the server on the loopback address or behind a proxy.
"""

import argparse
import asyncio
import json
import re
import reprlib
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

try:
    import anyio
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    raise SystemExit(f"serve.py: {error.name} is missing; install linrope[serve]") from None

from linrope.cli.pretrained import is_pretrained, load_pretrained, on_linrope, tokenizer_beside
from linrope.decode import Engine, Generation
from linrope.decode.request import Pieces
from linrope.models import LanguageModel
from linrope.models.training import latest_checkpoint

LONGEST_PROMPT, LONGEST_COMPLETION = 65_536, 4_096  # tokens
LONGEST_STOP = 100  # bytes
GRACE = 2  # seconds that requests have to end, after a signal
# OpenAI's arguments that are accepted with these values only.
FIXED = {"best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "logprobs": None, "n": 1}
FIXED |= {"presence_penalty": 0, "suffix": ""}
READ = {"max_tokens", "model", "prefix", "prompt", "seed", "session"}
READ |= {"stop", "stream", "temperature", "top_p"}
IGNORED = {"stream_options", "user"}  # the usage is always sent


class Refused(Exception):
    """A request is answered with an error in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
        self.status, self.headers = status, {"Retry-After": "1"} if status == 429 else None
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def wrong(name: str, value: object, expected: str) -> Refused:
    return Refused(400, f"{name}: got {reprlib.repr(value)}, expected {expected}", name)


def number(body: dict[str, Any], name: str, default: Any, kind: Any, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, value, f"{'an integer' if kind is int else 'a number'} from {low} to {high}")
    return value


def to_bytes(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise wrong(name, value, "text") from None


def to_tokens(engine: Engine, prompt: object, special: bool, name: str = "prompt") -> list[int]:
    """The tokens of the prompt; special: with those that the model expects in front of a text."""
    if isinstance(prompt, str):
        to_bytes(name, prompt)
        prompt = engine.encode(prompt, special)
    last = engine.vocab_size - 1
    if not isinstance(prompt, list) or not all(type(x) is int and 0 <= x <= last for x in prompt):
        raise wrong(name, prompt, f"text, or its tokens as a list of integers 0 .. {last}")
    return prompt


def check_model(asked: object, model: str) -> None:
    if asked != model:
        message = f"model: got {reprlib.repr(asked)}, expected {model!r}"
        raise Refused(404, message, "model", "model_not_found")


def parse(body: Any, engine: Engine, model: str, sessions: Path | None) -> Generation:
    """Checks the arguments of a request."""
    if not isinstance(body, dict):
        raise wrong("body", body, "a JSON object")
    if unknown := body.keys() - FIXED.keys() - READ - IGNORED:
        raise wrong("arguments", min(unknown), f"some of {sorted(READ)}")
    for name, value in FIXED.items():
        if body.get(name) not in (None, value):
            raise wrong(name, body[name], repr(value))
    if body.get("model") is not None:
        check_model(body["model"], model)
    if body.get("stream") not in (None, True, False):
        raise wrong("stream", body["stream"], "true or false")
    stops = [] if body.get("stop") is None else body["stop"]
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(x, str) and x for x in stops):
        raise wrong("stop", stops, "at most 4 texts of at least 1 byte")
    if longer := [len(x) for x in (to_bytes("stop", stop) for stop in stops) if len(x) > LONGEST_STOP]:
        raise Refused(400, f"stop: got {longer[0]} bytes, expected at most {LONGEST_STOP}", "stop")
    session = body.get("session")
    if session is not None:
        if sessions is None:
            raise wrong("session", session, "none, because the server was started without --sessions")
        if not isinstance(session, str) or not re.fullmatch("[A-Za-z0-9_-]{1,64}", session):
            raise wrong("session", session, "1 to 64 of the characters A-Z, a-z, 0-9, _ and -")
    file = sessions / f"{session}.safetensors" if sessions and session else None
    prefix, special = [], file is None or not file.exists()
    if body.get("prefix") not in (None, "", []):
        if session is not None:
            raise wrong("prefix", body["prefix"], "none with a session, which continues from its own text")
        prefix, special = to_tokens(engine, body["prefix"], special, "prefix"), False
    unread = prefix + to_tokens(engine, body.get("prompt"), special)
    max_tokens = number(body, "max_tokens", 16, int, 1, LONGEST_COMPLETION)
    longest = min(LONGEST_PROMPT, max(0, (engine.longest or 2**63) - max_tokens))
    if len(unread) > longest:
        message = f"prompt: got {len(unread)} tokens, expected at most {longest} with max_tokens={max_tokens}"
        raise Refused(400, message, "prompt", "context_length_exceeded")
    return Generation(
        unread=unread,
        prefix=min(len(prefix), max(0, len(unread) - 1)),
        max_tokens=max_tokens,
        temperature=number(body, "temperature", 1.0, (int, float), 0, 2),
        top_p=number(body, "top_p", 1.0, (int, float), 0, 1),
        seed=number(body, "seed", None, int, -(2**63), 2**63 - 1),
        stops=stops,
        session=file,
        inbox=asyncio.Queue(),  # receives texts and exceptions, and None at the end
    )


class Server:
    """Answers the requests, which an Engine on another thread runs."""

    def __init__(self, engine: Engine, name: str, sessions: Path | None = None) -> None:
        self.engine, self.name, self.sessions = engine, name, sessions
        self.sessions_in_use: set[Path] = set()
        self.counts = Counter(requests_total=0, prompt_tokens_total=0, generated_tokens_total=0)
        if sessions is not None:
            sessions.mkdir(parents=True, exist_ok=True)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        handlers: dict[Any, Any] = dict.fromkeys((Refused, HTTPException, ClientDisconnect), self.refuse)
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)

    async def refuse(self, http: Request, error: Exception) -> Response:
        headers = getattr(error, "headers", None)
        if isinstance(error, HTTPException):  # no such path or method
            error = Refused(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
        elif not isinstance(error, Refused):
            error = Refused(400, "body: the client left before its end")
        return JSONResponse(error.body, error.status, headers)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Runs the engine on a thread, which hands each step's pieces to the server's thread."""
        loop = asyncio.get_running_loop()

        def deliver(pieces: Pieces) -> None:
            for generation, piece in pieces:
                generation.inbox.put_nowait(piece)

        thread = threading.Thread(target=self.engine.run, args=[partial(loop.call_soon_threadsafe, deliver)])
        thread.start()
        try:
            yield
        finally:
            self.engine.stop()
            await run_in_threadpool(thread.join)

    @property
    def model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "linrope"}

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model]})

    async def one_model(self, http: Request) -> Response:
        check_model(http.path_params["name"], self.name)
        return JSONResponse(self.model)

    async def health(self, _: Request) -> Response:
        engine = self.engine
        return JSONResponse({"slots": engine.slots, "free": len(engine.free), "waiting": len(engine.waiting)})

    async def metrics(self, _: Request) -> Response:
        """In Prometheus' text format. The tokens of a request count when it ends."""
        engine, lines = self.engine, []
        gauges = {"slots": engine.slots, "running": len(engine.running), "waiting": len(engine.waiting)}
        counts = {**self.counts, "prefix_hits_total": engine.prefixes.hits}
        for kind, values in (("counter", counts), ("gauge", gauges)):
            for name, value in values.items():
                lines += [f"# TYPE linrope_{name} {kind}", f"linrope_{name} {value}"]
        return PlainTextResponse("\n".join([*lines, ""]))

    async def completions(self, http: Request) -> Response:
        data = bytearray()
        async for chunk in http.stream():
            data += chunk
            if len(data) > 8 * LONGEST_PROMPT:
                raise Refused(413, f"body: got more than {8 * LONGEST_PROMPT} bytes, expected at most that")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"body: expected JSON: {error}") from None
        generation = parse(body, self.engine, self.name, self.sessions)
        answer = Answer(self, generation, bool(body.get("stream")))
        session, engine = generation.session, self.engine
        if session in self.sessions_in_use:
            raise Refused(409, f"session: {session.stem!r} is in use, expected one at a time", "session")
        self.sessions_in_use |= {session} - {None}
        try:
            await self.load(generation)
            if not generation.unread:
                raise wrong("prompt", "", "at least 1 token")
            if not engine.submit(generation):
                full = f"all {engine.slots} slots and {engine.queue} places are taken"
                raise Refused(429, f"queue: {'the server is ending' if engine.stopped else full}")
            self.counts["requests_total"] += 1
        except BaseException:
            answer.close()
            raise
        return answer

    async def load(self, generation: Generation) -> None:
        if generation.session is None or not generation.session.exists():
            return
        try:
            loaded = await run_in_threadpool(self.engine.load, generation)
        except Exception as error:
            raise Refused(500, f"session: the file is damaged: {error!r}", "session") from None
        if not loaded:
            raise wrong("session", generation.session.stem, "one of this model; another model saved it")


class Answer(Response):
    """Sends the text of a generation, as a whole or as it comes. If the client leaves, its slot becomes free."""

    def __init__(self, server: Server, generation: Generation, stream: bool) -> None:
        self.server, self.generation, self.stream = server, generation, stream
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self.stream:
                response = StreamingResponse(self.events(), media_type="text/event-stream")
                await response(scope, receive, send)
            else:
                await self.send_whole(scope, receive, send)
        finally:
            self.close()

    def close(self) -> None:
        self.generation.cancelled = True
        if self.generation.submitted:
            self.server.counts["prompt_tokens_total"] += self.generation.prompt_tokens
            self.server.counts["generated_tokens_total"] += self.generation.generated
        self.server.sessions_in_use.discard(self.generation.session)

    async def send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            answering.cancel()

        with anyio.CancelScope() as answering:  # a thread that saves the session ends before the scope does
            left = asyncio.ensure_future(leave())
            try:
                text = "".join([piece async for piece in self.pieces()])
                await JSONResponse(self.body_of(text, last=True))(scope, receive, send)
            finally:
                left.cancel()

    async def events(self) -> AsyncIterator[str]:
        try:
            async for piece in self.pieces():
                yield f"data: {json.dumps(self.body_of(piece))}\n\n"
            yield f"data: {json.dumps(self.body_of('', last=True))}\n\ndata: [DONE]\n\n"
        except Refused as error:
            yield f"data: {json.dumps(error.body)}\n\n"

    async def pieces(self) -> AsyncIterator[str]:
        """All text that has come since the last piece."""
        inbox, come = self.generation.inbox, [""]
        while come[-1] is not None:
            come = [await inbox.get()]
            while not inbox.empty():
                come.append(inbox.get_nowait())
            if isinstance(come[-1], Exception):
                raise Refused(500, f"engine: it ended the request with {come[-1]!r}")
            if text := "".join(filter(None, come)):
                yield text
        if self.generation.session is not None:
            try:
                await run_in_threadpool(self.server.engine.save, self.generation)
            except Exception as error:  # a client that sends the request again continues from the same states
                raise Refused(500, f"session: not saved, it is as before: {error!r}", "session") from None

    def body_of(self, text: str, last: bool = False) -> dict[str, Any]:
        x = self.generation
        reason = x.finish_reason if last else None
        choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        counts = {"prompt_tokens": x.prompt_tokens, "completion_tokens": x.generated}
        usage = {"usage": {**counts, "total_tokens": sum(counts.values())}} if last else {}
        head = {"id": self.id, "object": "text_completion", "created": self.created}
        return {**head, "model": self.server.name, "choices": choices, **usage}


class Http(uvicorn.Server):
    """After a signal it takes no more requests. Those that run have some seconds to end, then an error ends them."""

    def __init__(self, app: Starlette, engine: Engine, **options: Any) -> None:
        # The timeout is for clients that do not read what is sent.
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=2 * GRACE, **options))
        self.engine = engine

    async def shutdown(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().call_later(GRACE, self.engine.stop)
        await super().shutdown(sockets)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", help="folder with a model; default: trains one")
    parser.add_argument("--host", default="127.0.0.1", help="address; default: for this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at; default: 8000")
    parser.add_argument("--slots", type=int, default=32, help="how many requests run at once")
    parser.add_argument("--queue", type=int, default=64, help="how many more may wait; others get status 429")
    parser.add_argument("--sessions", type=Path, help="folder for saved sessions; default: no sessions")
    parser.add_argument("--budget", type=int, help="prompt tokens per step; default: what takes 15 ms")
    parser.add_argument("--prefix-bytes", type=int, default=2**28, help="size of states kept of prefixes")
    parser.add_argument("--threads", type=int, default=1, help="threads of the model")
    options = parser.parse_args()
    for name, low in {"slots": 1, "queue": 0, "budget": 32, "prefix-bytes": 0, "threads": 1}.items():
        if (value := getattr(options, name.replace("-", "_"))) is not None and value < low:
            parser.error(f"--{name}: got {value}, expected at least {low}")
    torch.set_num_threads(options.threads)
    try:
        model: Any
        tokenizer = None
        if options.checkpoint is None:
            from streaming import train

            model, name = train(150), "demo"
        else:
            folder, name = latest_checkpoint(options.checkpoint), Path(options.checkpoint).resolve().name
            model = load_pretrained(folder) if is_pretrained(folder) else LanguageModel.load(folder)
            tokenizer = tokenizer_beside(folder, model.config.vocab_size)
        on_linrope(model, torch.device("cpu"))
        engine = Engine(model, options.slots, options.queue, options.budget, tokenizer, options.prefix_bytes)
        if options.sessions and engine.serving.empty is None:
            parser.error(
                f"--sessions: expected none with {type(model).__name__}, whose states cannot be saved"
            )
        server = Server(engine, name, options.sessions)
    # Such as a missing checkpoint, or a package that it needs
    except (ImportError, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    reason = getattr(engine.serving, "reason", None)
    print(f"{name}: {engine}" + (f", one request after another: {reason}" if reason else ""))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):  # uvicorn repeats the signal when it has ended
        Http(server.app(), engine, access_log=False, host=options.host, port=options.port).run()


if __name__ == "__main__":
    main()
