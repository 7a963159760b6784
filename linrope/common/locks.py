"""Locks on folders, so that two processes do not write into one folder."""

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_held: set[Path] = set()  # the folders that this process has locked


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder until the block ends, and makes the folder if there is none.

    A process may lock a folder that it has locked already. The system releases the lock of a process that is
    killed; its file .lock stays and does no harm. Where the system or the file system has no locks, a warning
    says so.

    Raises:
        BlockingIOError: another process holds the lock. The message names the process.
    """
    key = folder.resolve()
    if key in _held:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    file = _open_locked(path)
    _held.add(key)
    try:
        with suppress(OSError):  # on a full disk the lock still holds; only its owner has no name
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
        yield
    finally:
        _held.discard(key)
        with suppress(OSError):  # Windows cannot delete an open file
            path.unlink()
        with suppress(OSError):  # close() tries once more to write the owner's name
            file.close()


def _open_locked(path: Path) -> TextIO:
    while True:
        file = open(path, "a+")  # noqa: SIM115 - stays open as long as the lock is held
        try:
            _lock(file.fileno())
        except BlockingIOError:
            file.seek(0)
            owner = file.read(100).strip() or "another process"
            file.close()
            raise BlockingIOError(
                f"{path.parent}: {owner} writes into this folder; expected another folder, or one run at a time"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(f"{path.parent}: no lock ({error.strerror}); start one run at a time", stacklevel=4)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # the previous holder removed the file after we had opened it


def _lock(file: int) -> None:
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "linrope does not lock folders on Windows")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
