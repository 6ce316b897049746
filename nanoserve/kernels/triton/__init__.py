"""GPU kernels in Triton, each with the Python function that launches it."""
