"""Times linrope.decode.Engine beside a softmax model in the same block, with a key/value cache.

    python benchmarks/serving.py [--clients 1 8 32 200] [--context 512] [--tokens 64] [--out FILE.json]

Every client sends a prompt of as many bytes as the context, and gets the same number of bytes back. Both models have
random weights. They run in one process, take turns, and their figures are minima of the CPU time of one thread.
"linrope, no prepared step" decodes with the model's own call, as softmax attention does. "delta rule" is the same block
with an erase gate. The softmax model reads each prompt in one call, linrope in pieces.

Then clients over the loopback measure the whole server in wall time, with the web server and the clients on the same
machine, and how long a stream pauses while another client sends the longest prompt allowed.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import machine, save
from linrope.cli.demonstration import LINEAR, SOFTMAX
from linrope.decode import Engine, Generation
from linrope.models import LanguageModel, LanguageModelConfig, generate


def bytes_per_client(model: LanguageModel, longest: int) -> int:
    """The size in bytes of a client's states when its text has this length."""
    _, states = model(torch.zeros(1, longest, dtype=torch.int64), logits_to_keep=1)
    return sum(state.nbytes for state in states)


def make(side: str, models: dict[str, LanguageModel], clients: int, longest: int) -> Engine:
    model, _, without_prepared = side.partition(",")
    budget = clients * longest if side == "softmax" else 512
    engine = Engine(models[model], clients, queue=0, budget=budget)
    if without_prepared:
        engine.serving.prepared = None
    return engine


# The sizes of LINEAR
DELTA_RULE = LanguageModelConfig(embed_dim=128, num_layers=4, num_heads=8, erase_gate="independent")
SIDES = ("linrope", "linrope, no prepared step", "delta rule", "softmax")


def check(models: dict[str, LanguageModel]) -> None:
    """Raises unless every client gets the text that the model generates alone."""
    prompts = torch.randint(256, (3, 40)).tolist()
    for side in SIDES:
        engine = make(side, models, clients=3, longest=60)
        generations = [Generation(list(prompt), max_tokens=20, temperature=0) for prompt in prompts]
        texts = dict.fromkeys(generations, "")
        assert all(engine.submit(x) for x in generations)
        while engine.running or engine.waiting:
            for x, piece in engine.step():
                texts[x] += piece or ""
        for prompt, text in zip(prompts, texts.values(), strict=True):
            alone = generate(models[side.partition(",")[0]], torch.tensor([prompt]), 20, temperature=0)
            assert text == bytes(map(int, alone)).decode(errors="replace"), f"{side}: got another text"


def run(engine: Engine, prompts: list[list[int]], count: int) -> dict[str, float]:
    """CPU seconds until every client has its first byte, and for each byte after it.

    Clients that have their first byte decode no more until all have it, so that decoding begins with all of them.
    """
    generations = [Generation(list(prompt), max_tokens=count, temperature=0) for prompt in prompts]
    for x in generations:
        assert engine.submit(x)
    held: list[Generation] = []
    start = time.thread_time()
    while len(held) < len(generations):
        engine.step()
        held += [x for x in engine.running if x.generated]
        engine.running = [x for x in engine.running if not x.generated]
    middle, engine.running = time.thread_time(), held
    while engine.running:
        engine.step()
    seconds = time.thread_time() - middle
    return {"prompts": middle - start, "decoding": seconds / ((count - 1) * len(prompts))}


def measure(
    clients: int, context: int, count: int, rounds: int, models: dict[str, LanguageModel]
) -> dict[str, Any]:
    prompts = torch.randint(32, 127, (clients, context)).tolist()
    rows: dict[str, Any] = {}
    for _ in range(rounds):
        for side in SIDES:
            engine = make(side, models, clients, context + count)
            seconds = run(engine, prompts, count)
            size = bytes_per_client(engine.serving.model, context + count)
            row = rows.setdefault(side, {"bytes_per_client": size} | seconds)
            row.update({name: min(row[name], x) for name, x in seconds.items()})
    return {
        side: {
            "decoded_per_second": 1 / row["decoding"],
            "prompt_bytes_per_second": clients * context / row["prompts"],
            "bytes_per_client": row["bytes_per_client"],
        }
        for side, row in rows.items()
    }


