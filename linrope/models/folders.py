"""Where a run keeps its models: folders step-N."""

import os
from pathlib import Path


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if path.is_dir())


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """folder itself, or where it is a run's the last checkpoint in it.

    Raises:
        FileNotFoundError: it has neither a model nor checkpoints.
    """
    folder = Path(folder)
    if any((folder / name).is_file() for name in ("config.json", "model.safetensors")):
        return folder
    if found := checkpoints(folder):
        return found[-1]
    raise FileNotFoundError(f"{folder}: expected a folder with checkpoints (step-*) or a model")
