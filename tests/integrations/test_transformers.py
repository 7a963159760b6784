"""transformers' models with linrope's functions beside the same models without."""

import copy
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from benchmarks.bench import families
from linrope import backends
from linrope.backends import native
from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers import families as replaced
from linrope.integrations.transformers import shared
from linrope.operation.plan import forget_plans
from tests.support.families import (
    CACHE,
    CONFIGURATIONS,
    TESTED,
    assert_as_exact,
    both,
    cache_of,
    exactly,
    model,
    recurrent_layer,
    relative,
    tokens,
)

IN_PLACE = [name for name in TESTED if name != "minimax"]
NEW = Version(transformers.__version__) >= Version("5.23")
OLD = pytest.mark.skipif(not NEW, reason="its own Falcon-H1 with a cache raises")
every_family_with_a_cache = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=OLD) if name == "falcon_h1" else name for name in TESTED]
)
pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


def train_once(net: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    net.zero_grad()
    result = net(ids, labels=ids, use_cache=False)
    result.loss.backward()
    grads = {name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None}
    return result.logits.detach(), grads


def assert_trains_alike(family: str, net: nn.Module, ids: Tensor, of_decays: float = 1e-4) -> None:
    (got, got_gradients), (logits, gradients) = both(family, lambda: train_once(net, ids))
    assert relative(got, logits) < 2e-5
    for name, x in gradients.items():
        bound = of_decays if name.endswith(("A_log", "dt_bias")) else 1e-4
        assert relative(got_gradients[name], x) < bound or not (x.any() or got_gradients[name].any()), name
    assert_as_exact(got_gradients, gradients, exactly(family, net, lambda wide: train_once(wide, ids))[1])


@pytest.fixture
def triton_for_auto(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None) -> Iterator[None]:
    """The recurrence runs in the Triton kernels, as on a GPU."""
    monkeypatch.setitem(backends._AUTO, "cpu", backends._AUTO["cuda"])
    forget_plans()
    yield
    forget_plans()


@pytest.mark.usefixtures("triton_for_auto")
@pytest.mark.parametrize("family", [x for x in ("qwen3_5", "kimi_linear") if x in CONFIGURATIONS])
def test_the_gpu_s_kernels_train_and_generate(family: str) -> None:
    net, ids = model(family), tokens(2, 20)
    assert_trains_alike(family, net, ids)
    ours, theirs = both(family, lambda: net.generate(ids, max_new_tokens=3, do_sample=False))  # type: ignore[operator]
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", TESTED)
def test_logits_and_gradients(family: str, training: bool) -> None:
    assert_trains_alike(family, model(family).train(training), tokens(2, 50))


@pytest.mark.long
@pytest.mark.parametrize("decays", ["as made", "as Mamba-2 starts"])
@pytest.mark.parametrize("family", CONFIGURATIONS)
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
    # As made, transformers' own gradients of A_log are up to 1.7e-4 from float64, linrope's 1.1e-5 (in four families).
    of_decays = 3e-4 if decays == "as made" else 1e-4
    assert_trains_alike(family, benchmark.model, benchmark.tokens(1, 300), of_decays)


@every_family_with_a_cache
def test_generation_greedy_with_beams_and_with_left_padding(family: str) -> None:
    net, prompt = model(family), tokens(2, 21)
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    options = [{}, {"num_beams": 3}, {"attention_mask": mask}]

    def generate() -> list[Tensor]:
        return [net.generate(prompt, max_new_tokens=6, do_sample=False, **x) for x in options]  # type: ignore[operator]

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


@every_family_with_a_cache
@torch.no_grad()
def test_a_cache_is_continued_with_and_without_linrope(family: str) -> None:
    net, ids = model(family), tokens(2, 20)

    def switching(with_linrope: list[bool]) -> Tensor:
        """The logits of a prompt of 16 and four single tokens."""
        cache: dict[str, Any] = {}
        parts = []
        for part, on in zip((ids[:, :16], *ids[:, 16:].split(1, 1)), with_linrope, strict=True):
            (linrope_transformers.enable if on else linrope_transformers.disable)(family)
            result = net(part, use_cache=True, **cache)
            cache = cache_of(result)
            parts.append(result.logits)
        return torch.cat(parts, 1)

    expected = switching([False] * 5)
    assert relative(switching([True, True, False, False, True]), expected) < 2e-5
    assert relative(switching([False, False, True, True, False]), expected) < 2e-5


@pytest.mark.parametrize("family", IN_PLACE)
def test_a_step_writes_the_cache_in_place_in_either_order(family: str) -> None:
    net, ids = model(family), tokens(2, 12)
    with torch.no_grad(), linrope_transformers.enable(family):
        cache = cache_of(net(ids[:, :10], use_cache=True))
        (states,) = cache.values()
        kind = "conv_states" if family in replaced.CONVOLUTION else "recurrent_states"
        layers = [x for x in states.layers if getattr(x, kind, {}).get(0) is not None]
        for reordered in (False, True):
            if reordered:  # as beams do: the result is contiguous
                states.reorder_cache(torch.tensor([1, 0]))
            memory = getattr(layers[0], kind)[0]
            if family in replaced.MAMBA2:
                assert (memory.is_contiguous(), memory.mT.is_contiguous()) == (reordered, not reordered)
            before = memory.clone()
            net(ids[:, 10:11], use_cache=True, **cache)
            assert getattr(layers[0], kind)[0] is memory
            assert not torch.equal(memory, before)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5", "kimi_linear"])
@torch.no_grad()
def test_a_cache_may_be_copied_reset_and_freed_between_steps(family: str) -> None:
    net, ids = model(family), tokens(2, 30)

    name = CACHE[family]

    def read(first: int, last: int, cache: Any = None) -> Any:
        return net(ids[:, first:last], use_cache=True, **{name: cache})

    expected = read(13, 14, read(0, 13)[name]).logits
    with linrope_transformers.enable(family):
        cache = read(0, 10)[name]
        for i in (10, 11):
            read(i, i + 1, cache)
        other = copy.deepcopy(cache)
        for i in range(12, 20):  # must not show in the copy
            read(i, i + 1, cache)
        read(12, 13, other)
        assert relative(read(13, 14, other).logits, expected) < 2e-5
        if family == "mamba2" or NEW:  # older softmax layers keep their keys in a reset
            cache.reset()
            read(0, 13, cache)
            assert relative(read(13, 14, cache).logits, expected) < 2e-5
        entries = len(shared._last_states)
        del cache, other
        assert len(shared._last_states) < entries


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
    assert cache_of(step)[CACHE["minimax"]].get_linear_cache(0).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "compiler"),
    [
        ("mamba2", "aot_eager"),  # the graphs of the default compiler, without the time that it takes
        pytest.param("qwen3_5", "aot_eager", marks=pytest.mark.long),
        pytest.param("kimi_linear", "aot_eager", marks=pytest.mark.long),
        pytest.param("mamba2", "inductor", marks=pytest.mark.long),
        pytest.param("minimax", "inductor", marks=pytest.mark.long),
        pytest.param("qwen3_5", "inductor", marks=pytest.mark.long),
        pytest.param("kimi_linear", "inductor", marks=pytest.mark.long),
    ],
)
def test_compile(family: str, compiler: str) -> None:
    net = (
        recurrent_layer(family) if family == "mamba2" else model(family)
    )  # the others' caches need softmax layers
    ids = tokens(2, 20)

    def prompt_and_step(net: Any) -> list[Tensor]:
        result = net(ids[:, :19], use_cache=True)
        return [result.logits, net(ids[:, 19:], use_cache=True, **cache_of(result)).logits]

    with torch.no_grad():
        expected = prompt_and_step(net)
        torch._dynamo.reset()
        with linrope_transformers.enable(family):
            got = prompt_and_step(torch.compile(net, dynamic=False, backend=compiler))
    assert all(relative(*pair) < 2e-5 for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "family", ["mamba2", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_5", "minimax"))]
)
@torch.no_grad()
def test_a_compiled_model_is_compiled_again_after_enable(family: str) -> None:
    net, ids = recurrent_layer(family), tokens(2, 20)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(net, dynamic=False, backend=keep)
    expected = compiled(ids, use_cache=False).logits
    assert "linrope" not in str([x.code for x in graphs])
    with linrope_transformers.enable(family):
        assert relative(compiled(ids, use_cache=False).logits, expected) < 2e-5
    assert "linrope" in str([x.code for x in graphs])


@torch.no_grad()
def test_time_steps_are_limited_in_the_scan_alone_as_in_transformers() -> None:
    net, ids = model("mamba2", time_step_limit=(0.01, 0.2)), tokens(2, 40)
    got, expected = both("mamba2", lambda: in_pieces(net, ids))
    assert relative(got, expected) < 2e-5
    assert relative(in_pieces(model("mamba2"), ids), expected) > 1e-3


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5"])
@torch.no_grad()
def test_float64_is_computed_in_float64(family: str) -> None:
    net, ids = model(family, torch.float64), tokens(2, 30)
    runs = both(family, lambda: (net(ids).logits, net(ids.flip(0)).logits.flip(0)))
    assert relative(runs[0][0], runs[1][0]) < 1e-5  # transformers' scan is in float32
    assert relative(*runs[0]) < 1e-13


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5", "kimi_linear"])
def test_gradient_checkpointing_ends_inside_the_with_block(family: str) -> None:
    """It repeats the forward pass, with the functions that are in place then; PyTorch notices other tensors."""
    net: Any = model(family).train()
    ids = tokens(2, 20)

    def loss() -> Tensor:
        value: Tensor = net(ids, labels=ids, use_cache=False).loss
        return value

    def gradients() -> list[Tensor]:
        return [x.grad.clone() for x in net.parameters() if x.grad is not None]

    with linrope_transformers.enable(family):
        loss().backward()
        expected = gradients()
        net.zero_grad()
        # transformers 5.23 renamed it
        checkpoint = (
            getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
        )
        checkpoint({"use_reentrant": False})
        loss().backward()
        assert all(map(torch.equal, gradients(), expected))
        late = loss()
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="have different metadata"):
        late.backward()


NO_OUT_PROJ = ("mamba2", "falcon_h1", "nemotron_h")  # PEFT rejects these families' out_proj


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft asks for it
@pytest.mark.parametrize(
    "family", [x for x in (*NO_OUT_PROJ, "granitemoehybrid", "kimi_linear", "qwen3_5") if x in TESTED]
)
def test_lora(family: str) -> None:
    left_out = ["out_proj"] if family in NO_OUT_PROJ else None
    config = peft.LoraConfig(target_modules="all-linear", exclude_modules=left_out)
    net = peft.get_peft_model(model(family), config)
    for name, x in net.named_parameters():
        if "lora_B" in name:  # they start from zeros, and gradients of lora_A with them
            torch.nn.init.normal_(x, std=0.1)
    ids = tokens(2, 30)
    (got, got_gradients), (logits, gradients) = both(family, lambda: train_once(net, ids))
    assert relative(got, logits) < 2e-5
    assert got_gradients.keys() == gradients.keys()
    for name, x in gradients.items():
        assert relative(got_gradients[name], x) < 1e-4, name
