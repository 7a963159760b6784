"""Times exported ONNX files in onnxruntime, beside the model in PyTorch, per token of a prompt and per decoding step.

"onnxruntime" is ``export_onnx``'s form with the operator LinearAttention, "portable" the form of plain operations,
whose prompts are fed in chunks of 256 tokens, and "pytorch" the model itself. The sides take turns; the figures are
minima of one thread's CPU time, or with more threads medians of the wall time. Before a side is timed, its logits are
compared with the model's.

    python benchmarks/onnx_export.py [--lengths 1024 16384] [--rounds 5] [--threads 1] [--out FILE.json]
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from benchmarks.measuring import measured, save
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.export import TensorStates, export_onnx

CHUNK = {"onnxruntime": None, "portable": 256, "pytorch": None}  # tokens per call; None: one call
Function = Callable[[Tensor, list[Tensor]], list[Tensor]]


def onnx_function(path: Path, names: list[str], threads: int) -> Function:
    """tokens and states -> logits and next states, as computed by onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(tokens: Tensor, states: list[Tensor]) -> list[Tensor]:
        feeds = zip(["tokens", *names], [tokens, *states], strict=True)
        return [torch.from_numpy(y) for y in session.run(None, {name: x.numpy() for name, x in feeds})]

    return run


def prompt(function: Function, chunk: int | None, tokens: Tensor, states: list[Tensor]) -> list[Tensor]:
    """The logits of all tokens, fed in chunks, and the states after them."""
    logits = []
    for piece in tokens.split(chunk or tokens.shape[1], 1):
        y, *states = function(piece, states)
        logits.append(y)
    return [torch.cat(logits, 1), *states]


@torch.no_grad()
def measure(lengths: list[int], rounds: int, threads: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig()).eval()
    module = TensorStates(model)
    functions: dict[str, Function] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("onnxruntime", "portable"):
            path = Path(folder) / f"{name}.onnx"
            export_onnx(model, path, operators=name)
            functions[name] = onnx_function(path, module.names, threads)
    functions["pytorch"] = lambda tokens, states: (lambda y, after: [y, *after])(*module(tokens, states))
    empty = module.empty(1)
    found: dict[str, object] = {}
    for n in lengths:
        tokens = torch.randint(256, (1, n))
        expected = module(tokens, empty)[0]
        errors, calls = {}, {}
        for name, function in functions.items():
            logits = prompt(function, CHUNK[name], tokens, empty)[0]
            errors[name] = float((logits - expected).abs().max() / expected.abs().max())
            assert errors[name] <= 1e-5, (name, n, errors[name])
            calls[name] = lambda f=function, c=CHUNK[name], t=tokens: prompt(f, c, t, empty)
        timings = measured(calls, rounds, 0.0)
        found[str(n)] = {
            "us_per_token": {k: 1e6 * t.seconds / n for k, t in timings.items()},
            "errors": errors,
        }
        print(n, found[str(n)])
    token = torch.zeros(1, 1, dtype=torch.int64)
    steps = measured({k: lambda f=f: f(token, empty) for k, f in functions.items()}, rounds, 0.1 * rounds)
    found["step"] = {"us": {k: 1e6 * t.seconds for k, t in steps.items()}}
    print("step", found["step"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = {
        "onnxruntime": onnxruntime.__version__,
        "model": "LanguageModelConfig()",
        "batch": 1,
        "figures": measure(options.lengths, options.rounds, options.threads),
    }
    if options.out:
        save(options.out, report)


if __name__ == "__main__":
    main()
