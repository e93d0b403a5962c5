"""The build settings of a TensorRT engine: its lengths, batches and GPUs."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import model_validator

from aftexport.errors import UsageError
from aftexport.options import EngineOptions
from aftexport.system.contract import MAX_TOKENS
from aftexport.system.validation import StrictModel

MAX_COUNT = (1 << 31) - 1
"""The largest number in a bundle, because runtimes store sizes in 32 bits."""
Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
Length = Annotated[int, Ge(1), Le(MAX_TOKENS)]
_MAX_BATCH = 1 << 16
RuntimeName = Literal["tensorrt", "tensorrt_rtx"]

TARGETS: dict[str, RuntimeName] = {"trt": "tensorrt", "trt-rtx": "tensorrt_rtx"}
"""The runtime of the engine for each value of ``--to``."""
PRECISIONS = ("fp32", "fp16", "bf16")
"""The types of weights and activations that a strongly typed network supports."""

MAX_LENGTH = 16_384
"""The maximum number of tokens for a model without a bound, because an engine needs one."""
OPT_LENGTH = 2_048
MAX_BATCH = 8

RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)
"""The GPUs that the builder of TensorRT-RTX supports; not 90 and 100, the data center GPUs."""
RTX_DEFAULT = (80, 86, 89, 120)


class BuildSettings(StrictModel):
    """The complete settings of an engine."""

    # tensorrt, which builds on the GPU of the engine; tensorrt_rtx, which builds on any machine
    runtime: RuntimeName
    min_length: Length  # tokens of a document
    opt_lengths: Annotated[tuple[Length, ...], Len(1)]  # one optimization profile for each
    max_length: Length
    max_batch: Annotated[int, Ge(1), Le(_MAX_BATCH)]  # maximum number of documents in a run
    # maximum scratch memory of a layer on the GPU, in MiB; None for TensorRT's own limit
    workspace_mib: Count | None
    # GPUs of a portable engine; empty for the GPU of the build
    compute_capabilities: tuple[Count, ...]

    @model_validator(mode="after")
    def _lengths_rise(self) -> Self:
        if not self.min_length <= min(self.opt_lengths) <= max(self.opt_lengths) <= self.max_length:
            raise ValueError(
                f"opt_lengths must be within min_length {self.min_length} and max_length "
                f"{self.max_length}, got {', '.join(map(str, self.opt_lengths))}"
            )
        return self


def check_precision(to: str, precision: str) -> None:
    """Check that engines support a precision."""
    if precision not in PRECISIONS:
        raise UsageError(
            f"--precision must be one of {', '.join(PRECISIONS)} with --to {to}, got {precision}: "
            "TensorRT takes its types from the graph.",
            f"Choose one of {', '.join(PRECISIONS)}.",
        )


def build_settings(
    to: str, options: EngineOptions, *, precision: str, max_tokens: int | None
) -> BuildSettings:
    """Return the options with defaults; raise UsageError for impossible ones before the build."""
    runtime = TARGETS[to]
    check_precision(to, precision)
    _check_sizes(options, max_tokens)
    longest = max_tokens or MAX_LENGTH
    shortest = options.min_length or 1
    best = options.opt_lengths or (min(max(OPT_LENGTH, shortest), longest),)
    if not shortest <= min(best) <= max(best) <= longest:
        raise UsageError(
            f"--opt-length must be within --min-length {shortest} and --max-length {longest}, "
            f"got {','.join(map(str, best))}.",
            "Give an --opt-length between the other two.",
        )
    if runtime == "tensorrt" and options.compute_capabilities:
        raise UsageError(
            f"--compute-capability needs --to trt-rtx, got --to {to}: its engine only runs on "
            "the GPU of the build.",
            "Leave --compute-capability out, or use --to trt-rtx.",
        )
    capabilities: tuple[int, ...] = ()
    if runtime == "tensorrt_rtx":
        capabilities = tuple(sorted(set(options.compute_capabilities or RTX_DEFAULT)))
        _check_capabilities(capabilities, precision)
    return BuildSettings(
        runtime=runtime,
        min_length=shortest,
        opt_lengths=best,
        max_length=longest,
        max_batch=options.max_batch or MAX_BATCH,
        workspace_mib=options.workspace_mib,
        compute_capabilities=capabilities,
    )


def _check_sizes(options: EngineOptions, max_tokens: int | None) -> None:
    sizes = {
        "--min-length": (options.min_length, MAX_TOKENS),
        "--opt-length": (max(options.opt_lengths, default=None), MAX_TOKENS),
        "--max-length": (max_tokens, MAX_TOKENS),
        "--max-batch": (options.max_batch, _MAX_BATCH),
        "--workspace": (options.workspace_mib, MAX_COUNT),
    }
    for option, (size, limit) in sizes.items():
        if size is not None and size > limit:
            raise UsageError(
                f"{option} must be at most {limit}, got {size}.", f"Give at most {limit}."
            )


def _check_capabilities(capabilities: Sequence[int], precision: str) -> None:
    unknown = [c for c in capabilities if c not in RTX_CAPABILITIES]
    if unknown:
        known = ",".join(map(str, RTX_CAPABILITIES))
        raise UsageError(
            f"--compute-capability must be one of {known} for TensorRT-RTX, got {unknown[0]}.",
            f"Use --to trt on that GPU, or choose from {known}.",
        )
    if 75 in capabilities and precision != "fp16":
        raise UsageError(
            f"--precision must be fp16 for compute capability 75 of TensorRT-RTX, got {precision}.",
            "Use --precision fp16, or leave 75 out of --compute-capability.",
        )
