"""transformers' models with linrope's functions beside the same models without."""

import copy
import importlib
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from linrope.backends import native
from linrope.cli.bench import families
from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers import families as replaced
from linrope.integrations.transformers import mamba2
from tests.integrations.families import CONFIGURATIONS, model, tokens

MAMBA2 = replaced.MAMBA2
every_family = pytest.mark.parametrize("family", CONFIGURATIONS)
OLD = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="its own Falcon-H1 with a cache raises"
)
every_family_with_a_cache = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=OLD) if name == "falcon_h1" else name for name in CONFIGURATIONS]
)
pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    transformers.logging.set_verbosity_error()  # its fallback says that it is slow
    yield
    linrope_transformers.disable()
    replaced._say_once.cache_clear()


def modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def train_once(net: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    net.zero_grad()
    result = net(ids, labels=ids, use_cache=False)
    result.loss.backward()
    grads = {name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None}
    return result.logits.detach(), grads


def both(family: str, run: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of run with linrope's functions and with transformers' own."""
    expected = run()
    with linrope_transformers.enable(family):
        return run(), expected


def assert_trains_alike(family: str, net: nn.Module, ids: Tensor) -> None:
    (got, got_gradients), (logits, gradients) = both(family, lambda: train_once(net, ids))
    assert relative(got, logits) < 2e-5
    assert got_gradients.keys() == gradients.keys()
    for name, x in gradients.items():
        assert relative(got_gradients[name], x) < 1e-4 or not (x.any() or got_gradients[name].any()), name


def cache_of(result: Any) -> dict[str, Any]:
    """The cache that a model returned, as the argument of its next call."""
    name = "cache_params" if "cache_params" in result else "past_key_values"
    return {name: result[name]}


@every_family
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_logits_and_gradients(family: str, training: bool) -> None:
    assert_trains_alike(family, model(family).train(training), tokens(2, 50))


@pytest.mark.long
@pytest.mark.parametrize("decays", ["as made", "as Mamba-2 starts"])
@pytest.mark.parametrize("family", families.CONFIGURATIONS)
def test_logits_and_gradients_at_a_realistic_width(family: str, decays: str) -> None:
    """Models 1,024 wide, as ``linrope bench --transformers`` makes them.

    Several families start from step sizes of about 1, at which most heads forget within one token.
    """
    benchmark = families.FamilyBenchmark(family)
    with torch.no_grad():
        for name, x in benchmark.model.named_parameters():
            if decays == "as made":
                break
            if name.endswith("A_log"):
                x.copy_(torch.linspace(1, 16, len(x)).log())
            elif name.endswith("dt_bias"):
                x.copy_(torch.logspace(-3, -1, len(x)).expm1().log())
    assert_trains_alike(family, benchmark.model, benchmark.tokens(1, 300))


@every_family_with_a_cache
def test_generation_greedy_with_beams_and_with_left_padding(family: str) -> None:
    net, prompt = model(family), tokens(2, 21)
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    options = [{}, {"num_beams": 3}, {"attention_mask": mask}]

    def generate() -> list[Tensor]:
        return [net.generate(prompt, max_new_tokens=12, do_sample=False, **x) for x in options]  # type: ignore[operator]

    assert all(map(torch.equal, *both(family, generate)))


def in_pieces(net: nn.Module, ids: Tensor) -> Tensor:
    """The logits of a prompt of 17, single tokens, 11 tokens on the cache, and single tokens."""
    result = net(ids[:, :17], use_cache=True)
    parts = [result.logits]
    for part in (*ids[:, 17:20].split(1, 1), ids[:, 20:31], *ids[:, 31:].split(1, 1)):
        result = net(part, use_cache=True, **cache_of(result))
        parts.append(result.logits)
    return torch.cat(parts, 1)


@every_family_with_a_cache
@torch.no_grad()
def test_pieces_and_steps_on_a_cache(family: str) -> None:
    """Beside transformers in the same pieces, because some of its own models differ in pieces."""
    net, ids = model(family), tokens(2, 40)
    assert relative(*both(family, lambda: in_pieces(net, ids))) < 2e-5


@pytest.mark.parametrize("family", MAMBA2)
def test_a_step_writes_the_cache_in_place_in_either_order(family: str) -> None:
    net, ids = model(family), tokens(2, 12)
    with torch.no_grad(), linrope_transformers.enable(family):
        cache = cache_of(net(ids[:, :10], use_cache=True))
        (states,) = cache.values()
        recurrent = (getattr(x, "recurrent_states", {}) for x in states.layers)
        index = next(i for i, x in enumerate(recurrent) if x.get(0) is not None)
        for reordered in (False, True):
            if reordered:  # as beams do: the result is contiguous
                states.reorder_cache(torch.tensor([1, 0]))
            memory = states.layers[index].recurrent_states[0]
            assert (memory.is_contiguous(), memory.mT.is_contiguous()) == (reordered, not reordered)
            before = memory.clone()
            net(ids[:, 10:11], use_cache=True, **cache)
            assert states.layers[index].recurrent_states[0] is memory
            assert not torch.equal(memory, before)


@torch.no_grad()
def test_a_cache_may_be_copied_reset_and_freed_between_steps() -> None:
    net, ids = model("mamba2"), tokens(2, 30)

    def read(first: int, last: int, cache: Any = None) -> Any:
        return net(ids[:, first:last], cache_params=cache, use_cache=True)

    expected = read(13, 14, read(0, 13).cache_params).logits
    with linrope_transformers.enable("mamba2"):
        cache = read(0, 10).cache_params
        for i in (10, 11):
            read(i, i + 1, cache)
        other = copy.deepcopy(cache)
        for i in range(12, 20):  # must not show in the copy
            read(i, i + 1, cache)
        read(12, 13, other)
        assert relative(read(13, 14, other).logits, expected) < 2e-5
        cache.reset()
        read(0, 13, cache)
        assert relative(read(13, 14, cache).logits, expected) < 2e-5
        entries = len(mamba2._last_states)
        del cache, other
        assert len(mamba2._last_states) < entries


@pytest.mark.parametrize("family", MAMBA2)
def test_packed_training_equals_separate_sequences(family: str) -> None:
    lengths, ids = [11, 1, 20], tokens(1, 32)
    # Granite's softmax attention does not keep packed sequences apart, so it is left out.
    options = {"layer_types": ["mamba", "mamba"]} if family == "granitemoehybrid" else {}
    net: Any = model(family, **options).train().base_model
    with torch.no_grad():
        pieces = [net(x, use_cache=False).last_hidden_state for x in ids.split(lengths, 1)]
    packing = {"seq_idx": numbers_of(lengths).int()}
    if family != "mamba2":  # the softmax attention of the hybrid models finds the sequences in the positions
        packing["position_ids"] = torch.cat([torch.arange(x) for x in lengths])[None]
    with linrope_transformers.enable(family):
        result = net(ids, use_cache=False, **packing).last_hidden_state
        result.square().sum().backward()
    assert relative(result.detach(), torch.cat(pieces, 1)) < 2e-5


def numbers_of(lengths: list[int]) -> Tensor:
    """(1, n): the packed sequence of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


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
    convolved = mamba2.causal_conv1d_fn(channels, weight, bias, "silu", **packing)
    parts = [mamba2.causal_conv1d_fn(channels[..., span], weight, bias, "silu") for span in spans]
    torch.testing.assert_close(convolved, torch.cat(parts, -1), rtol=1e-5, atol=1e-6)


def test_rows_of_a_packed_batch_stay_apart() -> None:
    numbers = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert mamba2.packed_bounds(numbers).tolist() == [0, 2, 3, 6]  # type: ignore[union-attr]


@every_family_with_a_cache
@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers_is(family: str) -> None:
    ids, net = tokens(2, 40), model(family, torch.bfloat16)

    def rms(x: Tensor) -> float:
        return float(x.float().square().mean().sqrt())

    exact = in_pieces(copy.deepcopy(net).float(), ids)
    got, expected = both(family, lambda: in_pieces(net, ids))
    assert got.dtype == expected.dtype
    assert rms(got - exact) < 1.5 * rms(expected - exact)


@torch.no_grad()
def test_minimax_keeps_its_sums_in_float32() -> None:
    net, ids = model("minimax", torch.bfloat16), tokens(1, 5)
    start = net(ids, use_cache=True)  # transformers' own sums are in bfloat16
    with linrope_transformers.enable("minimax"):
        step = net(ids[:, :1], use_cache=True, **cache_of(start))
    assert step.past_key_values.get_linear_cache(0).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "compiler"),
    [
        ("mamba2", "aot_eager"),  # the graphs of the default compiler, without the time that it takes
        pytest.param("mamba2", "inductor", marks=pytest.mark.long),
        pytest.param("minimax", "inductor", marks=pytest.mark.long),
    ],
)
def test_compile(family: str, compiler: str) -> None:
    net, ids = model(family), tokens(2, 20)

    def prompt_and_step(net: Any) -> list[Tensor]:
        result = net(ids[:, :19], use_cache=True)
        return [result.logits, net(ids[:, 19:], use_cache=True, **cache_of(result)).logits]

    with torch.no_grad():
        expected = prompt_and_step(net)
        torch._dynamo.reset()
        with linrope_transformers.enable(family):
            got = prompt_and_step(torch.compile(net, dynamic=False, backend=compiler))
    assert all(relative(*pair) < 2e-5 for pair in zip(got, expected, strict=True))


