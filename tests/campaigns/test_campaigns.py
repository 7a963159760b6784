"""The campaigns, for a few seconds each; README.md says how they run at length."""

import sys
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from linrope import Rotary, linear_rope_attention
from linrope.backends import native
from linrope.models import LanguageModelConfig
from tests.campaigns import (
    concurrency,
    configurations,
    decoding,
    draw,
    fuzz,
    kills,
    leaks,
    serving,
    streaming,
)
from tests.campaigns.processes import finish, start
from tests.support.oracle import DATA

needs_fork = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and reads /proc")


def in_a_new_process(campaign: Callable[..., Any], *arguments: Any) -> Any:
    """What the campaign returns. Other tests may have started threads of autograd, which do not survive its forks."""
    with get_context("spawn").Pool(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.apply_async(campaign, arguments).get(timeout=300)


@needs_fork
def test_what_is_fuzzed_ends_in_an_error_that_is_promised() -> None:
    done, failed = in_a_new_process(fuzz.run, 6, 0)
    assert failed == []
    assert done.total() == 6


@needs_fork
@pytest.mark.long
def test_a_run_killed_at_random_instants_ends_with_its_bits() -> None:
    assert in_a_new_process(kills.run, 30, 0)[0] == 30


def test_calls_are_drawn_with_every_input() -> None:
    drawn = [draw.Configuration(0, i, ["float32"], 20).data for i in range(30)]
    assert set().union(*drawn) == set(DATA)


def test_streams_do_not_drift() -> None:
    streaming.run(6, 2 * 10**4)


def test_steps_in_place_are_equal_to_copied_ones() -> None:
    assert decoding.run(60, 0, length=15) == 60


EVENTS = "answered", "cancelled", "queue full", "prefix hits"


def test_requests_get_from_an_engine_what_the_model_gives_each_alone() -> None:
    """Turn 1 is on one thread; in turn 9 clients on four send to a hybrid."""
    counts = serving.Turn(1, 1, 30).run() + serving.Turn(1, 9, 12).run()
    assert min(counts[x] for x in EVENTS) > 0


@needs_fork  # it reads /proc
@pytest.mark.long
def test_requests_of_minutes_get_what_the_model_gives_each_alone() -> None:
    counts = in_a_new_process(serving.run, 180, 0)
    assert min(counts[x] for x in EVENTS) > 0


@needs_fork
def test_memory_stays_as_it_is() -> None:
    leaks.run(300, 10)


def test_threads_give_the_bits_of_one() -> None:
    concurrency.run(5, spawns=False)


def keys_alone(queries: int) -> int:
    """Keys with positions of their own, more of them than there are queries."""
    q, (k, v) = torch.randn(1, queries, 1, 4), torch.randn(2, 1, 300, 1, 4)
    given = {"positions": torch.arange(queries), "key_positions": torch.arange(300)}
    linear_rope_attention(
        q, k, v, causal=False, rotary=Rotary(4), backend="native", return_state=True, **given
    )
    return 0


@needs_fork
@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
def test_native_reads_no_position_past_the_last_query_s() -> None:
    """In a process of its own: without queries it read at address 0."""
    assert finish(start(lambda: keys_alone(0)), 60) == 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", configurations.FAST)
def test_a_sum_over_no_tokens_has_gradients(backend: str, causal: bool) -> None:
    """Its gradient comes expanded, with strides of 0, and counts as contiguous."""
    q, k, v = (torch.randn(1, 0, 2, 4, requires_grad=True) for _ in range(3))
    out = linear_rope_attention(q, k, v, causal=causal, backend=backend)
    assert all(x.shape == (1, 0, 2, 4) for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("backend", configurations.FAST)
def test_an_attention_factor_is_not_rounded_before_an_exponential(backend: str) -> None:
    """In half precision that would put a relative error of u x into e^x."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    generator = torch.Generator().manual_seed(0)
    q, k, v = (6 * torch.randn(3, 1, 40, 1, 8, generator=generator)).bfloat16()
    found = {}
    for order in ("after", "before"):
        rotary = Rotary(8, scaling=scaling)
        how = {"feature_map": "exp", "rotary": rotary, "rope_order": order}
        exact = linear_rope_attention(q.double(), k.double(), v.double(), backend="reference", **how)
        out = linear_rope_attention(q.float(), k.float(), v.float(), backend=backend, **how)
        found[order] = linear_rope_attention(q, k, v, backend=backend, **how).double() - exact
        # What is left is the output's own rounding.
        assert (
            found[order].abs() <= 2.0**-8 * exact.abs() + 4 * (out.double() - exact).abs() + 1e-3
        ).all(), order


@pytest.mark.parametrize("name", ["embed_dim", "num_heads"])
def test_a_size_past_64_bits_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=9+: expected at most"):
        LanguageModelConfig(**{name: 10**30 - 1})
