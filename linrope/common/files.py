"""Files: written atomically, read without trust."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a temporary file beside path and moves it there: a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_readable(path: Path) -> None:
    """Raises ValueError where safetensors would write a file of that name and not read it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{str(path)!a}: expected a path in UTF-8") from None


def parse_json(text: str | bytes, name: str) -> Any:
    """What the text says; name: of where it stands, for the message.

    Raises:
        ValueError: it is no JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not readable as JSON ({error})") from error


def digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of all names, types, shapes and bytes: changes with any bit of them."""
    found = hashlib.blake2b(json.dumps(sorted(metadata.items())).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Saves tensors and metadata as safetensors, atomically, with a digest of both.

    metadata: with a version, which becomes "version.1": such a file has a digest, also where none is found.

    Raises:
        ValueError: path is not UTF-8.
        OSError: they cannot be written, as on a full disk.
    """
    check_readable(path)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {**metadata, "version": f"{metadata['version']}.1"}
    metadata["digest"] = digest(plain, metadata)
    try:
        replace_file(path, lambda temporary: save_file(plain, temporary, metadata=metadata))
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def load_tensors(path: Path, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads what ``save_tensors`` wrote with metadata format=kind, version=version.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged, of another kind, or of another version. Files of linrope 0.1 have no digest.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    if metadata.get("format") != kind:
        raise ValueError(f"{path}: format {metadata.get('format')!r}, expected {kind!r}")
    noted, found = metadata.get("version"), metadata.pop("digest", None)
    if noted not in (f"{version}", f"{version}.1"):
        raise ValueError(f"{path}: version {noted!r}, expected '{version}.1'")
    if (noted != f"{version}" or found is not None) and found != digest(tensors, metadata):
        raise ValueError(f"{path}: damaged: its digest is not that of its contents")
    return tensors, metadata
