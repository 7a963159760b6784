"""The option --device."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HELP = "auto (a GPU if there is one), cpu, or another PyTorch device, such as cuda or cuda:1."


def pick_device(name: str) -> "torch.device":
    """Turns a name into a device.

    Raises:
        ValueError: PyTorch has no such device on this machine.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without CUDA
        cause = str(error).splitlines()[0]
        raise ValueError(f"--device={name}: expected a device that PyTorch has here ({cause})") from error
    if device.type == "meta":
        raise ValueError(f"--device={name}: expected a device that computes, such as cpu or cuda")
    return device