@torch.no_grad()
def test_time_steps_are_limited_in_the_scan_alone_as_in_transformers() -> None:
    net, ids = model("mamba2", time_step_limit=(0.01, 0.2)), tokens(2, 40)
    got, expected = both("mamba2", lambda: in_pieces(net, ids))
    assert relative(got, expected) < 2e-5
    assert relative(in_pieces(model("mamba2"), ids), expected) > 1e-3


@torch.no_grad()
def test_float64_is_computed_in_float64() -> None:
    net, ids = model("mamba2", torch.float64), tokens(2, 30)
    runs = both("mamba2", lambda: (net(ids).logits, net(ids.flip(0)).logits.flip(0)))
    assert relative(runs[0][0], runs[1][0]) < 1e-5  # transformers' scan is in float32
    assert relative(*runs[0]) < 1e-13


def test_what_linrope_refuses_runs_as_before_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    module = modeling("mamba2")
    original = module.causal_conv1d_fn
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    with caplog.at_level(logging.WARNING), linrope_transformers.enable("mamba2"):
        for _ in range(2):
            got = module.causal_conv1d_fn(x, weight, None, activation="gelu")
    assert torch.equal(got, original(x, weight, None, activation="gelu"))
    messages = [x.message for x in caplog.records if x.name.startswith("linrope")]
    reason = "causal_conv1d_fn runs transformers' own code: activation 'gelu'"
    assert messages == [f"{module.__name__}: {reason}"]


