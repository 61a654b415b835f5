"""The tile kernels on a GPU: `python -m benchmarks.gpu` (see `benchmarks.gpu.__main__`)."""
