import copy
import pickle

import torch

from linrope.common.constants import Constant


def test_a_constant_is_exact_on_each_device_and_travels_without_its_copies() -> None:
    values = torch.tensor([0.1, 1 - 2.0**-40], dtype=torch.float64)
    constant = Constant(values)
    values.zero_()  # it has its own
    assert constant.on(torch.device("cpu")).tolist() == [0.1, 1 - 2.0**-40]
    assert constant.on(torch.device("meta")).is_meta
    for twin in (copy.deepcopy(constant), pickle.loads(pickle.dumps(constant))):
        assert torch.equal(twin.on(torch.device("cpu")), constant.on(torch.device("cpu")))
