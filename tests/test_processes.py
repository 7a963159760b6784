"""Copies, threads, child processes and imports: what a program does with a layer around its calls."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linrope import LinearRoPEAttention, feature_maps


@pytest.mark.parametrize("feature_map", feature_maps.NAMES)
def test_a_deepcopy_of_a_layer_works_on_its_own(feature_map: str) -> None:
    normalize = feature_maps.make(feature_map, 4).positive
    original = LinearRoPEAttention(
        8, 2, feature_map=feature_map, normalize=normalize, out_norm=True, gate=True
    )
    x = torch.linspace(-1, 1, 48).view(2, 3, 8)
    expected, given = original(x, return_state=True)
    twin = copy.deepcopy(original)
    assert torch.equal(twin(x, state=given), original(x, state=given))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(original(x), expected)


def python(source: str, path) -> str:
    """What a fresh interpreter prints for a script."""
    path.write_text(source)
    command = [sys.executable, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=path.parent.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


ROOT = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
CHILD = """
import multiprocessing

def call(queue):
    import torch, linrope
    torch.set_num_threads(1)
    x = torch.ones(1, 3, 2, 4, requires_grad=True)
    linrope.linear_rope_attention(x, x, x, rotary=linrope.Rotary(4)).sum().backward()
    queue.put((bool(x.grad.isfinite().all()), torch.cuda.is_initialized()))

if __name__ == "__main__":
    import torch, linrope
    torch.set_num_threads(2)  # the parent's threads have run: the child has none of them
    x = torch.ones(1, 512, 8, 16)
    linrope.linear_rope_attention(x, x, x)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=call, args=(queue,))
        child.start()
        print(method, *queue.get())
        child.join()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="this system cannot fork")
def test_a_forked_and_a_spawned_child_process_can_run_a_call(tmp_path) -> None:
    output = python(ROOT + CHILD, tmp_path / "script.py")
    assert output.splitlines() == ["fork True False", "spawn True False"]


def test_imports_bring_in_no_gpu_command_line_or_training_library_and_a_call_no_processes(tmp_path) -> None:
    """Imports linrope, calls a layer, and imports the models, which do not require transformers."""
    source = """
import torch
before = set(sys.modules)
unwanted = {"triton", "linrope_kernels", "typer", "rich", "matplotlib"}
unwanted |= {"accelerate", "transformers", "datasets", "tensorboard"}
for module in ("linrope", "linrope.models", "linrope.models.training"):
    __import__(module)
    print(module, *sorted(unwanted & {name.split(".")[0] for name in set(sys.modules) - before}))
    if module == "linrope":
        sys.modules["linrope"].LinearRoPEAttention(8, 2, short_conv=2)(torch.zeros(1, 3, 8))
        print(*(name for name in sys.modules if name.startswith("linrope.distributed")))
print(torch.cuda.is_initialized())
"""
    expected = ["linrope", "", "linrope.models", "linrope.models.training", "False"]
    assert python(ROOT + source, tmp_path / "script.py").splitlines() == expected
