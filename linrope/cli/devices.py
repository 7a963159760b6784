"""The option --device."""

import torch

HELP = "auto (a GPU if there is one), cpu, or a device of PyTorch's, as cuda or cuda:1."


def pick_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: PyTorch has no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: PyTorch was built without CUDA
        cause = str(error).splitlines()[0]
        raise ValueError(f"--device={name}: expected a device that PyTorch has here ({cause})") from error
    if device.type == "meta":
        raise ValueError(f"--device={name}: expected a device with numbers, as cpu or cuda")
    return device
