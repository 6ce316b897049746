"""CPU kernels: compiled by numba, and oneDNN's products of packed weights."""
