"""What all chunked backends share: one operator, and the same without the dispatcher for short calls."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from linrope import Rotary, linear_rope_attention, linear_rope_state
from linrope.recurrence.call import summed_to
from tests.support.oracle import everything, random_state, randoms

BACKENDS = ("eager", "native")


class Seen(TorchDispatchMode):
    """The names of the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def results(backend: str) -> list[Tensor]:
    q, k, v = randoms(2, 40, 4, 8, g=2, dtype=torch.float32)
    data = {
        "log_decay": torch.full((2, 40, 2), -0.1), "angle_steps": torch.full((2, 40, 2, 4), 0.1),
        "write": torch.full((2, 40, 2), 0.5),
    }  # fmt: skip
    state = random_state(k, v, {"rotary": Rotary(8)})
    found = everything(q, k, v, state, rotary=Rotary(8), backend=backend, **data)
    return list(found.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_gradients_are_those_of_the_operator_bit_for_bit(backend: str) -> None:
    with Seen() as seen:
        expected = results(backend)
    assert {"linrope::attend", "linrope::attend_backward"} <= seen.names
    assert all(map(torch.equal, results(backend), expected))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@torch.no_grad()
def test_fake_tensors_get_fake_results_in_their_mode_and_after_it(backend: str, n: int) -> None:
    with FakeTensorMode():
        x = torch.ones(2, n, 2, 8)
        state = linear_rope_state(x, x, backend=backend)
        out = linear_rope_attention(x, x, x, state=state, backend=backend)
    for fake in (out, linear_rope_attention(x, x, x, state=state, backend=backend)):
        assert isinstance(fake, FakeTensor)
        assert fake.shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_wanted_gets_no_gradient_and_no_error(backend: str) -> None:
    q, k, v = randoms(1, 5, 2, 8, dtype=torch.float32)
    out, state = linear_rope_attention(q, k, v.requires_grad_(), return_state=True, backend=backend)
    (from_state,) = torch.autograd.grad(state.kv.sum(), v, retain_graph=True)
    assert from_state.abs().sum() > 0
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert dv.shape == v.shape
    ones = torch.ones(1, 5, 2, requires_grad=True)
    (d_write,) = torch.autograd.grad(linear_rope_attention(q, k, dv, write=ones, backend=backend).sum(), ones)
    assert d_write.abs().sum() > 0


def test_gradients_of_inputs_that_broadcast_are_summed_before_they_are_rounded() -> None:
    gradient, like = torch.full((3, 2, 4), 1 + 2.0**-8), torch.ones(1, 2, 1, dtype=torch.bfloat16)
    summed = summed_to(gradient, like)
    assert (summed.shape, summed.dtype) == (like.shape, like.dtype)
    assert summed.tolist() == torch.full_like(like, 12 + 12 * 2.0**-8).tolist()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_that_an_empty_batch_shares_get_gradients_of_zero(backend: str) -> None:
    q, k, v = (torch.zeros(0, 5, 2, 4) for _ in range(3))
    data = {name: torch.rand(1, 5, 2).neg().requires_grad_() for name in ("log_decay", "write")}
    linear_rope_attention(q, k, v, **data, backend=backend).sum().backward()
    assert not any(x.grad is not None and x.grad.any() for x in data.values())
