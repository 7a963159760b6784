"""Tools for developing the Triton kernels: compile report, cycle model, tile tuner. Not in the wheel."""
