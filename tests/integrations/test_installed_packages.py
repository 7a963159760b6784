"""Packages that transformers prefers to its own code, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from linrope.backends import native
from tests.support.families import CONFIGURATIONS, cache_of, model, relative, tokens

ROOT = Path(__file__).parents[2]
FAMILIES = [name for name in ("qwen3_5", "kimi_linear") if name in CONFIGURATIONS]
# Every function of the package raises, as its Triton kernels do without a GPU
PACKAGE = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_, **__):
        raise RuntimeError("there is no GPU")

    return kernel
"""
PROGRAM = """
import sys
import pytest
import torch
from linrope.integrations import transformers as linrope_transformers
from tests.integrations.test_installed_packages import logits_and_gradient
from tests.support.families import model, tokens

file, *families = sys.argv[1:]
for family in families:
    with pytest.raises(RuntimeError, match="there is no GPU"):
        model(family)(tokens(2, 30))
linrope_transformers.enable()
torch.save({family: logits_and_gradient(family) for family in families}, file)
"""


def logits_and_gradient(family: str) -> list[torch.Tensor]:
    """The logits of a prompt and of a step after it, and the embedding's gradient."""
    net, ids = model(family), tokens(2, 30)
    with torch.no_grad():
        prompt = net(ids[:, :29], use_cache=True)
        step = net(ids[:, 29:], use_cache=True, **cache_of(prompt))
    net(ids, labels=ids, use_cache=False).loss.backward()
    gradient = net.get_input_embeddings().weight.grad  # type: ignore[operator]
    return [prompt.logits, step.logits, gradient]


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="it asks for fla in another way"
)
@pytest.mark.long  # two processes import transformers
def test_delta_rules_run_where_fla_is_installed_and_raises(tmp_path: Path) -> None:
    package, file = tmp_path / "fla", tmp_path / "results.pt"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM, str(file), *FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    for family, got in torch.load(file).items():
        expected = logits_and_gradient(family)  # here fla is not installed
        errors = [relative(*pair) for pair in zip(got, expected, strict=True)]
        assert max(errors[:2]) < 2e-5
        assert errors[2] < 1e-4
