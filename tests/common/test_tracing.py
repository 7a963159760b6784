"""Where a check may read the values of a tensor."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linrope.common.tracing import values_readable


def test_values_on_a_cpu_are_readable_and_others_are_not() -> None:
    cpu, meta, cuda = (torch.device(name) for name in ("cpu", "meta", "cuda"))
    assert [values_readable(x) for x in (torch.ones(2), cpu)] == [True, True]
    assert [values_readable(x) for x in (torch.ones(2, device=meta), meta, cuda)] == [False, False, False]


def test_a_fake_tensor_is_not_readable_in_its_mode_and_after_it() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
        assert not values_readable(fake)
        assert not values_readable(torch.device("cpu"))
    assert not values_readable(fake)
    assert values_readable(torch.device("cpu"))


def test_a_vmapped_tensor_is_not_readable() -> None:
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(values_readable(x)), x)[1])(torch.ones(3, 2))
    assert seen == [False]


def test_nothing_is_readable_in_a_compiled_graph() -> None:
    def look(x: Tensor) -> Tensor:
        return x + 1 if values_readable(x) or values_readable(x.device) else x - 1

    compiled = torch.compile(look, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.zeros(2))
