"""linrope's functions beside transformers' functions of the same names, each on its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope.backends import native
from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers import delta_rule, families, mamba2, minimax, shared
from tests.support.families import (
    TESTED,
    assert_as_exact,
    cache_of,
    exactly,
    model,
    modeling,
    relative,
    tokens,
)

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


def scan_inputs(n: int, *, seed: int = 0) -> dict[str, Tensor]:
    """The arguments of one scan: b = 2, 4 heads of 8 values in 2 groups of 6 features."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    return {
        "hidden_states": normal(2, n, 4, 8), "dt": normal(2, n, 4) - 1, "A": -torch.tensor([0.01, 0.1, 1, 10]),
        "B": normal(2, n, 2, 6), "C": normal(2, n, 2, 6),
    }  # fmt: skip


def test_the_owner_of_the_initial_states_may_overwrite_them_before_the_backward_pass() -> None:
    weights = torch.randn(2, 9, 4, 8)

    def gradients(learned_states: bool, overwrite: bool) -> list[Tensor]:
        inputs = {name: x.requires_grad_() for name, x in scan_inputs(9).items()}
        start = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(1)).requires_grad_(
            learned_states
        )
        states = start.clone()
        y, last = mamba2.mamba2_chunk_scan(
            **inputs, chunk_size=4, initial_states=states, return_final_states=True, dt_softplus=True
        )
        if overwrite:
            states.copy_(last.detach())
        (y * weights).sum().backward()
        return [x.grad for x in (*inputs.values(), start) if x.grad is not None]

    for learned in (True, False):
        for got, expected in zip(gradients(learned, True), gradients(learned, False), strict=True):
            assert torch.equal(got, expected)


def test_the_owner_of_minimax_sums_may_overwrite_them_before_the_backward_pass() -> None:
    attention: Any = next(
        x for x in model("minimax").modules() if type(x).__name__ == "MiniMaxLightningAttention"
    )
    x = torch.randn(2, 9, 48)
    start = torch.randn(2, 4, 12, 12)

    def gradients(overwrite: bool) -> list[Tensor]:
        attention.zero_grad()
        cache, sums = modeling("minimax").MiniMaxCache(), start.clone()
        cache.set_linear_cache(attention.layer_idx, sums)
        y, _ = minimax.forward(attention, x, None, None, cache)  # type: ignore[arg-type]
        if overwrite:
            sums.zero_()
        y.square().sum().backward()
        return [x.grad.clone() for x in attention.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_initial_states_are_copied_only_for_gradients() -> None:
    sums = torch.zeros(1, 2, 3, 4)
    assert shared.state_before(sums, torch.float32, False).kv.data_ptr() == sums.data_ptr()
    assert shared.state_before(sums, torch.float32, True).kv.data_ptr() != sums.data_ptr()


OLD_FALCON = "its own Falcon-H1 with a cache raises"


def gradients_of(net: Any) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None}


