"""Other libraries for linear attention, if they are installed, called with the same inputs.

None of them rotates features, so all are timed and compared with float64 without rotation, and without the
normalizer if they have none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bench import checks
from benchmarks.bench.cases import AttentionCase
from linrope import feature_maps

Attend = Callable[[], Tensor]


@dataclass(frozen=True)
class Peer:
    """A library: the module of its function, whether it requires a GPU, and whether it normalizes."""

    module: str
    on_gpu: bool
    normalize: bool
    call: Callable[[Any, AttentionCase], Attend]


def _features(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = case.inputs
    return F.elu(q) + 1, F.elu(k) + 1, v


def _flash_linear_attention(module: Any, case: AttentionCase) -> Attend:
    def attend() -> Tensor:
        out: Tensor = module.chunk_linear_attn(*_features(case), scale=1.0, normalize=False)[0]
        return out

    return attend


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


def _mamba(module: Any, case: AttentionCase) -> Attend:
    steps = torch.ones(case.batch, case.n, case.heads, device=case.device)
    rates = torch.zeros(case.heads, device=case.device)

    def attend() -> Tensor:
        phi, psi, v = _features(case)
        out: Tensor = module.mamba_chunk_scan_combined(v, steps, rates, psi, phi, chunk_size=64)
        return out

    return attend


PEERS = {
    "flash-linear-attention": Peer("fla.ops.linear_attn", True, False, _flash_linear_attention),
    "fast-transformers": Peer("fast_transformers.attention", False, True, _fast_transformers),
    "performer-pytorch": Peer("performer_pytorch.performer_pytorch", False, True, _performer),
    "mamba": Peer("mamba_ssm.ops.triton.ssd_combined", True, False, _mamba),
}


def peers_of(case: AttentionCase) -> tuple[dict[str, tuple[AttentionCase, Attend]], dict[str, str]]:
    """The checked peers at this case's sizes, with elu+1 and without decay, and reasons for the others."""
    peers: dict[str, tuple[AttentionCase, Attend]] = {}
    reasons: dict[str, str] = {}
    for name, peer in PEERS.items():
        try:
            module = import_module(peer.module)
        except Exception as error:  # an import of another library may raise anything
            missing = isinstance(error, ModuleNotFoundError) and error.name == peer.module.split(".")[0]
            reasons[name] = "not installed" if missing else f"cannot be imported: {_line(error)}"
            continue
        if peer.on_gpu and torch.device(case.device).type != "cuda":
            reasons[name] = "requires a GPU"
        elif (case.kv_heads or case.heads) != case.heads:
            reasons[name] = "does not support grouped heads"
        else:
            try:
                plain = AttentionCase(case.n, case.batch, case.heads, case.dim, case.device, case.dtype)
                attend = peer.call(module, plain)
                options: dict[str, Any] = {
                    "feature_map": feature_maps.make("elu+1", case.dim),
                    "rotary": None,
                }
                options |= {"normalize": peer.normalize, "decay": None}
                checks.check_attention(plain, attend, name, options, checks.SLACK)  # their eps differs
                peers[name] = plain, attend
            except Exception as error:  # a failure of a peer must not stop the benchmark
                reasons[name] = f"failed: {_line(error)}"
    return peers, reasons


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
