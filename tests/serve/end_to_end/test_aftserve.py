import json
import shutil
import signal
import socket
from pathlib import Path

import httpx
import pytest
from bundles import BAD_MANIFESTS, changed_manifest, resealed
from clients import http
from commands import assert_refused, run_python, without
from servers import serving
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing


def test_a_signal_to_stop_ends_it_with_status_zero(bundle_folder: Path, tmp_path: Path) -> None:
    with serving(bundle_folder, tmp_path / "log") as (address, process):
        assert http.post(f"{address}/infer", json={"text": "a"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def test_an_interrupt_ends_it_without_a_traceback(bundle_folder: Path, tmp_path: Path) -> None:
    with serving(bundle_folder, tmp_path / "log") as (_, process):
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def test_it_serves_where_torch_cannot_be_imported(bundle_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n")
    blocked = run_python(
        "-c", "import sys; sys.modules.update(torch=None, onnxscript=None); "
        "from rich.console import Console; from aftserve.app import create_app; "
        "from aftserve.server import load; from aftserve.settings import Settings; "
        "service = load(Settings.read(sys.argv[1:]), Console(quiet=True)); create_app(service); "
        "classifier = service.model.classifier; "
        "print(classifier.classify([classifier.tokenize('a')])[0].label)",
        bundle_folder, cwd=tmp_path,
    )  # fmt: skip
    assert blocked.code == 0, blocked.err
    assert blocked.out.strip() in ("invoice", "contract", "letter")


def test_without_a_gpu_a_bundle_with_an_engine_is_served_by_onnxruntime_and_it_says_why(
    no_gpu: None, rtx_bundle: Path, tmp_path: Path
) -> None:
    with serving(rtx_bundle, tmp_path / "log", "--max-tokens", "400") as (address, _):
        answer = http.post(f"{address}/infer", json={"text": "a"}, timeout=30)
        assert answer.json()["label"] in ("invoice", "contract", "letter")
    log = (tmp_path / "log").read_text("utf-8")
    assert "Engine: ONNX Runtime" in log
    assert "Expected a GPU, got none" in log


def test_an_engine_that_cannot_be_had_is_refused_where_it_was_asked_for(
    bundle_folder: Path, tmp_path: Path
) -> None:
    outcome = run_python("-m", "aftserve", bundle_folder, "--engine", "tensorrt", cwd=tmp_path)
    assert_refused(outcome, "--to trt")


def test_a_missing_server_package_is_said_plainly(bundle_folder: Path, tmp_path: Path) -> None:
    outcome = without(["uvicorn", "fastapi"], "aftserve", bundle_folder, cwd=tmp_path)
    assert_refused(outcome, "aftexport[serve]")


def test_a_busy_port_is_said_plainly(bundle_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        outcome = run_python("-m", "aftserve", bundle_folder, "--port", port, cwd=tmp_path)
    assert outcome.code not in (0, None)
    assert "Traceback" not in outcome.err
    assert "in use" in outcome.err
    assert port in outcome.err


@pytest.mark.parametrize(
    "options", [["--port", "x"], ["--port", "65536"], ["--max-tokens", "0"], ["--threads", "-1"]]
)
def test_bad_options_are_refused(options: list[str], bundle_folder: Path, tmp_path: Path) -> None:
    outcome = run_python("-m", "aftserve", bundle_folder, *options, cwd=tmp_path)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert options[0] in outcome.err


def test_a_bad_bundle_is_refused(bundle_copy: Path, tmp_path: Path) -> None:
    with (bundle_copy / "model.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0\0")
    outcome = run_python("-m", "aftserve", bundle_copy, cwd=tmp_path)
    assert_refused(outcome, "model.onnx", "copy.bundle")


def test_a_folder_to_spill_to_that_is_not_there_is_refused(
    bundle_folder: Path, tmp_path: Path
) -> None:
    words = ("-m", "aftserve", bundle_folder, "--port", "0", "--spill", "absent")
    assert_refused(run_python(*words, cwd=tmp_path), "absent", "--spill")


@pytest.mark.parametrize("options", [[], ["--spill", "."]])
def test_where_no_temporary_file_can_be_written_it_is_said(
    options: list[str], bundle_folder: Path, tmp_path: Path
) -> None:
    # As in a container with a read-only root and no /tmp; here root could write anywhere.
    nowhere = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/absent']; "
    code = nowhere + "import sys; from aftserve.cli import main; sys.exit(main())"
    outcome = run_python("-c", code, bundle_folder, "--port", "0", *options, cwd=tmp_path)
    assert_refused(outcome, "/proc/absent", "TMPDIR")


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_an_address_that_cannot_be_had_is_refused_before_the_model_is_loaded(
    host: str, bundle_folder: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("-m", "aftserve", bundle_folder, "--host", host, "--port", str(port))
        outcome = run_python(*words, cwd=tmp_path)
    assert_refused(outcome, host, str(port), "--port")
    assert "Checking" not in outcome.out


def test_a_missing_bundle_is_refused(tmp_path: Path) -> None:
    assert_refused(run_python("-m", "aftserve", "absent", cwd=tmp_path), "absent")


@pytest.mark.parametrize("kind", BAD_MANIFESTS)
def test_a_manifest_that_does_not_fit_the_model_is_refused_before_serving(
    kind: str, bundle_copy: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from aftserve import server
    from aftserve.cli import main
    from aftserve.server import Server

    monkeypatch.setattr(Server, "run", lambda _: None)
    # For the whole process it would be: tests after this one would write to a stream long closed.
    monkeypatch.setattr(server, "configure_logging", lambda _: None)
    changed_manifest(bundle_copy, BAD_MANIFESTS[kind])
    code = main([str(bundle_copy)])
    assert code == 2
    assert "copy.bundle" in capsys.readouterr().err


def ask(bundle: Path, log: Path, text: str, *options: str) -> httpx.Response:
    with serving(bundle, log, *options) as (address, _):
        answer = http.post(f"{address}/infer", json={"text": text}, timeout=30)
    assert "Traceback" not in log.read_text("utf-8")
    return answer


def test_a_word_the_tokenizer_cannot_encode_is_the_senders_error(
    bundle_copy: Path, tmp_path: Path
) -> None:
    words = Tokenizer(models.WordLevel({"known": 0}))
    (bundle_copy / "tokenizer.json").write_text(words.to_str())
    answer = ask(resealed(bundle_copy), tmp_path / "log", "unknown")
    assert answer.status_code == 422, answer.text
    assert isinstance(answer.json()["detail"], str)


def test_long_words_are_counted_and_taken(bundle_copy: Path, tmp_path: Path) -> None:
    word = "a" * 100
    words = Tokenizer(models.WordLevel({word: 0}))
    words.pre_tokenizer = WhitespaceSplit()
    (bundle_copy / "tokenizer.json").write_text(words.to_str())
    text = " ".join([word] * 5000)
    answer = ask(resealed(bundle_copy), tmp_path / "log", text, "--max-tokens", "6000")
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_total"] == 5000


def test_a_tokenizer_that_truncates_and_pads_is_kept_from_both(
    bundle_copy: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(bundle_copy / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    (bundle_copy / "tokenizer.json").write_text(tokenizer.to_str())
    answer = ask(resealed(bundle_copy), tmp_path / "log", "seven b")
    assert answer.json()["tokens_total"] == 7


def test_a_special_token_past_the_vocabulary_is_found_before_serving(
    bundle_copy: Path, tmp_path: Path
) -> None:
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


def test_a_bundle_without_a_tokenizer_takes_ids_alone(bundle_copy: Path, tmp_path: Path) -> None:
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
