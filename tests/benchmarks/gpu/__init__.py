"""``make gpu-check``: the CUDA kernels on this machine's GPU, checked and timed."""
