"""nanoGPT's small run on a CPU: the characters of tiny Shakespeare, which the user has on disk."""

import hashlib
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study.tasks import Batch, Task
from benchmarks.study.text import bits_by_frequency, bits_of, rows_at

VARIABLE = "TINY_SHAKESPEARE"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@lru_cache(maxsize=1)
def characters() -> tuple[Tensor, Tensor]:
    """The numbers of the characters: the first nine tenths, for training, and the rest.

    Raises:
        ValueError: the environment variable does not name the file that others measured on.
    """
    path = os.environ.get(VARIABLE, "")
    text = Path(path).read_bytes() if Path(path).is_file() else b""
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise ValueError(
            f"{VARIABLE}={path}: expected the path of data/tinyshakespeare/input.txt of "
            "https://github.com/karpathy/char-rnn, with 1,115,394 bytes"
        )
    numbers = torch.tensor(list(text)).unique(return_inverse=True)[1]
    train = 9 * len(numbers) // 10
    return numbers[:train], numbers[train:]


@dataclass(frozen=True)
class Shakespeare(Task):
    """The next character. "loss": nats per character of the whole validation part, in windows of ``length``."""

    vocab_size: int = 65
    length: int = 64
    head_dim: int = 32
    layers: int = 4
    steps: int = 2000
    rows: int = 12

    @property
    def hidden_dim(self) -> int:
        return 350  # as many parameters as GPT-2's blocks, whose feed-forward networks have no gate

    def batch(self, seed: int, step: int) -> Batch:
        text, _ = characters()
        starts = torch.randint(len(text) - self.length, (self.rows,), generator=self.generator(seed, step))
        rows = rows_at(text, starts, self.length)
        return rows[:, :-1], rows[:, 1:]

    def measure(self, model: nn.Module) -> dict[str, Any]:
        windows = characters()[1].unfold(0, self.length + 1, self.length)
        return {"loss": bits_of(model, windows).mean().item() * math.log(2)}

    def floor(self) -> dict[str, float]:
        return {"loss": bits_by_frequency(*characters(), self.vocab_size) * math.log(2)}

    def ceiling(self) -> dict[str, float]:
        return {}
