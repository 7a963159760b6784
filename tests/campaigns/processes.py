"""Work in a forked process, so that nothing is imported twice: with a time limit, and kills at any moment."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable


def start(work: Callable[[], int]) -> int:
    """The id of a fork that runs ``work``, its output thrown away; its status is work's; 99: it raised."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        errors = os.dup(2)
        os.dup2(quiet, 2)
        status = work()
    except BaseException:
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(status)


def finish(child: int, seconds: float) -> int | None:
    """The status of the process; None: it took longer, and was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    kill(child)
    return None


def kill(child: int) -> int:
    """The status: -9, or what the process ended with before."""
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
