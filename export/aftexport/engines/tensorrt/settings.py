"""What a TensorRT engine is built for: the lengths, batches and GPUs it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import BaseModel, ConfigDict, model_validator

from aftexport.contract import MAX_TOKENS
from aftexport.errors import UsageError

MAX_COUNT = (1 << 31) - 1
"""The largest number in a bundle: runtimes keep sizes in 32 bits."""
Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
Length = Annotated[int, Ge(1), Le(MAX_TOKENS)]
_MAX_BATCH = 1 << 16
RuntimeName = Literal["tensorrt", "tensorrt_rtx"]

TARGETS: dict[str, RuntimeName] = {"trt": "tensorrt", "trt-rtx": "tensorrt_rtx"}
"""What ``--to`` says, and the runtime that is built for."""
PRECISIONS = ("fp32", "fp16", "bf16")
"""The types a strongly typed network may have; of weights and activations."""

MAX_LENGTH = 16_384
"""Most tokens where the model has no bound: an engine must have one."""
OPT_LENGTH = 2_048
MAX_BATCH = 8

RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)
"""The GPUs the builder of TensorRT-RTX knows; not 90 and 100, of data centres."""
RTX_DEFAULT = (80, 86, 89, 120)


@dataclass(frozen=True)
class EngineOptions:
    """What the user asks of an engine; None and empty for the default.

    Attributes:
        min_length, max_length: fewest and most tokens of a document.
        opt_lengths: lengths to be fast at, one optimization profile for each.
        max_batch: most documents at once.
        workspace_mib: GPU memory a layer may use for scratch, in MiB.
        compute_capabilities: the GPUs of a portable engine, 86 for 8.6.
    """

    min_length: int | None = None
    opt_lengths: tuple[int, ...] = ()
    max_length: int | None = None
    max_batch: int | None = None
    workspace_mib: int | None = None
    compute_capabilities: tuple[int, ...] = ()


class BuildSettings(BaseModel):
    """What an engine is built for, all said.

    Attributes:
        runtime: tensorrt, built on the GPU it runs on; tensorrt_rtx, built anywhere.
        min_length, max_length: fewest and most tokens of a document.
        opt_lengths: lengths to be fast at, one optimization profile for each.
        max_batch: most documents at once.
        workspace_mib: GPU memory a layer may use for scratch; None for TensorRT's own limit.
        compute_capabilities: the GPUs of a portable engine; empty for the GPU it is built on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    runtime: RuntimeName
    min_length: Length
    opt_lengths: Annotated[tuple[Length, ...], Len(1)]
    max_length: Length
    max_batch: Annotated[int, Ge(1), Le(_MAX_BATCH)]
    workspace_mib: Count | None
    compute_capabilities: tuple[Count, ...]

    @model_validator(mode="after")
    def _lengths_rise(self) -> Self:
        if not self.min_length <= min(self.opt_lengths) <= max(self.opt_lengths) <= self.max_length:
            raise ValueError("opt_lengths: one is outside min_length to max_length")
        return self


def check_precision(to: str, precision: str) -> None:
    """Refuses a precision that an engine cannot have.

    Raises:
        UsageError: for int8, which would take a graph of quantized types.
    """
    if precision not in PRECISIONS:
        raise UsageError(
            f"--precision {precision} is none of --to {to}: "
            "TensorRT takes its types from the graph.",
            f"Choose one of {', '.join(PRECISIONS)}.",
        )


def build_settings(
    to: str, options: EngineOptions, *, precision: str, max_tokens: int | None
) -> BuildSettings:
    """Completes what was asked, and refuses what cannot be built before anything is.

    Args:
        to: trt or trt-rtx.
        options: what was asked.
        precision: of the exported graph.
        max_tokens: most tokens the model takes; None for no bound.

    Raises:
        UsageError: naming the option and the alternative.
    """
    runtime = TARGETS[to]
    check_precision(to, precision)
    _check_sizes(options)
    longest = options.max_length or max_tokens or MAX_LENGTH
    shortest = options.min_length or 1
    best = options.opt_lengths or (min(max(OPT_LENGTH, shortest), longest),)
    if not shortest <= min(best) <= max(best) <= longest:
        raise UsageError(
            f"--min-length {shortest}, --opt-length {','.join(map(str, best))} and "
            f"--max-length {longest} do not rise.",
            "Give --opt-length between the other two.",
        )
    if runtime == "tensorrt" and options.compute_capabilities:
        raise UsageError(
            "--compute-capability has no meaning with --to trt: "
            "its engine is for the GPU it is built on.",
            "Leave it out, or use --to trt-rtx.",
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


def _check_sizes(options: EngineOptions) -> None:
    sizes = {
        "--min-length": (options.min_length, MAX_TOKENS),
        "--opt-length": (max(options.opt_lengths, default=None), MAX_TOKENS),
        "--max-length": (options.max_length, MAX_TOKENS),
        "--max-batch": (options.max_batch, _MAX_BATCH),
        "--workspace": (options.workspace_mib, MAX_COUNT),
    }
    for option, (size, most) in sizes.items():
        if size is not None and size > most:
            raise UsageError(f"{option} must be at most {most}, got {size}.", f"Give {most}.")


def _check_capabilities(capabilities: Sequence[int], precision: str) -> None:
    unknown = [c for c in capabilities if c not in RTX_CAPABILITIES]
    if unknown:
        known = ",".join(map(str, RTX_CAPABILITIES))
        raise UsageError(
            f"TensorRT-RTX builds no engine for compute capability {unknown[0]}.",
            f"Use --to trt on that GPU, or choose from --compute-capability {known}.",
        )
    if 75 in capabilities and precision != "fp16":
        raise UsageError(
            f"TensorRT-RTX has no {precision} products for compute capability 75.",
            "Use --precision fp16, or leave 75 out of --compute-capability.",
        )
