"""``aftexport build``, by TensorRT-RTX, which needs no GPU."""

import json
import threading
from io import StringIO
from pathlib import Path

import pytest
from commands import Outcome, assert_refused, listing, run_here
from rich.console import Console

from aftexport.bundle.bundle import Bundle, engine_file
from aftexport.deploy.build_engine import build, wanted_here
from aftexport.engines.tensorrt.engine_file import VARIABLE, EngineFile, EngineRecord, engine_cache


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def changed_record(bundle: Path, **changes: object) -> None:
    file = engine_file(bundle, "tensorrt_rtx").record
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def building(bundle: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Outcome:
    return run_here(["build", bundle, *words], capsys)


def test_fitting_engine_is_not_rebuilt(
    rtx_copy: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = building(rtx_copy, capsys)
    assert outcome.code == 0, outcome.err
    assert f"{rtx_copy}/model.trt-rtx.engine" in outcome.out
    assert not cache.exists()


def stale(bundle: Path) -> str:
    changed_record(bundle, version="1.0")
    return "by TensorRT-RTX 1.0, this machine has"


def foreign(bundle: Path) -> str:
    changed_record(bundle, model="0" * 64)
    return "another model.onnx"


def damaged(bundle: Path) -> str:
    engine = engine_file(bundle, "tensorrt_rtx").engine
    engine.write_bytes(engine.read_bytes()[:-1] + b"?")
    return "changed or damaged"


def absent(bundle: Path) -> str:
    engine_file(bundle, "tensorrt_rtx").engine.unlink()
    return "No such file"


@pytest.mark.parametrize("spoil", [stale, foreign, damaged, absent])
def test_unfit_engine_is_rebuilt_in_cache(
    spoil: object, rtx_copy: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = spoil(rtx_copy)  # type: ignore[operator]
    before = listing(rtx_copy)
    first = building(rtx_copy, capsys)
    assert first.code == 0, first.err
    assert reason in first.out
    assert "done Building" in first.out
    assert listing(rtx_copy) == before, "the bundle is not written to"
    again = building(rtx_copy, capsys)
    assert "Building" not in again.out
    assert str(cache) in again.out


def test_rebuild_replaces_cached_engine(
    rtx_copy: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert building(rtx_copy, capsys, "--rebuild").code == 0
    [engine] = cache.rglob("engine")
    engine.write_bytes(b"half")
    outcome = building(rtx_copy, capsys, "--rebuild")
    assert outcome.code == 0, outcome.err
    record = EngineRecord.model_validate_json(engine.with_name("record.json").read_text("utf-8"))
    bundle = Bundle.open(rtx_copy)
    assert bundle.manifest.engine is not None
    wanted = wanted_here(bundle, bundle.manifest.engine.settings)
    assert engine_cache(wanted.model).entry(wanted).read(wanted)[1] == record


def test_concurrent_builds_make_one_engine(rtx_copy: Path, cache: Path) -> None:
    stale(rtx_copy)
    bundle = Bundle.open(rtx_copy)
    consoles = [Console(record=True, file=StringIO()) for _ in range(3)]
    files: list[EngineFile] = []
    threads = [
        threading.Thread(target=lambda c=console: files.append(build(bundle, console=c)))
        for console in consoles
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(files) == 3
    assert len(set(files)) == 1
    assert sum("done Building" in c.export_text() for c in consoles) == 1


def test_unwritable_cache_is_reported(
    rtx_copy: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale(rtx_copy)
    cache.write_text("a file")
    assert_refused(building(rtx_copy, capsys), VARIABLE)


def test_bundle_for_onnx_is_refused(
    bundle_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(building(bundle_folder, capsys), "--to trt")
