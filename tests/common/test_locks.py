import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from linrope.common import locks
from linrope.common.locks import locked
from tests.common.full_disk import full_disk

pytest.importorskip("fcntl")

OTHER = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
OTHER += "file.write('process 7'); file.flush(); print(flush=True); time.sleep(60)"


def test_a_lock_keeps_others_out_until_its_process_ends(tmp_path) -> None:
    command = [sys.executable, "-S", "-c", OTHER, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BlockingIOError, match=r"process 7 writes into this folder; expected another"):
            locked(tmp_path).__enter__()
        other.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path / "."), locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()}"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_owner_removes_meanwhile_is_not_taken_for_the_lock(tmp_path, monkeypatch) -> None:
    lock, calls = locks._lock, []

    def lock_late(file: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()
        lock(file)

    monkeypatch.setattr(locks, "_lock", lock_late)
    with locked(tmp_path):
        assert (tmp_path / ".lock").exists()
    assert len(calls) == 2


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch) -> None:
    refuse = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(locks, "_lock", refuse)
    message = r"no lock \(No locks available\); start one run at a time"
    with pytest.warns(UserWarning, match=message), locked(tmp_path / "new"):
        pass


def test_a_file_that_cannot_be_removed_does_no_harm(tmp_path, monkeypatch) -> None:
    """Windows removes no open file."""
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError))
    for _ in range(2):
        with locked(tmp_path):
            pass


def test_a_full_disk_leaves_no_lock_behind(tmp_path) -> None:
    """The file of the lock can be made on a full disk, and nothing written into it."""
    with full_disk(0):
        with locked(tmp_path):
            assert (tmp_path / ".lock").exists()
        assert list(tmp_path.iterdir()) == []
