"""Times a model's decoding step on one CPU thread, beside the step's matrix products alone.

The model's own call with donated states, ``DecodingStep`` and the products take turns. The figures are minima of the
thread's CPU time.

    python benchmarks/model_step.py [--batches 1 8 200] [--rounds 300]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from linrope.models import DecodingStep, LanguageModel, LanguageModelConfig


def sides(model: LanguageModel, b: int) -> dict[str, Callable[[], object]]:
    """The three functions to time, by name. Both steps are checked to give the same logits first."""
    tokens = torch.randint(256, (b, 64))
    states, token = model(tokens)[1], tokens[:, :1]
    step = DecodingStep(model, [state.clone() for state in states])
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


def weights(model: LanguageModel) -> list[torch.Tensor]:
    """The matrices of a step, with those of the same vector in one."""
    found = []
    for block in model.blocks:
        mixer, network = block.attention, block.feed_forward
        projections = mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj, mixer.forget_gate
        found += [torch.cat([x.weight for x in projections]), mixer.o_proj.weight]
        found += [torch.cat([network.w1.weight, network.w3.weight]), network.w2.weight]
    return [*found, model.embed.weight]


def least_seconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.thread_time()
            function()
            least[name] = min(least[name], time.thread_time() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 200])
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig()).eval()
    print("batch   step / products   ordinary / products   ordinary / step   us per step")
    with torch.inference_mode():
        for b in options.batches:
            t = least_seconds(sides(model, b), options.rounds)
            ratios = t["step"] / t["products"], t["ordinary"] / t["products"], t["ordinary"] / t["step"]
            print(f"{b:5} {ratios[0]:17.2f} {ratios[1]:21.2f} {ratios[2]:17.2f} {1e6 * t['step']:13.0f}")


if __name__ == "__main__":
    main()
