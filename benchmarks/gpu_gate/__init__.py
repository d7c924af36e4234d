"""The GPU gate: compiles kernels and whole decode loops for GPUs on a machine without one, and checks the result."""
