"""Times the delta rule on one CPU thread: linrope's operation beside the functions that transformers runs on a CPU.

Gated DeltaNet (a decay per head) and Kimi Delta Attention (a decay per feature), with keys and queries divided by their
lengths and no rotation, as transformers computes them. The sides take turns, their outputs are compared first, and the
figures are minima of the thread's CPU time. linrope's own gated call without ``erase`` stands beside them.

    python benchmarks/delta_rule.py [--rules gdn kda] [--tokens 512 2048] [--heads 16] [--isa v3] [--write FILE]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from benchmarks.measuring import measured, save
from linrope import linear_rope_attention
from linrope.backends import native
from linrope.decode import prepare_attention
from linrope.feature_maps import UnitMap

D = 128  # features and values of a head
ROUNDS = 3
STEPS = 16  # decoding steps that are timed together
UNIT = UnitMap(D, query_factor=D**-0.5)
PEERS = {
    "gdn": (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule),
    "kda": (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention),
}
Runs = dict[str, Callable[[], Any]]


def tokens(rule: str, b: int, n: int, heads: int) -> list[Tensor]:
    """q, k, v, log decay and beta as transformers' layers have them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(b, n, heads, D, generator=generator) for _ in range(3))
    gates = -F.softplus(torch.randn(b, n, heads, *([D] if rule == "kda" else []), generator=generator) - 2)
    return [q, k, v, gates, torch.rand(b, n, heads, generator=generator)]


def ours(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, beta: Tensor | None, **how: Any) -> Any:
    return linear_rope_attention(
        q, k, v, feature_map=UNIT, normalize=False, log_decay=gates, erase=beta, write=beta, **how
    )


def of_sequences(rule: str, n: int, heads: int) -> Runs:
    """Forward, and forward and backward, over one sequence."""
    inputs = tokens(rule, 1, n, heads)
    gradient = torch.randn(1, n, heads, D, generator=torch.Generator().manual_seed(1))

    def peer(*x: Tensor) -> Tensor:
        out: Tensor = PEERS[rule][0](*x, use_qk_l2norm_in_kernel=True)[0]
        return out

    def plain(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, _: Tensor) -> Any:
        return ours(q, k, v, gates, None)

    def trained(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        function(*leaves).backward(gradient)
        return [x.grad for x in leaves if x.grad is not None]

    def forward(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    sides = {"linrope": ours, "transformers": peer, "without erase": plain}
    agree(forward(ours), forward(peer))
    if n <= 1024:
        for one, other in zip(trained(ours), trained(peer), strict=True):
            agree(one, other)
    return {
        f"{kind}, {name}": (lambda run=run, function=function: run(function))
        for kind, run in (("forward", forward), ("with backward", trained))
        for name, function in sides.items()
    }


def of_steps(rule: str, b: int, heads: int) -> Runs:
    """STEPS more tokens of each sequence, in the state's memory."""
    q, k, v, gates, beta = tokens(rule, b, 1, heads)
    prompt = tokens(rule, b, 8, heads)
    with torch.no_grad():
        _, state = ours(*prompt, return_state=True)
        _, memory = PEERS[rule][0](*prompt, use_qk_l2norm_in_kernel=True, output_final_state=True)

        def step() -> Tensor:
            nonlocal state
            out, state = ours(q, k, v, gates, beta, state=state.donate(), return_state=True)
            return out

        def peer() -> Tensor:
            nonlocal memory
            out, memory = PEERS[rule][1](
                q,
                k,
                v,
                gates,
                beta,
                initial_state=memory,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            return out

        prepared = prepare_attention(state.clone(), feature_map=UNIT, normalize=False)

        def prepared_step() -> Tensor:
            return prepared(q, k, v, log_decay=gates, erase=beta, write=beta)

        out = step()
        agree(out, peer())
        agree(out, prepared_step())

    def repeated(one: Callable[[], Tensor]) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            for _ in range(STEPS):
                one()

        return run

    sides = {"linrope": step, "prepared": prepared_step, "transformers": peer}
    return {f"{STEPS} steps, {name}": repeated(one) for name, one in sides.items()}


def agree(one: Tensor, other: Tensor) -> None:
    """Raises AssertionError unless the two are equal up to rounding."""
    assert (one - other).abs().max() <= 1e-4 * other.abs().max(), float((one - other).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="of a step")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20, help="for each row")
    parser.add_argument(
        "--isa", help="native's instruction set, and no AVX-512 in PyTorch: ATEN_CPU_CAPABILITY"
    )
    parser.add_argument("--write", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.isa is not None:
        native.use_instruction_set(options.isa)
    found: dict[str, dict[str, float]] = {}
    for rule in options.rules:
        rows = {f"{rule}, {n:,} tokens": of_sequences(rule, n, options.heads) for n in options.tokens}
        rows |= {f"{rule}, batch {b}": of_steps(rule, b, options.heads) for b in options.batches}
        for row, runs in rows.items():
            timings = measured(runs, ROUNDS, options.seconds / len(runs))
            found[row] = {name: 1e3 * timing.seconds for name, timing in timings.items()}
            for name, time_of_run in found[row].items():
                kind, side = name.split(", ")
                ratio = time_of_run / found[row][f"{kind}, linrope"]
                print(
                    f"{row:20} {kind:14} {side:14} {time_of_run:10.3f} ms {ratio:8.2f} times linrope's",
                    flush=True,
                )
    if options.write is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        setting = versions | {"heads": options.heads, "instruction set": native.instruction_set()}
        save(options.write, {"setting": setting, "milliseconds": found})


if __name__ == "__main__":
    main()
