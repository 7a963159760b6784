"""Several sequences in one row: each keeps its own logits, however the call says that the row is packed."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope.backends import native
from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers import mamba2, refusals, shared
from tests.support.families import CACHE, CONFIGURATIONS, TESTED, model, recurrent_layer, relative, tokens

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))

LENGTHS = [7, 1, 12]


def numbers_of(lengths: list[int]) -> Tensor:
    """(1, n): the packed sequence of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def _flash() -> dict[str, Any]:
    bounds = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 12, "max_length_k": 12}


SEQ_IDX = {"seq_idx": numbers_of(LENGTHS).int()}
POSITIONS = {"position_ids": torch.cat([torch.arange(x) for x in LENGTHS])[None]}
WAYS: dict[str, dict[str, Any]] = {
    "seq_idx": SEQ_IDX,
    "positions": POSITIONS,
    "positions from 2": {"position_ids": POSITIONS["position_ids"] + 2},
    "positions and a mask of ones": POSITIONS | {"attention_mask": torch.ones(1, 20, dtype=torch.long)},
    "bounds": {"cu_seqlens": _flash()["cu_seq_lens_q"]},
    "flash": _flash(),
    "flash in part": {"cu_seq_lens_q": _flash()["cu_seq_lens_q"]},
    "seq_idx and positions": SEQ_IDX | POSITIONS,
    "everything": SEQ_IDX | POSITIONS | _flash(),
}


# Without what mixes packed sequences: the softmax layers of Granite and GLM, and Qwen4's embeddings per layer
PACKABLE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "mamba"]},
    "glm5_next": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, "mlp_layer_types": ["dense", "sparse"],
    },
    "qwen4_exp": {"ple_layer_ids": []},
}  # fmt: skip


# Inkling's layers do not tell their convolutions
FAMILIES = [name for name in TESTED if name != "inkling"]


def packable(family: str) -> Any:
    return model(family, **PACKABLE.get(family, {}))


def separate(net: Any, ids: Tensor) -> Tensor:
    return torch.cat([net(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)], 1)


# One function reads the ways and their errors in all families, and another one passes them on in Mamba-2
BOTH = [name for name in ("mamba2", "qwen3_5") if name in TESTED]
SAID = [(family, way, False) for family in BOTH for way in WAYS]
SAID += [(family, way, True) for family in FAMILIES for way in ("seq_idx", "everything")]


@pytest.mark.parametrize(("family", "way", "training"), SAID)
def test_packed_sequences_have_their_own_logits_and_gradients(family: str, way: str, training: bool) -> None:
    ids, net = tokens(1, 20), packable(family).train(training)
    weights = torch.randn(1, 20, 97, generator=torch.Generator().manual_seed(0))
    results = []
    with linrope_transformers.enable(family):
        for packed in (True, False):
            net.zero_grad()
            logits = net(ids, **WAYS[way]).logits if packed else separate(net, ids)
            (logits * weights).sum().backward()
            results.append((logits.detach(), [x.grad for x in net.parameters() if x.grad is not None]))
    assert relative(results[0][0], results[1][0]) < 2e-6
    for got, expected in zip(results[0][1], results[1][1], strict=True):
        # A parameter of three numbers, sums over all tokens that cancel
        assert relative(got, expected) < (2e-5 if expected.numel() > 3 else 1e-4) or not expected.any()
    assert relative(results[0][0], separate(net, ids).detach()) < 2e-5  # transformers, each sequence alone


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_several_packed_rows(family: str) -> None:
    ids, net = tokens(2, 20), packable(family)
    numbers = torch.stack((numbers_of([5, 15])[0], numbers_of([20])[0]))
    with linrope_transformers.enable(family):
        got = net(ids, seq_idx=numbers).logits
        alone = [net(x, use_cache=False).logits for x in (ids[:1, :5], ids[:1, 5:], ids[1:])]
    assert relative(got, torch.cat((torch.cat(alone[:2], 1), alone[2]))) < 2e-6


@pytest.mark.parametrize("family", TESTED)
@torch.no_grad()
def test_rows_of_one_sequence_are_not_packed(family: str) -> None:
    ids, net = tokens(2, 20), model(family)
    with linrope_transformers.enable(family):
        plain = net(ids, use_cache=True)
        for one in (
            {"seq_idx": torch.zeros(2, 20, dtype=torch.int32)},
            {"position_ids": torch.arange(20).expand(2, -1)},
        ):
            result = net(ids, use_cache=True, **one)
            assert torch.equal(result.logits, plain.logits)
            assert result[CACHE[family]] is not None


