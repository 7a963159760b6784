"""Checkpoints of a run: folders step-N, each written completely or not at all."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from linrope.common.files import load_tensors, parse_json, save_tensors
from linrope.models.folders import checkpoints
from linrope.models.training.config import TrainingConfig
from linrope.models.training.corpus import load_tokenizer

_FORMAT, _VERSION = "linrope.Training", 1
_REQUIRED = {"step", "config", "processes", "corpus", "checksum"}
_KEEP = 2  # checkpoints


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> None:
    """Calls ``write`` to fill folder/step-N, and keeps the last two. A kill at any time leaves a good one."""
    target = folder / checkpoint_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):  # of a run that was killed
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{target.name}."))
    temporary.chmod(0o755)
    replaced = temporary.with_suffix(".replaced")
    try:
        write(temporary)
        if target.exists():  # moved in one step: a half-removed folder would count as the latest
            target.rename(replaced)
        temporary.rename(target)
    finally:
        for leftover in (temporary, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    for old in checkpoints(folder)[:-_KEEP]:
        shutil.rmtree(old)


def load_training(checkpoint: Path) -> tuple[TrainingConfig, dict[str, Tensor], dict[str, str]]:
    """The run's TrainingConfig, the optimizer's tensors, and the file's metadata.

    Raises:
        FileNotFoundError, ValueError: there is no such file; it is damaged, or of another version.
    """
    file = checkpoint / "training.safetensors"
    tensors, metadata = load_tensors(file, _FORMAT, _VERSION)
    try:
        if missing := _REQUIRED - set(metadata):
            raise ValueError(f"got no {', '.join(sorted(missing))}")
        return TrainingConfig(**parse_json(metadata["config"], "config")), tensors, metadata
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: does not fit the model: {error}") from error


def save_training(checkpoint: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata = {"format": _FORMAT, "version": str(_VERSION), **metadata}
    save_tensors(checkpoint / "training.safetensors", tensors, metadata)


def tokenizer_of(checkpoint: Path) -> Any:
    """The run's tokenizer; None: its tokens are bytes."""
    folder = checkpoint / "tokenizer"
    return load_tokenizer(folder) if folder.is_dir() else None
