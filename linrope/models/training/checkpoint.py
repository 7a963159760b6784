"""Checkpoints of a run: folders step-N, each written completely or not at all."""

import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from linrope.common.files import load_tensors, parse_json, save_tensors
from linrope.common.locks import locked
from linrope.models.checkpoint_folders import STEP
from linrope.models.training.config import TrainingConfig
from linrope.models.training.tokenizer import load_tokenizer

_FORMAT, _VERSION = "linrope.Training", 1
_REQUIRED = {"step", "config", "processes", "checksum"}
_KEEP = 2  # checkpoints
_UNFINISHED = rf"\.({STEP})\.[0-9a-f]{{8}}(\.replaced)?"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None], earlier: list[Path]) -> None:
    """Calls ``write`` to fill folder/step-N. An error or a kill leaves the last checkpoint, with one exception.

    If step-N exists already, it is renamed to .step-N.*.replaced just before the new one takes its name. After a kill
    between these two renames step-N is missing, until the next call for that step or a later one restores it.

    Args:
        folder: the folder of the run.
        step: the step N.
        write: fills the folder that it gets.
        earlier: the run's checkpoints. Of those in this folder all but the last are removed; the list then
            also has the new one.

    Raises:
        BlockingIOError: another process writes into the folder.
    """
    with locked(folder):
        target = folder.resolve() / checkpoint_name(step)
        for path in folder.glob(".step-*"):  # left by a run that was killed
            match = re.fullmatch(_UNFINISHED, path.name)
            if match is None or not path.is_dir() or path.is_symlink():
                continue
            name, is_old = match.groups()
            if is_old and int(name.removeprefix("step-")) <= step:  # a later one would count as the latest
                _restore(path, folder / name)
            shutil.rmtree(path, ignore_errors=True)
        temporary = folder / f".{target.name}.{secrets.token_hex(4)}"
        temporary.mkdir()  # with the permissions that the umask leaves, unlike tempfile's folders
        replaced = temporary.with_name(temporary.name + ".replaced")
        try:
            write(temporary)
            if target.exists():  # moved in one step: a half-removed folder would count as the latest
                target.rename(replaced)
            temporary.rename(target)
        finally:
            _restore(replaced, target)
            for leftover in (temporary, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
        of_this_run = [path for path in earlier if path.parent == target.parent and path != target]
        for old in of_this_run[: 1 - _KEEP]:
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            earlier.remove(old)
        if target not in earlier:
            earlier.append(target)


def _restore(replaced: Path, target: Path) -> None:
    """Renames an old checkpoint to step-N, if no new one has taken that name."""
    if replaced.exists() and not target.exists():
        replaced.rename(target)


def load_training(checkpoint: Path) -> tuple[TrainingConfig, dict[str, Tensor], dict[str, str]]:
    """The run's TrainingConfig, the tensors (random_state and the optimizer's, if any), and the metadata.

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
        raise ValueError(f"{file}: not the state of a run: {error}") from error


def save_training(checkpoint: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata = {"format": _FORMAT, "version": str(_VERSION), **metadata}
    save_tensors(checkpoint / "training.safetensors", tensors, metadata)


def tokenizer_of(checkpoint: Path) -> Any:
    """The run's tokenizer; None: its tokens are bytes."""
    folder = checkpoint / "tokenizer"
    return load_tokenizer(folder) if folder.is_dir() else None
