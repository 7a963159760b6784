"""The checkpoints of a run: folders named step-N."""

import os
import re
from pathlib import Path

# Eight digits, and more from step 100,000,000 on. Copies such as step-00000030-best are not checkpoints.
STEP = r"step-(?:\d{8}|[1-9]\d{8,})"


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    paths = [path for path in Path(folder).glob("step-*") if re.fullmatch(STEP, path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


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
    raise FileNotFoundError(
        f"{folder}: expected a folder with checkpoints (step-00000000) or a model (config.json)"
    )
