"""Random configurations of a call, in every backend, against the equation in float64: the numerics contract.

``python -m tests.campaigns.configurations --count 20000 --seed 0`` runs them on the CPU backends, with
``--interpreter`` on the Triton kernels. For each that fails it prints the command that repeats it.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linrope import LinearAttentionState, linear_rope_attention
from linrope.backends import native
from linrope.conformance.bounds import (
    BOUNDS,
    Yardstick,
    bound_of_sums,
    cancelling,
    error_in_bounds,
    everything,
    largest,
    moved,
)
from linrope.recurrence.state import NO_KEYS
from tests.campaigns.draw import Configuration, Given, Piece
from tests.support.contract import ON_CPU
from tests.support.equation import Change, Equation, Sizes
from tests.support.interpreter import quicken

FAST = ("eager",) if native.why_not() else ("eager", "native")
CPU = {"float32": ("reference", *FAST), "float64": ("reference", "eager")}
CPU |= dict.fromkeys(("bfloat16", "float16"), FAST)  # "reference" adds up in half precision there
# Triton's interpreter multiplies bfloat16's bit patterns.
KERNELS = dict.fromkeys(("float32", "float16", *(() if ON_CPU else ("bfloat16",))), ("triton",))

EXACT = 1e-9  # of float64, in units of the terms' sizes: "reference" takes differences of sums of logs there,
EXACT_XPOS = 1e-7  # which with xPos are as large as positions
GRADIENT = 1e-9  # of float64, in units of a gradient's largest entry


class OutOfContract(AssertionError):
    pass


def check(config: Configuration, backends: tuple[str, ...]) -> Counter[str]:
    """How many comparisons were made, by kind; OutOfContract at the first one that fails."""
    done: Counter[str] = Counter()
    if not any(map(config.computed_by, backends)):
        return Counter({"not computed": len(backends)})
    first, second = config.piece(0), config.piece(1)
    oracle, after, sizes = _exact(config, first, second)
    # docs/numerics.md promises nothing of what is rounded before a backend sees the features.
    exponential = config.map is not None and config.map.log_scaled and not isinstance(config.map, Given)
    rounded = (exponential and config.scale > 1) or config.rounds
    sizes.slack = 16 if rounded and config.dtype != torch.float64 else 1
    sizes.exact = EXACT if config.rotary is None or config.rotary.xpos is None else EXACT_XPOS
    results = [x for name, x in oracle.items() if x.is_floating_point()] + [sizes.out, sizes.kv]
    if any(not bool(x.isfinite().all()) or largest(x) > torch.finfo(config.dtype).max for x in results):
        return Counter({"out of range": 1})
    yardstick = None
    if config.dtype != torch.float64:
        errors = ReferenceErrors(config, (first, second), oracle, operands="triton" in backends)
        yardstick = Yardstick(errors)
    for backend in backends:
        if not config.computed_by(backend):
            done["not computed"] += 1
            continue
        try:
            found, last, out = _run(backend, config, first, second)
        except RuntimeError as error:
            if config.rotary is None or config.rotary.xpos is None or "xpos" not in str(error):
                raise
            done["refused"] += 1
            continue
        done[f"{backend} {config.dtype_name}"] += 1
        for name, x in (("out", found["out"]), ("out without gradients", out)):
            error = _out_error(x, oracle["out"], sizes)
            if error > 1 and config.rounds and yardstick is not None:  # what is rounded before the map
                error = largest(x.double() - oracle["out"]) / (3 * yardstick.errors["out"])
            _expect(name, backend, error)
        _check_state(backend, config, found, last, oracle, after, sizes)
        done["gradients"] += _check_gradients(backend, config, found, oracle, yardstick, sizes)
        done["steps in place"] += _check_steps(backend, config, first, second, oracle, sizes)
    return done


def _exact(
    config: Configuration, first: Piece, second: Piece, rounded: Change = lambda x: x
) -> tuple[dict[str, Tensor], LinearAttentionState, Sizes]:
    """Everything of the second call, its last state, and the sizes of the terms, by the equation."""
    before, state = None, None
    if config.has_state:
        equation, wide = Equation(), first.wide()
        with torch.no_grad():
            _, state = equation(*wide.qkv, **wide.how)
        before = equation.sizes
    equation, wide = Equation(before, rounded), second.wide()
    with torch.no_grad():
        after = equation(*wide.qkv, state=state, **wide.how)[1]
    return _everything(*wide.qkv, state, call=equation, **wide.how), after, equation.sizes


def _everything(*inputs: Any, **how: Any) -> dict[str, Tensor]:
    """everything(), and log_decay's gradient summed over the tokens, as a parameter receives it."""
    found = everything(*inputs, **how)
    if "dlog_decay" in found:
        found["dlog_decay, summed"] = found["dlog_decay"].double().sum(1)
    return found


