"""A call that finds no memory for its scratch raises, in the caller's thread or another, and ends no process."""

import subprocess
import sys

import pytest

WITHOUT_MEMORY = """
import ctypes, resource, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from linrope.backends import library
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
    print("MemoryError", error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("threads", [1, 2])
def test_without_memory_for_scratch_a_call_raises_and_the_process_lives(native, threads):
    command = [sys.executable, "-c", WITHOUT_MEMORY, str(threads)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith("MemoryError"), result.stderr[-2000:]