def longest_step(model: LanguageModel, context: int) -> dict[str, float]:
    """CPU seconds of the steps that read the longest prompt, beside a request that generates."""
    engine = Engine(model, slots=2, queue=0)
    running = Generation([120] * context, max_tokens=10**6, temperature=0)
    engine.submit(running)
    while not running.generated:
        engine.step()
    long, seconds = Generation([120] * 65_536, max_tokens=1, temperature=0), []
    engine.submit(long)
    while not long.generated:
        start, generated = time.thread_time(), running.generated
        engine.step()
        seconds.append(time.thread_time() - start)
        assert running.generated == generated + 1
    return {"budget": engine.budget, "median": statistics.median(seconds), "longest": max(seconds)}


def serve_on(port: Any, clients: int) -> None:
    """Runs the whole server, in a process of its own, and says on which port."""
    import uvicorn

    sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))
    from serve import Server

    torch.set_num_threads(1)
    engine = Engine(LanguageModel(LINEAR), clients + 2, queue=0)
    server = uvicorn.Server(uvicorn.Config(Server(engine, "demo").app(), port=0, log_level="warning"))

    async def run_server() -> None:
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port.put((server.servers[0].sockets[0].getsockname()[1], engine.budget))
        await running

    asyncio.run(run_server())


async def stream(http: Any, prompt: int, count: int) -> list[float]:
    """The times at which the pieces of one request came; the first is when it was sent."""
    body = {"prompt": "x" * prompt, "max_tokens": count, "stream": True, "seed": 0}
    times = [time.perf_counter()]
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


async def measure_server(port: int, clients: list[int], context: int, count: int) -> dict[str, Any]:
    from openai import DefaultAsyncHttpxClient as HttpClient  # with 1,000 connections

    async with HttpClient(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False) as http:
        await stream(http, context, count)
        generated_per_second = {}
        for n in clients:
            start = time.perf_counter()
            await asyncio.gather(*(stream(http, context, count) for _ in range(n)))
            generated_per_second[str(n)] = n * count / (time.perf_counter() - start)
        running = asyncio.create_task(stream(http, context, 4096))
        await asyncio.sleep(0.2)
        start = time.perf_counter()
        long = asyncio.create_task(stream(http, 65_536, 1))
        await asyncio.sleep(0.2)
        short = await stream(http, 16, 1)
        end = (await long)[1]
        times = [x for x in await running if start <= x <= end]
    pauses = [after - before for before, after in pairwise(times)]
    return {
        "generated_per_second": generated_per_second,
        "beside_the_longest_prompt": {
            "seconds_to_its_first_byte": end - start,
            "median_pause_of_a_stream": statistics.median(pauses),
            "longest_pause_of_a_stream": max(pauses),
            "seconds_to_the_first_byte_of_a_short_prompt": short[1] - short[0],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 200])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    if options.tokens < 2:  # the first byte of a client comes from reading its prompt
        parser.error(f"--tokens: got {options.tokens}, expected at least 2")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = {
        "linrope": LanguageModel(LINEAR),
        "delta rule": LanguageModel(DELTA_RULE),
        "softmax": LanguageModel(SOFTMAX),
    }
    check(models)
    result: dict[str, Any] = {
        "machine": machine() | {"clock": "CPU time of one thread, minima; over HTTP: wall time"},
        "case": {name: getattr(options, name) for name in ("context", "tokens", "rounds")},
        "parameters": {name: sum(x.numel() for x in model.parameters()) for name, model in models.items()},
        "engine": {},
    }
    for n in options.clients:
        rows = measure(n, options.context, options.tokens, options.rounds, models)
        result["engine"][str(n)] = rows
        for side, row in rows.items():
            print(
                f"{n:4} clients  {side:26} {row['decoded_per_second']:9,.0f} bytes/s  prompts "
                f"{row['prompt_bytes_per_second']:9,.0f} bytes/s  {row['bytes_per_client'] / 1e6:6.2f} MB per client"
            )
    result["steps_beside_the_longest_prompt"] = longest_step(models["linrope"], options.context)
    print(json.dumps(result["steps_beside_the_longest_prompt"]))
    context = multiprocessing.get_context("spawn")
    port: Any = context.Queue()
    process = context.Process(target=serve_on, args=(port, max(options.clients)), daemon=True)
    process.start()
    number, budget = port.get(timeout=120)
    server = measure_server(number, options.clients, options.context, options.tokens)
    result["server"] = {"budget": budget} | asyncio.run(server)
    process.terminate()
    print(json.dumps(result["server"], indent=1))
    if options.out:
        save(options.out, result)


if __name__ == "__main__":
    main()
