"""GPU kernels in Triton, each with the plain function that launches it."""
