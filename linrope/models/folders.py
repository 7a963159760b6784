"""The checkpoints of a run: folders named step-N."""

import os
from pathlib import Path


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if path.is_dir())


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """The folder itself if it holds a model, else the last checkpoint in it.

    Raises:
        FileNotFoundError: the folder holds neither a model nor checkpoints.
    """
    folder = Path(folder)
    if any((folder / name).is_file() for name in ("config.json", "model.safetensors")):
        return folder
    if steps := checkpoints(folder):
        return steps[-1]
    raise FileNotFoundError(f"{folder}: expected a folder with checkpoints (step-*) or a model")
