"""Property-based tests draw the same examples in every run; --hypothesis-profile=thorough draws many more."""

import os

import torch
from hypothesis import settings

# Before anything imports Triton: its interpreter runs the GPU kernels on the CPU. A GPU run sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("ordinary", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("ordinary")

torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other on a busy machine
