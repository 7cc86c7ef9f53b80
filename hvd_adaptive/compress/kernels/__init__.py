"""The codecs' inner loops: numba on CPU, Triton on CUDA, and a plain torch reference that both must match bit for bit."""