class ReferenceErrors:
    """The errors of "reference" in the gradients of a call, and in calls beside it: see Yardstick.

    operands: also those of the equation, with the operands of its products rounded as tensor cores want them.
    """

    def __init__(
        self, config: Configuration, pieces: tuple[Piece, Piece], oracle: dict[str, Tensor], *, operands: bool
    ) -> None:  # fmt: skip
        self.config, self.pieces, self.oracle = config, pieces, oracle
        self.operands = operands and config.dtype != torch.float32

    def __call__(self, change: Callable[[Tensor], Tensor], several: bool) -> dict[str, float]:
        pieces = [replace(piece, qkv=[change(x) for x in piece.qkv]) for piece in self.pieces]
        numbers = [[x for piece in both for x in piece.qkv] for both in (self.pieces, pieces)]
        same = all(map(torch.equal, *numbers))
        oracle = self.oracle if same else _exact(self.config, *pieces)[0]
        found = [_run("reference", self.config, *pieces)[0]]
        if "dlog_decay" in oracle:  # sums are to be as exact as those of "eager"
            sums = _run("eager", self.config, *pieces)[0]["dlog_decay, summed"]
            found.append(found[0] | {"dlog_decay, summed": sums})
        if self.operands:
            generator, u = torch.Generator().manual_seed(0), torch.finfo(self.config.dtype).eps
            for _ in range(32 if several else 1):
                found.append(_exact(self.config, *pieces, lambda x: moved(x, generator, u))[0])
        return {
            name: max(largest(each[name].double() - x) for each in found)
            for name, x in oracle.items()
            if name == "out" or name[0] == "d"
        }


def _run(
    backend: str, config: Configuration, first: Piece, second: Piece
) -> tuple[dict[str, Tensor], LinearAttentionState, Tensor]:
    """Everything of the second call, its last state, and its output where nothing is differentiated."""
    state = None
    if config.has_state:
        with torch.no_grad():
            _, state = linear_rope_attention(*first.qkv, return_state=True, backend=backend, **first.how)
    found = _everything(*second.qkv, state, backend=backend, **second.how)
    with torch.no_grad():
        out, last = linear_rope_attention(
            *second.qkv, state=state, return_state=True, backend=backend, **second.how
        )
    return found, last, out


def _expect(what: str, backend: str, error: float) -> None:
    if not error <= 1:
        raise OutOfContract(f"{backend}: {what} is {error:.3g} times what the contract allows")


def _ratio(error: Tensor, allowed: Tensor) -> float:
    return float((error / (allowed + 1e-37)).max()) if error.numel() else 0.0


def _out_error(out: Tensor, oracle: Tensor, sizes: Sizes) -> float:
    if out.dtype == torch.float64:
        return _ratio((out - oracle).abs(), sizes.exact * sizes.out)
    return error_in_bounds(out, oracle, sizes.slack * sizes.out + sizes.lost)


def _check_state(
    backend: str, config: Configuration, found: dict[str, Tensor], last: LinearAttentionState,
    oracle: dict[str, Tensor], after: LinearAttentionState, sizes: Sizes,
) -> None:  # fmt: skip
    u = sizes.exact
    if config.dtype != torch.float64:
        u = bound_of_sums(backend, config.dtype, native.instruction_set())
        if config.rounds:
            u = max(u, bound_of_sums("triton", config.dtype, None))
        u *= sizes.slack if backend == "triton" or config.rounds else 1
    lag = torch.zeros(1, 1, dtype=torch.float64)
    if after.log_scale is not None and last.log_scale is not None:
        # Exponents formed in float32 of inputs in half precision are off; of given features they are not.
        lag = (last.log_scale - after.log_scale).masked_fill(after.log_scale <= NO_KEYS / 2, 0)
        _expect("log_scale", backend, largest(lag) / (1e-9 if config.dtype == torch.float64 else 1e-3))
    for name, size in (("kv", sizes.kv), ("z", sizes.z)):
        by = lag[(..., *[None] * (size.ndim - 2))]
        error = (found[name].double() * by.exp() - oracle[name]).abs()
        slack = u + 4 * largest(lag)
        if config.dtype != torch.float64 and not config.by_backend:
            slack = max(slack, BOUNDS[torch.float16])  # of features that are sums, formed in float32
        _expect(name, backend, _ratio(error, slack * size))
    for name in ("position", "angle"):
        one, other = getattr(last, name), getattr(after, name)
        if one is not None and not torch.equal(one, other.expand_as(one)):
            raise OutOfContract(f"{backend}: {name} of the state is {one}, expected {other}")


