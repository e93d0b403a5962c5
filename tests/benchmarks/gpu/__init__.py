"""``make gpu-check``: the CUDA kernels on this machine's GPU, checked and timed."""

MECHANISMS = (
    "aft_simple",
    "aft_full",
    "aft_local",
    "aft_conv",
    "efficient_attention",
    "linear_attention",
    "fastformer",
)