def at_once(net: Any, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The gradients of the last tokens' logits."""
    net.zero_grad()
    (net(ids, use_cache=False).logits[:, -weights.shape[1] :] * weights).sum().backward()
    return gradients_of(net)


def in_two_pieces(net: Any, ids: Tensor, weights: Tensor, *, learn_first: bool) -> dict[str, Tensor]:
    """The gradients of 20 tokens that follow 20 others on a cache, which two more calls overwrite."""
    net.zero_grad()
    with torch.set_grad_enabled(learn_first):
        start = net(ids[:, :20], use_cache=True)
    positions = {
        "position_ids": torch.arange(20, 40).expand(2, -1)
    }  # Bamba and MiniMax count from 0 otherwise
    result = net(ids[:, 20:], use_cache=True, **positions, **cache_of(start))
    with torch.no_grad():
        for part in (ids[:, :1], ids[:, :3]):
            net(part, use_cache=True, **cache_of(result))
    (result.logits * weights).sum().backward()
    return gradients_of(net)


@pytest.mark.parametrize("family", TESTED)
def test_gradients_behind_a_cache(family: str, falcon_h1_has_a_cache: bool) -> None:
    """As exact as one call over all tokens; and as transformers', if the tokens in the cache have no gradients.

    The delta rules of transformers have none then, because they overwrite what their backward pass reads.
    """
    if family == "falcon_h1" and not falcon_h1_has_a_cache:
        pytest.skip(OLD_FALCON)
    # In pieces, MiniMax's own softmax layers do not see the keys in the cache
    options = {"layer_types": ["linear_attention"] * 3} if family == "minimax" else {}
    net: Any = model(family, **options)
    ids, weights = tokens(2, 40), torch.randn(2, 20, 97, generator=torch.Generator().manual_seed(0))
    with linrope_transformers.enable(family):
        got = in_two_pieces(net, ids, weights, learn_first=True)
        behind = in_two_pieces(net, ids, weights, learn_first=False)
    exact = exactly(family, net, lambda wide: at_once(wide, ids, weights))
    assert_as_exact(got, at_once(net, ids, weights), exact)
    if family in (*families.MAMBA2, "minimax"):
        for name, expected in in_two_pieces(net, ids, weights, learn_first=False).items():
            assert not expected.any() or relative(behind[name], expected) < 2e-5, name


@pytest.mark.parametrize("family", TESTED)
def test_gradients_of_single_tokens_on_a_cache(family: str, falcon_h1_has_a_cache: bool) -> None:
    """Each step overwrites the cache that the step before it has read."""
    if family == "falcon_h1" and not falcon_h1_has_a_cache:
        pytest.skip(OLD_FALCON)
    net: Any = model(family)
    ids, weights = tokens(2, 12), torch.randn(2, 12, 97, generator=torch.Generator().manual_seed(0))
    with linrope_transformers.enable(family):
        results = [net(ids[:, :9], use_cache=True)]
        for i in range(9, 12):
            place = {"position_ids": torch.tensor([[i], [i]])}
            results.append(net(ids[:, i : i + 1], use_cache=True, **place, **cache_of(results[-1])))
        (torch.cat([x.logits for x in results], 1) * weights).sum().backward()
        got = gradients_of(net)
    exact = exactly(family, net, lambda wide: at_once(wide, ids, weights))
    assert_as_exact(got, at_once(net, ids, weights), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "columns", "activation"),
    [(1, 2, "silu"), (1, 4, "silu"), (5, 2, "silu"), (5, 3, None), (2, 6, "silu")],
)
def test_an_update_of_the_convolution(
    n: int, columns: int, activation: str | None, dtype: torch.dtype
) -> None:
    """As transformers' own function, which returns fewer outputs than tokens if the state has too few columns."""
    theirs = modeling("mamba2").causal_conv1d_update
    made = torch.Generator().manual_seed(0)
    shapes = ((2, 40, n), (2, 40, columns), (40, 4), (40,))
    x, state, weight, bias = (torch.randn(*shape, generator=made).to(dtype) for shape in shapes)
    if n + columns < len(weight[0]):
        with (
            linrope_transformers.enable("mamba2"),
            pytest.raises(RuntimeError, match="Kernel size can't be greater"),
        ):
            modeling("mamba2").causal_conv1d_update(x, state, weight, bias, activation)
        return
    exact_state = state.double()
    exact = theirs(x.double(), exact_state, weight.double(), bias.double(), activation)

    def error(function: Any) -> float:
        written = state.clone()
        y = function(x, written, weight, bias, activation)
        assert (y.dtype, y.shape) == (dtype, exact.shape)
        assert torch.equal(written.double(), exact_state)
        return float((y.double() - exact).square().mean().sqrt())

    with linrope_transformers.enable("mamba2"):
        ours = error(modeling("mamba2").causal_conv1d_update)
    assert ours <= 1.01 * error(theirs) + 1e-7


