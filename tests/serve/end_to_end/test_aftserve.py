"""The command ``aftserve``: start, refusals at the start, and unusual tokenizers."""

import json
import shutil
import signal
import socket
from pathlib import Path

import pytest
from bundles import BAD_MANIFESTS, changed_manifest, resealed
from clients import http
from commands import assert_refused, run_python, without
from servers import serving
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from aftexport.system.installation import install_command
from aftserve.predictor import Predictor


def test_interrupt_leaves_no_traceback(bundle_folder: Path, tmp_path: Path) -> None:
    with serving(bundle_folder, tmp_path / "log") as (_, process):
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def test_server_runs_without_torch(bundle_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n")
    blocked = run_python(
        "-c", "import sys; sys.modules.update(torch=None, onnxscript=None); "
        "from rich.console import Console; from aftserve.app import create_app; "
        "from aftserve.server import load; from aftserve.settings import Settings; "
        "models = load(Settings.read(sys.argv[1:]), Console(quiet=True)); create_app(models); "
        "classifier = models.loaded()[0].model.classifier; "
        "print(classifier.classify([classifier.tokenize('a')])[0].heads['logits'].label)",
        bundle_folder, cwd=tmp_path,
    )  # fmt: skip
    assert blocked.code == 0, blocked.err
    assert blocked.out.strip() in ("invoice", "contract", "letter")


@pytest.mark.slow
def test_engine_bundle_without_gpu_uses_onnxruntime(
    no_gpu: None, rtx_bundle: Path, tmp_path: Path
) -> None:
    with serving(rtx_bundle, tmp_path / "log", "--max-tokens", "400") as (address, _):
        answer = http.post(f"{address}/infer", json={"text": "a"}, timeout=30)
        assert answer.json()["label"] in ("invoice", "contract", "letter")
    log = (tmp_path / "log").read_text("utf-8")
    assert "Engine: ONNX Runtime" in log
    assert "Expected a GPU, got none" in log


def test_unavailable_requested_engine_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    outcome = run_python("-m", "aftserve", bundle_folder, "--engine", "tensorrt", cwd=tmp_path)
    assert_refused(outcome, "--to trt")


def test_missing_server_package_is_named(bundle_folder: Path, tmp_path: Path) -> None:
    outcome = without(["uvicorn", "fastapi"], "aftserve", bundle_folder, cwd=tmp_path)
    assert_refused(outcome, install_command("serve"))


@pytest.mark.parametrize(
    "options", [["--port", "x"], ["--port", "65536"], ["--max-tokens", "0"], ["--threads", "-1"]]
)
def test_bad_options_are_refused(options: list[str], bundle_folder: Path, tmp_path: Path) -> None:
    outcome = run_python("-m", "aftserve", bundle_folder, *options, cwd=tmp_path)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert options[0] in outcome.err


def test_damaged_bundle_is_refused(bundle_copy: Path, tmp_path: Path) -> None:
    with (bundle_copy / "model.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0\0")
    outcome = run_python("-m", "aftserve", bundle_copy, cwd=tmp_path)
    assert_refused(outcome, "model.onnx", "copy.bundle")


def test_missing_spill_folder_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    words = ("-m", "aftserve", bundle_folder, "--port", "0", "--spill", "absent")
    assert_refused(run_python(*words, cwd=tmp_path), "absent", "--spill")


@pytest.mark.parametrize("options", [[], ["--spill", "."]])
def test_unwritable_temporary_folder_is_refused(
    options: list[str], bundle_folder: Path, tmp_path: Path
) -> None:
    # Imitate a container with a read-only root and no /tmp: root may write to any other folder.
    nowhere = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/absent']; "
    code = nowhere + "import sys; from aftserve.cli import main; sys.exit(main())"
    outcome = run_python("-c", code, bundle_folder, "--port", "0", *options, cwd=tmp_path)
    assert_refused(outcome, "/proc/absent", "TMPDIR")


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_unavailable_address_refused_before_loading(
    host: str, bundle_folder: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        words = ("-m", "aftserve", bundle_folder, "--host", host, "--port", str(port))
        outcome = run_python(*words, cwd=tmp_path)
    assert_refused(outcome, host, str(port), "--port")
    assert "Checking" not in outcome.out


def test_missing_bundle_is_refused(tmp_path: Path) -> None:
    assert_refused(run_python("-m", "aftserve", "absent", cwd=tmp_path), "absent")


@pytest.mark.parametrize("kind", BAD_MANIFESTS)
def test_mismatched_manifest_refused_before_serving(
    kind: str, bundle_copy: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from aftserve import server
    from aftserve.cli import main
    from aftserve.server import Server

    monkeypatch.setattr(Server, "run", lambda _: None)
    # Logging stays configured for the whole process: later tests would write to a closed stream.
    monkeypatch.setattr(server, "configure_logging", lambda *_: None)
    changed_manifest(bundle_copy, BAD_MANIFESTS[kind])
    code = main([str(bundle_copy)])
    assert code == 2
    assert "copy.bundle" in capsys.readouterr().err


def test_unencodable_word_is_client_error(bundle_copy: Path, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"known": 0}))
    (bundle_copy / "tokenizer.json").write_text(words.to_str())
    with serving(resealed(bundle_copy), tmp_path / "log") as (address, _):
        answer = http.post(f"{address}/infer", json={"text": "unknown"})
    assert answer.status_code == 422, answer.text
    assert isinstance(answer.json()["detail"], str)
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def test_long_words_count_as_single_tokens(bundle_copy: Path) -> None:
    word = "a" * 100
    words = Tokenizer(models.WordLevel({word: 0}))
    words.pre_tokenizer = WhitespaceSplit()
    (bundle_copy / "tokenizer.json").write_text(words.to_str())
    with Predictor(resealed(bundle_copy), threads=1, max_tokens=6000) as predictor:
        assert predictor(" ".join([word] * 5000)).tokens_total == 5000


def test_tokenizer_truncation_and_padding_are_disabled(bundle_copy: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bundle_copy / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    (bundle_copy / "tokenizer.json").write_text(tokenizer.to_str())
    with Predictor(resealed(bundle_copy), threads=1) as predictor:
        assert predictor("seven b").tokens_total == 7


def test_special_token_outside_vocabulary_is_refused(bundle_copy: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bundle_copy / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 300)]
    )
    (bundle_copy / "tokenizer.json").write_text(tokenizer.to_str())
    outcome = run_python("-m", "aftserve", resealed(bundle_copy), "--port", "70000", cwd=tmp_path)
    assert outcome.code == 2
    from aftexport.bundle.tokenizer import check_tokenizer
    from aftexport.errors import AftexportError

    with pytest.raises(AftexportError, match="300"):
        check_tokenizer(tokenizer.to_str(), 300)


def test_bundle_without_tokenizer_takes_only_ids(bundle_copy: Path, tmp_path: Path) -> None:
    (bundle_copy / "tokenizer.json").unlink()
    bundle = resealed(bundle_copy)
    with serving(bundle, tmp_path / "log") as (address, _):
        text = http.post(f"{address}/infer", json={"text": "a"})
        ids = http.post(f"{address}/infer", json={"input_ids": [[1]]})
    assert text.status_code == 422
    assert "input_ids" in text.json()["detail"]
    assert ids.status_code == 200
    shutil.rmtree(bundle)
    assert json.loads(ids.text)["results"]
