"""The names of mechanisms in tables and pictures."""

TITLES = {
    "aft_full": "AFT-full",
    "aft_local": "AFT-local, s = 128",
    "aft_simple": "AFT-simple",
    "aft_conv": "AFT-conv, 31 taps",
    "efficient_attention": "Efficient Attention",
    "fastformer": "Fastformer",
    "linear_attention": "linear attention",
}


def label(ratio: float) -> str:
    """Return a ratio with two digits, as the tables show it."""
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"