def _check_gradients(
    backend: str, config: Configuration, found: dict[str, Tensor], oracle: dict[str, Tensor],
    yardstick: Yardstick | None, sizes: Sizes,
) -> int:  # fmt: skip
    biggest = max(largest(x) for name, x in oracle.items() if name.startswith("d"))
    unit = BOUNDS[config.dtype] if backend == "triton" else 0.0  # of sums in log_decay's gradient
    # docs/numerics.md says so: the terms are as large as 1 / eps there, and cancel; where the clamp begins they jump
    if config.normalize and (sizes.den < 100 * config.eps).any():
        return 0
    if yardstick is not None and backend == "triton" and config.dtype != torch.float32:
        bound, out = BOUNDS[config.dtype] * largest(sizes.out), largest(oracle["out"])
        if bound > out:  # the products cancel, and leave no digits of output and gradients
            return 0
    for name in (name for name in oracle if name.startswith("d")):
        if found[name].shape != oracle[name].shape:
            raise OutOfContract(f"{backend}: {name} has shape {tuple(found[name].shape)}")
        if name in ("dkv", "dz") and config.map is not None and config.map.log_scaled:
            continue  # in units of e^m, which of a state without keys may be any
        error, most = largest(found[name].double() - oracle[name]), largest(oracle[name])
        if most < 1e-9:  # one key: the output is its value, whatever q and k are
            continue
        if most > torch.finfo(found[name].dtype).max:  # gates may be narrower than q
            continue
        if backend == "reference" and name == "dangle_steps" and found[name].dtype != config.dtype:
            continue  # it rounds the steps' gradients through queries and keys before it adds them
        narrow = found[name].dtype != config.dtype  # then parts are rounded that may cancel
        # log_decay may be narrower than q.
        rounded = torch.finfo(found[name].dtype).eps * biggest * narrow
        if name.endswith("summed"):  # each token's entry has been rounded
            tokens = found["dlog_decay"]
            rounded = torch.finfo(tokens.dtype).eps * float(tokens.abs().double().sum(1).max())
        terms = 0.0
        if name.startswith("dlog_decay") and oracle["out"].numel():
            terms = float(cancelling({"out": sizes.out, "kv": sizes.kv, "z": sizes.z}))
        if yardstick is None:
            _expect(name, backend, error / (GRADIENT * most + rounded + sizes.exact * (terms + biggest)))
            continue
        _expect(name, backend, yardstick.ratio(name, error, most, rounded + unit * terms))
    return 1


def _check_steps(
    backend: str, config: Configuration, first: Piece, second: Piece, oracle: dict[str, Tensor], sizes: Sizes
) -> int:
    """A decoding step in the memory of a state that was given away, and of a pool's rows."""
    if not (config.has_state and config.causal and not config.packed and config.lengths[0] == 1):
        return 0
    with torch.no_grad():
        _, state = linear_rope_attention(*first.qkv, return_state=True, backend=backend, **first.how)
        rows = torch.arange(len(state.kv)) + 1
        tensors = {name: torch.cat((x[:1], x, x[:1])).clone() for name, x in state.tensors().items()}
        pool = replace(state, **tensors)
        if "angle_steps" in second.how and pool.angle is None:
            return 0
        for label, own in (("a state given away", state.clone().donate()), ("a pool", pool.at(rows))):
            out, last = linear_rope_attention(
                *second.qkv, state=own, return_state=True, backend=backend, **second.how
            )
            _expect(f"out in {label}", backend, _out_error(out, oracle["out"], sizes))
            new = last.rows().kv if label == "a pool" else last.kv
            if new.shape != oracle["kv"].shape:
                raise OutOfContract(f"{backend}: kv in {label} has shape {tuple(new.shape)}")
        if not all(torch.equal(x[[0, -1]], tensors[name][[0, -1]]) for name, x in pool.tensors().items()):
            raise OutOfContract(f"{backend}: a step wrote into a row of a pool that is not its own")
    return 1


def run(
    count: int, seed: int, *, kernels: bool = False, start: int = 0, most: int = 150, report: int = 500
) -> tuple[Counter[str], list[int]]:
    """What was compared, and the numbers of the configurations that failed."""
    backends = KERNELS if kernels else CPU
    done: Counter[str] = Counter()
    failed, began = [], time.monotonic()
    for index in range(start, start + count):
        try:
            config = Configuration(seed, index, list(backends), most)
            done += check(config, backends[config.dtype_name])
        except Exception as error:
            failed.append(index)
            again = f"--only {index} --seed {seed} --most {most}{' --interpreter' * kernels}"
            command = f"  python -m tests.campaigns.configurations {again}"
            print(f"{type(error).__name__}: {error}\n{command}", flush=True)
        if (index + 1 - start) % report == 0:
            seconds = time.monotonic() - began
            print(f"{index + 1 - start} configurations, {len(failed)} failed, {seconds:.0f} s", flush=True)
    return done, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first configuration")
    parser.add_argument("--most", type=int, default=150, help="tokens of a sequence")
    parser.add_argument("--only", type=int, help="one configuration, whose error is raised")
    parser.add_argument("--interpreter", action="store_true", help="Triton kernels, in its interpreter")
    given = parser.parse_args()
    if given.interpreter:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
        quicken()
    torch.set_num_threads(1)
    if given.only is not None:
        backends = KERNELS if given.interpreter else CPU
        config = Configuration(given.seed, given.only, list(backends), given.most)
        print(config, dict(check(config, backends[config.dtype_name])), sep="\n")
        return 0
    options = {"kernels": given.interpreter, "start": given.start, "most": given.most}
    done, failed = run(given.count, given.seed, **options)
    print(f"{given.count} configurations, {len(failed)} out of contract: {failed}")
    print(", ".join(f"{name}: {number}" for name, number in sorted(done.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