def test_meta_tensors_and_heads_that_are_too_wide_are_refused() -> None:
    x = torch.zeros(1, 5, 2, 300)
    B = torch.zeros(1, 5, 1, 16)
    assert replaced._refuses_scan(x, x, x, B) == "heads of 300, more than 256"
    assert replaced._refuses_scan(x.to("meta")[..., :8], x, x, B) == "tensors on meta"
    per_channel = [torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.zeros(2, 8, 16), B[:, 0], B[:, 0]]
    reason = replaced._refuses_step(torch.zeros(1, 2, 8, 16), *per_channel)
    assert reason == "step sizes or decays that differ between the channels of a head"


# By argument: the shape of the tensor, and the shape to which transformers expands it
STEP = {
    "state": ((1, 2, 8, 16),) * 2, "hidden_states": ((1, 2, 8),) * 2, "dt": ((1, 2, 1), (1, 2, 8)),
    "A": ((2, 1, 1), (2, 8, 16)), "B": ((1, 1, 16),) * 2, "C": ((1, 1, 16),) * 2, "dt_bias": ((2, 1), (2, 8)),
}  # fmt: skip


@pytest.mark.parametrize("learned", STEP)
def test_a_step_with_gradients_is_refused(learned: str) -> None:
    step = {x: torch.zeros(a, requires_grad=x == learned).expand(b) for x, (a, b) in STEP.items()}
    assert replaced._refuses_step(**step) == "gradients through a step that overwrites its state"
    with torch.no_grad():
        assert replaced._refuses_step(**step) is None


def test_enable_and_disable() -> None:
    modules = {x: modeling(x) for x in ("mamba2", "bamba")}
    originals = {name: module.mamba2_chunk_scan for name, module in modules.items()}

    def enabled() -> list[str]:
        return [name for name, module in modules.items() if module.mamba2_chunk_scan is not originals[name]]

    with linrope_transformers.enable("mamba2") as outer:
        assert enabled() == ["mamba2"]
        assert outer.families == ("mamba2",)
        with linrope_transformers.enable("mamba2", "bamba") as inner:
            assert inner.families == ("bamba",)
            assert enabled() == ["mamba2", "bamba"]
        assert enabled() == ["mamba2"]
    assert enabled() == []
    assert set(linrope_transformers.enable().families) == set(linrope_transformers.FAMILIES)
    linrope_transformers.disable("bamba")
    assert enabled() == ["mamba2"]
    linrope_transformers.disable()
    assert enabled() == []
    assert not replaced._replaced
    for function in (linrope_transformers.enable, linrope_transformers.disable):
        with pytest.raises(ValueError, match=r"families='mamba': expected one of .* did you mean"):
            function("mamba")


def test_a_changed_signature_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = modeling("zamba2")
    monkeypatch.setattr(module, "mamba2_chunk_scan", lambda hidden_states, dt, extra: None)
    message = r"zamba2.*mamba2_chunk_scan has the parameters hidden_states, dt, extra"
    with pytest.raises(RuntimeError, match=message):
        linrope_transformers.enable("mamba2", "zamba2")
    assert not replaced._replaced
    monkeypatch.delattr(module, "mamba2_chunk_scan")
    with pytest.raises(RuntimeError, match="zamba2 has no mamba2_chunk_scan"):
        linrope_transformers.enable("zamba2")