def test_an_update_has_the_gradients_of_the_convolution() -> None:
    made = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=made).requires_grad_() for shape in ((2, 6, 9), (6, 4), (6,))
    )
    weights = torch.randn(2, 6, 9, generator=made)
    state = torch.zeros(2, 6, 4)
    parts = [
        shared.causal_conv1d_update(part, state, weight, bias, "silu") for part in x.split([1, 1, 4, 3], -1)
    ]
    got = torch.autograd.grad((torch.cat(parts, -1) * weights).sum(), [x, weight, bias])
    whole = shared.causal_conv1d_fn(x, weight, bias, "silu")
    for a, b in zip(got, torch.autograd.grad((whole * weights).sum(), [x, weight, bias]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


LONG = 70_000  # mamba_ssm is known to go wrong silently beyond some 61,000


def assert_pieces_equal_the_whole(call: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """call(part, state) returns the outputs of the tokens in part, and the state after them."""
    y, last = call(slice(None), None)
    outs, state = [], None
    for start in range(0, LONG, 9_999):
        out, state = call(slice(start, start + 9_999), state)
        outs.append(out)
    assert relative(y, torch.cat(outs, 1)) < 2e-6
    assert state is not None
    assert relative(last, state) < 2e-6
    assert y[:, -1_000:].abs().max() > 0.1


@torch.no_grad()
def test_a_scan_of_70_000_tokens_equals_its_pieces() -> None:
    inputs = {name: x[:1] if x.ndim > 1 else x for name, x in scan_inputs(LONG).items()}
    A, by_token = inputs.pop("A"), inputs

    def call(part: slice, state: Tensor | None) -> Any:
        chosen = {name: x[:, part] for name, x in by_token.items()}
        return mamba2.mamba2_chunk_scan(
            A=A, chunk_size=64, initial_states=state, return_final_states=True, dt_softplus=True, **chosen
        )

    assert_pieces_equal_the_whole(call)


@pytest.mark.long
@torch.no_grad()
def test_lightning_attention_over_70_000_tokens_equals_its_pieces() -> None:
    attention: Any = next(
        x for x in model("minimax").modules() if type(x).__name__ == "MiniMaxLightningAttention"
    )
    hidden = torch.randn(1, LONG, 48, generator=torch.Generator().manual_seed(0))

    def call(part: slice, state: Tensor | None) -> Any:
        cache = modeling("minimax").MiniMaxCache()
        if state is not None:
            cache.set_linear_cache(attention.layer_idx, state)
        return minimax.forward(attention, hidden[:, part], None, None, cache)  # type: ignore[arg-type]

    assert_pieces_equal_the_whole(call)


def delta_rule_inputs(n: int, *, per_feature: bool) -> dict[str, Tensor]:
    """The arguments of one delta rule: 2 heads of 8 features; as many of 12 values with a decay per feature, else 4."""
    made = torch.Generator().manual_seed(0)
    heads = 2 if per_feature else 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, n, *shape, generator=made)

    rates = torch.logspace(-4, 0, heads)
    g = -(rates[:, None] * normal(heads, 8).exp() if per_feature else rates * normal(heads).exp())
    return {
        "query": normal(2, 8), "key": normal(2, 8), "value": normal(heads, 12), "g": g,
        "beta": normal(heads).sigmoid(),
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@torch.no_grad()
def test_a_delta_rule_over_70_000_tokens_equals_its_pieces_and_transformers(family: str) -> None:
    inputs = delta_rule_inputs(LONG, per_feature=family == "kimi_linear")

    def call(part: slice, state: Tensor | None) -> Any:
        chosen = {name: x[:, part] for name, x in inputs.items()}
        return delta_rule.chunk(
            **chosen, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    assert_pieces_equal_the_whole(call)
    chunk = next(name for name in families.FUNCTIONS[family] if "chunk" in name)
    theirs = getattr(modeling(family), chunk)
    expected = theirs(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for got, x in zip(call(slice(None), None), expected, strict=True):
        assert relative(got, x) < 2e-5
