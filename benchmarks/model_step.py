"""Times a model's decoding step on one CPU thread, beside the step's matrix products alone.

The model's own call with donated states, a prepared step and PyTorch's products take turns of some steps: in a decoding
loop too, a step finds in the cache what the step before has read. The figures are minima of the thread's CPU time.

    python benchmarks/model_step.py [--batches 1 8 200] [--rounds 300] [--busy | --transformers]

With --busy it prints medians of the wall time instead, with one thread and with all, while other processes keep every
core busy: a step that waits for a second thread waits for its turn, some milliseconds.

With --transformers it times ``generate`` of a ``LinRopeForCausalLM`` of the same size instead, per token, with and
without prepared steps.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from benchmarks.measuring import measured
from linrope.decode import prepare
from linrope.models import LanguageModel, LanguageModelConfig

TURN = 0.01  # seconds of a turn


def sides(model: LanguageModel, b: int) -> dict[str, Callable[[], object]]:
    """The three functions to time, by name. Both steps are checked to give the same logits first."""
    tokens = torch.randint(256, (b, 64))
    states, token = model(tokens)[1], tokens[:, :1]
    step = prepare(model, [state.clone() for state in states])
    expected, states = model(token, [state.clone() for state in states])
    torch.testing.assert_close(step(token), expected, rtol=1e-4, atol=1e-4)
    products = [(torch.randn(b, weight.shape[1]), weight) for weight in weights(model)]

    def ordinary() -> None:
        nonlocal states
        states = model(token, [state.donate() for state in states])[1]

    def matrix_products() -> None:
        for x, weight in products:
            F.linear(x, weight)

    return {"ordinary": ordinary, "step": lambda: step(token), "products": matrix_products}


def generate_seconds(b: int, rounds: int, tokens: int = 50) -> dict[str, float]:
    """The time of a token in transformers' generate(), less that of the prompt and of the first token."""
    from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM, modeling

    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 448, "num_attention_heads": 8}
    model = LinRopeForCausalLM(LinRopeConfig(num_hidden_layers=4, **sizes)).eval()
    prompt, prepared = torch.randint(1, 256, (b, 16)), modeling.step_of_generate

    def generate(count: int, step: Callable[..., object]) -> Callable[[], object]:
        def call() -> None:
            modeling.step_of_generate = step
            model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None)

        return call

    sides = {"prepared": prepared, "ordinary": lambda *_, **__: None}
    calls = {f"{name} {n}": generate(n, step) for name, step in sides.items() for n in (1, 1 + tokens)}
    times = measured(calls, rounds, 0.0)
    modeling.step_of_generate = prepared
    return {
        name: (times[f"{name} {1 + tokens}"].seconds - times[f"{name} 1"].seconds) / tokens for name in sides
    }


def weights(model: LanguageModel) -> list[torch.Tensor]:
    """The matrices of a step, with those of the same vector in one."""
    found = []
    for block in model.blocks:
        mixer, network = block.attention, block.feed_forward
        projections = mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj, mixer.forget_gate
        found += [torch.cat([x.weight for x in projections]), mixer.o_proj.weight]
        found += [torch.cat([network.w1.weight, network.w3.weight]), network.w2.weight]
    return [*found, model.embed.weight]


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keeps every core busy with another process."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 200])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.transformers:
        for b in options.batches:
            t = generate_seconds(b, options.rounds)
            ratio = t["ordinary"] / t["prepared"]
            print(f"{b:5} ordinary / prepared {ratio:.2f}, us per token {1e6 * t['prepared']:.0f}")
        return
    model = LanguageModel(LanguageModelConfig(num_layers=options.layers)).eval()
    if options.busy:
        with torch.inference_mode(), busy_cores():
            for b in options.batches:
                functions = sides(model, b)
                for count in (1, threads):
                    torch.set_num_threads(count)
                    times = measured(functions, options.rounds, TURN * options.rounds, wall=count == 1)
                    figures = ", ".join(f"{name} {1e3 * x.seconds:.1f} ms" for name, x in times.items())
                    print(f"batch {b}, {count} threads: {figures}")
        return
    print("batch   step / products   ordinary / products   ordinary / step   us per step")
    with torch.inference_mode():
        for b in options.batches:
            times = measured(sides(model, b), options.rounds, TURN * options.rounds)
            t = {name: x.seconds for name, x in times.items()}
            ratios = t["step"] / t["products"], t["ordinary"] / t["products"], t["ordinary"] / t["step"]
            print(f"{b:5} {ratios[0]:17.2f} {ratios[1]:21.2f} {ratios[2]:17.2f} {1e6 * t['step']:13.0f}")


if __name__ == "__main__":
    main()
