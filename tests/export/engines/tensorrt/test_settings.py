import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from aftexport.engines.tensorrt.runtimes import load
from aftexport.engines.tensorrt.settings import (
    RTX_CAPABILITIES,
    BuildSettings,
    build_settings,
)
from aftexport.errors import UsageError
from aftexport.options import EngineOptions

LENGTHS = st.none() | st.integers(1, 20_000)


@given(LENGTHS, LENGTHS, LENGTHS, st.sampled_from(["trt", "trt-rtx"]))
def test_settings_make_profile_or_are_refused(
    shortest: int | None, best: int | None, limit: int | None, to: str
) -> None:
    options = EngineOptions(shortest, (best,) if best else ())
    try:
        settings = build_settings(to, options, precision="fp16", max_tokens=limit)
    except UsageError:
        assert [shortest, best, limit] != [None] * 3
        return
    assert 1 <= settings.min_length <= settings.opt_lengths[0] <= settings.max_length
    assert settings.min_length == (shortest or 1)
    assert settings.max_length == (limit or settings.max_length)
    # What the manifest stores is what is read from it.
    assert BuildSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("option", "options", "max_tokens", "most"),
    [
        ("--min-length", EngineOptions(min_length=10**12), 10**12, 1 << 20),
        ("--opt-length", EngineOptions(opt_lengths=(5, 10**12)), None, 1 << 20),
        ("--max-length", EngineOptions(), (1 << 20) + 1, 1 << 20),
        ("--max-batch", EngineOptions(max_batch=10**12), None, 1 << 16),
        ("--workspace", EngineOptions(workspace_mib=10**12), None, (1 << 31) - 1),
    ],
)
def test_sizes_have_an_upper_bound(
    option: str, options: EngineOptions, max_tokens: int | None, most: int
) -> None:
    with pytest.raises(UsageError, match=f"{option} must be at most {most}, got"):
        build_settings("trt", options, precision="fp16", max_tokens=max_tokens)
    settings = build_settings("trt", EngineOptions(), precision="fp16", max_tokens=300)
    name = {"--opt-length": "opt_lengths", "--workspace": "workspace_mib"}.get(
        option, option[2:].replace("-", "_")
    )
    size = [most + 1] if name == "opt_lengths" else most + 1
    with pytest.raises(ValidationError, match=name):
        BuildSettings.model_validate_json(json.dumps(settings.model_dump() | {name: size}))


def test_gpus_match_wheel() -> None:
    known = load("tensorrt_rtx").module.ComputeCapability.__members__
    assert {f"SM{c}" for c in RTX_CAPABILITIES} == {n for n in known if n.startswith("SM")}


@pytest.mark.parametrize(
    ("to", "precision", "capabilities", "alternative"),
    [
        ("trt-rtx", "fp32", (75,), "--precision fp16"),
        ("trt-rtx", "bf16", (86, 75), "leave 75 out"),
        ("trt-rtx", "fp16", (90,), "--to trt"),
        ("trt-rtx", "fp16", (86, 100), "--to trt"),
        ("trt-rtx", "int8", (), "fp16"),
        ("trt", "int8", (), "fp16"),
        ("trt", "fp16", (86,), "--to trt-rtx"),
    ],
)
def test_unbuildable_settings_suggest_alternative(
    to: str, precision: str, capabilities: tuple[int, ...], alternative: str
) -> None:
    options = EngineOptions(compute_capabilities=capabilities)
    with pytest.raises(UsageError, match=alternative):
        build_settings(to, options, precision=precision, max_tokens=None)
