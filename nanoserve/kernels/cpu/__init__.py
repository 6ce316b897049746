"""CPU kernels, compiled by numba, and oneDNN's matrix products with packed weights."""
