"""A pattern for each mechanism: its formula, and the conditions for a safe rewrite."""

from aftexport.recognition.patterns import (
    aft,
    aft_conv,
    efficient_attention,
    fastformer,
    linear_attention,
)
from aftexport.recognition.patterns.pattern import Pattern

PATTERNS: dict[str, Pattern] = {
    "fastformer": fastformer.match,
    "efficient_attention": efficient_attention.match,
    "linear_attention": linear_attention.match,
    "aft_conv": aft_conv.match,
    "aft": aft.match,
}
"""The patterns in the order of trial; a value matches one at most."""
