"""A call that finds no memory for its scratch raises, in the caller's thread or another, and ends no process."""

import subprocess
import sys

import pytest

WITHOUT_MEMORY = """
import ctypes, os, resource, torch
from linrope.backends import library
first = os.fork()  # before any thread has started
if first:
    os.waitpid(first, 0)
torch.set_num_threads(2 if first else 1)
tokens = [torch.ones(8, 40, 8, 256) for _ in range(3)]
numbers = dict(feature_map=1, query_factor=0.0, layout=0, eps=1e-6)
flags = dict(causal=True, normalize=True, add_eps=False, want_state=False, save=False, save_z=False)
call = lambda x: library.run("forward", **dict(zip("qkv", x)), **numbers, **flags)
call([x[..., :8] for x in tokens])  # starts the threads
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
while malloc(1 << 19):
    pass
try:
    call([x[:, :1] for x in tokens])
except MemoryError as error:
    print("MemoryError", error, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_without_memory_for_scratch_a_call_raises_and_the_process_lives(native):
    """On one thread and on two."""
    command = [sys.executable, "-c", WITHOUT_MEMORY]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.count("MemoryError") == 2, result.stdout + result.stderr[-2000:]
