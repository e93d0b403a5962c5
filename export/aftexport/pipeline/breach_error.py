"""The error of a PyTorch model whose documents change each other."""

from torch.export import ExportedProgram

from aftexport.errors import TraceError
from aftexport.pipeline.divergence import first_divergence
from aftexport.pipeline.independence import Breach


def breach_error(breach: Breach, program: ExportedProgram) -> TraceError:
    """Return the error that names the operator through which documents change each other.

    Args:
        breach: the document and its neighbors.
        program: the captured model.
    """
    operator = first_divergence(program, breach.inputs, breach.row, breach.alone())
    if breach.is_of_padding:
        named = f": {operator} is the first whose result differs" if operator else ""
        return TraceError(
            "Expected scores that do not depend on padding, got a difference of "
            f"{breach.error:.1e} if a longer document shares the run{named}.",
            "Mask the tokens from lengths on, or add --no-batching, which runs each document "
            "separately.",
        )
    named = f": {operator} computes over the batch" if operator else ""
    return TraceError(
        "Expected scores that do not depend on the other documents of a batch, got a difference "
        f"of {breach.error:.1e}{named}.",
        "Compute each document separately, or add --no-batching, which runs each document "
        "separately.",
    )
