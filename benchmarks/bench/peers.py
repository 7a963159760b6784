"""Other libraries for linear attention, if they are installed, called with the same inputs.

Neither rotates features, so both are timed and compared with float64 without rotation. benchmarks/gpu measures those
that require a GPU.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bench import checks
from benchmarks.bench.cases import AttentionCase

Attend = Callable[[], Tensor]


def _features(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = case.inputs
    return F.elu(q) + 1, F.elu(k) + 1, v


def _fast_transformers(module: Any, case: AttentionCase) -> Attend:
    masking = import_module("fast_transformers.masking")
    attention = module.CausalLinearAttention(case.dim)
    mask = masking.TriangularCausalMask(case.n, device=case.device)
    lengths = masking.LengthMask(torch.full((case.batch,), case.n, device=case.device))

    def attend() -> Tensor:
        out: Tensor = attention(*case.inputs, mask, lengths, lengths)
        return out

    return attend


def _performer(module: Any, case: AttentionCase) -> Attend:
    def attend() -> Tensor:
        features = (x.transpose(1, 2) for x in _features(case))
        out: Tensor = module.causal_linear_attention_noncuda(*features)
        return out.transpose(1, 2)

    return attend


# The module of a library, and how its function is called
PEERS: dict[str, tuple[str, Callable[[Any, AttentionCase], Attend]]] = {
    "fast-transformers": ("fast_transformers.attention", _fast_transformers),
    "performer-pytorch": ("performer_pytorch.performer_pytorch", _performer),
}


def peers_of(case: AttentionCase) -> tuple[dict[str, tuple[AttentionCase, Attend]], dict[str, str]]:
    """The checked peers at this case's sizes, with elu+1 and without decay, and reasons for the others."""
    peers: dict[str, tuple[AttentionCase, Attend]] = {}
    reasons: dict[str, str] = {}
    for name, (path, call) in PEERS.items():
        try:
            module = import_module(path)
        except Exception as error:  # an import of another library may raise anything
            missing = isinstance(error, ModuleNotFoundError) and error.name == path.split(".")[0]
            reasons[name] = "not installed" if missing else f"cannot be imported: {_line(error)}"
            continue
        if case.kv_heads not in (None, case.heads):
            reasons[name] = "does not support grouped heads"
            continue
        try:
            plain = AttentionCase(case.n, case.batch, case.heads, case.dim, case.device, case.dtype)
            attend = call(module, plain)
            unrotated = plain.options | {"rotary": None}
            checks.check_attention(plain, attend, name, unrotated, checks.SLACK)  # their eps differs
            peers[name] = plain, attend
        except Exception as error:  # a failure of a peer must not stop the benchmark
            reasons[name] = f"failed: {_line(error)}"
    return peers, reasons


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
