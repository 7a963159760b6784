"""Checkpoints of a run: folders step-N, there whole or not at all."""

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
_NOTED = {"step", "config", "processes", "corpus", "checksum"}
_KEPT = 2  # checkpoints


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> None:
    """Has ``write`` fill folder/step-N; keeps the last two. A kill at any moment leaves one to go on from."""
    target = folder / checkpoint_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):  # of a run that was killed
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{target.name}."))
    temporary.chmod(0o755)
    replaced = temporary.with_suffix(".replaced")
    try:
        write(temporary)
        if target.exists():  # moved away whole: half removed, it would count as the latest
            target.rename(replaced)
        temporary.rename(target)
    finally:
        for leftover in (temporary, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    for old in checkpoints(folder)[:-_KEPT]:
        shutil.rmtree(old)


def load_training(checkpoint: Path) -> tuple[TrainingConfig, dict[str, Tensor], dict[str, str]]:
    """How the run is trained, the optimizer's tensors, and what else was noted.

    Raises:
        FileNotFoundError, ValueError: no such file; damaged, or of another version.
    """
    file = checkpoint / "training.safetensors"
    tensors, metadata = load_tensors(file, _FORMAT, _VERSION)
    try:
        if missing := _NOTED - set(metadata):
            raise ValueError(f"got no {', '.join(sorted(missing))}")
        return TrainingConfig(**parse_json(metadata["config"], "config")), tensors, metadata
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: does not fit the model: {error}") from error


def save_training(checkpoint: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata = {"format": _FORMAT, "version": str(_VERSION), **metadata}
    save_tensors(checkpoint / "training.safetensors", tensors, metadata)


def tokenizer_of(checkpoint: Path) -> Any:
    """The tokenizer that the run was given; None: bytes."""
    folder = checkpoint / "tokenizer"
    return load_tokenizer(folder) if folder.is_dir() else None
