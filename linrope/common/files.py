"""Writes files atomically and checks everything that it reads."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a temporary file next to path and moves it there: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.touch(exist_ok=False)
    permissions = temporary.stat().st_mode & 0o777  # those that the umask leaves; safetensors sets others
    try:
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(permissions)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_readable(path: Path) -> None:
    """Raises ValueError for a path that is not UTF-8: safetensors writes such a file but cannot read it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{str(path)!a}: expected a path in UTF-8") from None


def parse_json(text: str | bytes, name: str) -> Any:
    """Parses the text as JSON. The error message names its source, name.

    Raises:
        ValueError: the text is not JSON, or is nested deeper than Python can read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not readable as JSON ({error})") from error


def digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Hashes the metadata and the names, dtypes, shapes and bytes of all tensors."""
    hashed = hashlib.blake2b(json.dumps(sorted(metadata.items())).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Saves tensors and metadata as safetensors, atomically, with a digest of both.

    Raises:
        ValueError: path is not UTF-8.
        OSError: the file cannot be written, as when the disk is full.
    """
    check_readable(path)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {**metadata, "digest": digest(plain, metadata)}
    try:
        replace_file(path, lambda temporary: save_file(plain, temporary, metadata=metadata))
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def load_tensors(path: Path, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads what ``save_tensors`` wrote with metadata format=kind, version=version.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, or of another kind or version.
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
    if metadata.get("version") != str(version):
        raise ValueError(f"{path}: version {metadata.get('version')!r}, expected '{version}'")
    if metadata.pop("digest", None) != digest(tensors, metadata):
        raise ValueError(f"{path}: damaged: its digest does not match its contents")
    return tensors, metadata