PADDED = torch.tensor([[0] * 3 + [1] * 17])
# What is passed, and the error
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seq_idx of another shape": ({"seq_idx": torch.zeros(1, 19)}, r"seq_idx: got shape \(1, 19\), expected"),
    "bounds that end early": (
        {"cu_seqlens": torch.tensor([0, 7, 19])},
        r"cu_seqlens: got \[0, 7, 19\] with 1 rows",
    ),
    "positions that run on": (
        SEQ_IDX | {"position_ids": torch.arange(20)[None]},
        "position_ids: got other packed sequences than seq_idx",
    ),
    "two ways that differ": (
        SEQ_IDX | {"cu_seq_lens_q": torch.tensor([0, 7, 20])},
        "cu_seq_lens_q: got other packed",
    ),
    "padding": (
        SEQ_IDX | {"attention_mask": PADDED},
        "attention_mask: got padding in rows of packed sequences",
    ),
    "padding and positions": (
        POSITIONS | {"attention_mask": PADDED},
        "position_ids: got positions that restart in",
    ),
    "a cache is wanted": (
        SEQ_IDX | {"use_cache": True},
        "use_cache=True: expected False or None with packed",
    ),
    "bounds that are no integers": (
        {"cu_seq_lens_q": torch.tensor([0.0, 7.0, 20.0])},
        r"cu_seq_lens_q: got \[0.0, 7.0, 20.0\] .* integers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("family", BOTH)
def test_what_cannot_be_kept_apart_is_an_error(family: str, case: str) -> None:
    options, message = REFUSED[case]
    with linrope_transformers.enable(family), pytest.raises(ValueError, match=message):
        packable(family)(tokens(1, 20), **options)


@pytest.mark.parametrize("family", TESTED)
@torch.no_grad()
def test_packed_sequences_after_a_cache_are_an_error(family: str) -> None:
    net = model(family)
    with linrope_transformers.enable(family):
        cache = {CACHE[family]: net(tokens(1, 4), use_cache=True)[CACHE[family]]}
        with pytest.raises(ValueError, match=f"{CACHE[family]}: got a cache with packed sequences"):
            net(tokens(1, 20), **SEQ_IDX, **cache)


@torch.no_grad()
def test_positions_after_a_cache_may_go_on_from_anywhere_and_leave_gaps() -> None:
    net = model("bamba")
    with linrope_transformers.enable("bamba"):
        cache = net(tokens(1, 4), use_cache=True)[CACHE["bamba"]]
        result = net(tokens(1, 3), position_ids=torch.tensor([[30, 31, 35]]), **{CACHE["bamba"]: cache})
    assert result[CACHE["bamba"]].get_seq_length() == 7


MIXES = {
    "granitemoehybrid": "only with flash attention",
    "glm5_next": "GLM's layers of indexed attention mix them",
    "inkling": "Inkling does not tell its convolutions",
    "qwen4_exp": r"embeddings per layer \(ple_layer_ids\)",
}


def subclassed(net: Any) -> Any:
    """Gives the models inside a class of the user's."""
    for module in net.modules():
        if type(module).__name__.endswith("Model"):
            module.__class__ = type("Own", (type(module),), {})
    return net


@pytest.mark.parametrize("family", [name for name in MIXES if name in CONFIGURATIONS])
def test_a_model_that_mixes_packed_sequences_elsewhere_says_so_in_a_subclass_too(family: str) -> None:
    with linrope_transformers.enable(family), pytest.raises(ValueError, match=MIXES[family]):
        subclassed(model(family))(tokens(1, 20), **SEQ_IDX)


@pytest.mark.skipif("qwen3_5" not in CONFIGURATIONS, reason="this transformers lacks Qwen3.5")
@torch.no_grad()
def test_positions_of_text_and_images_tell_packed_sequences() -> None:
    """Qwen3.5 takes the positions of three rotating axes, and before them those of the text."""
    ids, net = tokens(1, 20), model("qwen3_5")
    axes = torch.arange(20).expand(3, 1, -1)
    with linrope_transformers.enable("qwen3_5"):
        expected = separate(net, ids)
        for given in (
            {"position_ids": torch.cat((POSITIONS["position_ids"][None], axes))},
            SEQ_IDX | {"position_ids": axes},
        ):
            assert relative(net(ids, **given).logits, expected) < 2e-5
        assert relative(net(ids, position_ids=axes).logits, net(ids).logits) < 2e-6


def test_a_refused_function_does_not_mix_packed_sequences() -> None:
    net = packable("bamba")
    for layer in net.model.layers:
        if hasattr(layer, "mamba"):
            layer.mamba.activation = "gelu"
    with (
        linrope_transformers.enable("bamba"),
        pytest.raises(ValueError, match="activation 'gelu'; expected one seq"),
    ):
        net(tokens(1, 20), **SEQ_IDX)


@pytest.mark.parametrize(
    "family",
    ["qwen3_5", *(pytest.param(name, marks=pytest.mark.long) for name in ("mamba2", "kimi_linear"))],
)
@torch.no_grad()
def test_a_compiled_model_takes_positions_without_a_break_and_checks_them(family: str) -> None:
    ids, net = tokens(1, 20), recurrent_layer(family)
    with linrope_transformers.enable(family):
        torch._dynamo.reset()
        compiled = torch.compile(net, dynamic=False, fullgraph=True, backend="aot_eager")
        for mask in ({}, {"attention_mask": PADDED}):
            positions = {"position_ids": torch.arange(20)[None]} | mask
            expected = net(ids, use_cache=False, **positions).logits
            assert relative(compiled(ids, use_cache=False, **positions).logits, expected) < 2e-6
            with pytest.raises(RuntimeError, match="position_ids: got packed sequences in a compiled model"):
                compiled(ids, use_cache=False, **POSITIONS, **mask)


@pytest.mark.parametrize("family", [name for name in ("qwen3_5", "kimi_linear") if name in CONFIGURATIONS])
def test_fla_is_not_given_sequences_that_it_would_mix(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        refusals,
        "tensors",
        lambda x, package="": refusals.OtherKernels(package) if package == "fla" else None,
    )
    with (
        linrope_transformers.enable(family),
        pytest.raises(ValueError, match="ignores seq_idx; expected one seq"),
    ):
        packable(family)(tokens(1, 20), **SEQ_IDX)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("family", ["mamba2", "bamba", "qwen3_5", "kimi_linear"])
@torch.no_grad()
def test_packed_sequences_in_a_compiled_model(family: str) -> None:
    ids, net = tokens(1, 20), packable(family)
    with linrope_transformers.enable(family):
        expected = separate(net, ids)
        torch._dynamo.reset()
        compiled = torch.compile(net, dynamic=False, backend="eager")
        assert relative(compiled(ids, **SEQ_IDX).logits, expected) < 2e-6
        assert relative(compiled(ids, **SEQ_IDX, **POSITIONS).logits, expected) < 2e-6


@pytest.mark.parametrize("by", ["seq_idx", "cu_seqlens"])
def test_packed_scan_and_convolution(by: str) -> None:
    torch.manual_seed(0)
    n, h, p, g, s = 24, 4, 8, 2, 16
    x, dt = torch.randn(1, n, h, p), torch.randn(1, n, h)
    B, C = torch.randn(2, 1, n, g, s)
    A, D = -torch.rand(h), torch.rand(h)
    bounds = torch.tensor([0, 9, 10, n])
    packing = {by: numbers_of([9, 1, 14]) if by == "seq_idx" else bounds}

    def scan(part: slice, **options: Any) -> Tensor:
        tokens = (x[:, part], dt[:, part], A, B[:, part], C[:, part])
        return mamba2.mamba2_chunk_scan(*tokens, 8, D=D, dt_softplus=True, **options)

    spans = [slice(int(a), int(b)) for a, b in pairwise(bounds)]
    packed, parts = scan(slice(None), **packing), list(map(scan, spans))
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-4, atol=1e-5)
    weight, bias, channels = torch.randn(12, 4), torch.randn(12), torch.randn(1, 12, n)
    convolved = shared.causal_conv1d_fn(channels, weight, bias, "silu", **packing)
    parts = [shared.causal_conv1d_fn(channels[..., span], weight, bias, "silu") for span in spans]
    torch.testing.assert_close(convolved, torch.cat(parts, -1), rtol=1e-5, atol=1e-6)


def test_rows_of_a_packed_batch_stay_apart() -> None:
    numbers = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert shared.packed_bounds(numbers).tolist() == [0, 2, 3, 6]
