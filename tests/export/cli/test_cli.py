import json
import os
import re
import shutil
import signal
import stat
from pathlib import Path

import onnxruntime
import pytest
import tiny_models
import torch
from commands import Outcome, assert_refused, listing, run_here, run_python, without
from sampling import any_case

from aftexport import __version__
from aftexport.bundle.bundle import Bundle
from aftexport.cli import COMMANDS
from aftexport.system.installation import install_command


def test_literal_form_writes_bundle_beside_model(
    exporting: tuple[Outcome, Path],
) -> None:
    outcome, folder = exporting
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert {path.name for path in folder.iterdir()} == {"model.pt", "model.bundle"}
    assert Bundle.open(folder / "model.bundle").manifest.heads["logits"].names == tiny_models.LABELS
    for said in ("Ship. All", "within tolerance; the largest error is", "AftSimple", "invoice",
                 "Bundle: model.bundle", "Next: aftserve model.bundle"):  # fmt: skip
        assert said in outcome.out
    lines = [line for line in outcome.out.splitlines() if not line.endswith(" ...")]
    assert len(lines) <= 8, outcome.out


def test_bundle_has_default_folder_permissions(
    exporting: tuple[Outcome, Path], tmp_path: Path
) -> None:
    bundle = exporting[1] / "model.bundle"
    assert stat.S_IMODE(bundle.stat().st_mode) & 0o555 == 0o555
    assert all(os.access(path, os.R_OK) for path in bundle.iterdir())


HELP = {
    ("--help",): ("--to", "--out", "--precision", "--max-length", "--opset", "--no-verify",
                  "--force", "--factory", "--labels", "--tokenizer", "--allow-pickle", "verify",
                  "inspect", "calibrate", "build", "bench", "demo", "--min-length", "--opt-length",
                  "--max-batch", "--workspace", "--timing-cache", "--compute-capability",
                  "modules.json",
                  "Exit status"),
    ("build", "--help"): ("BUNDLE", "--rebuild", "--timing-cache", "AFTEXPORT_CACHE",
                          "Exit status"),
    ("verify", "--help"): ("BUNDLE", "--portable", "--provider", "Exit status"),
    ("inspect", "--help"): ("BUNDLE|MODEL",),
    ("calibrate", "--help"): ("BUNDLE", "--data", "--error-budget", "--out", "--force", "--dry-run",
                              "labels", "Exit status"),
    ("bench", "--help"): ("BUNDLE", "--lengths", "--engine", "--threads", "--rounds", "--against",
                          "--model", "--factory", "--json", "--output", "Exit status"),
    ("demo", "--help"): ("--mechanism", "--data"),
    ("--version",): (__version__,),
}  # fmt: skip


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_names_everything(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(words, capsys)
    assert outcome.code == 0
    for said in HELP[words]:
        assert said.lower() in outcome.out.lower()


BAD_WORDS: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "required"),
    "no target": (["model.pt"], "--to"),
    "no model": (["--to", "onnx"], "model"),
    "unknown target": (["model.pt", "--to", "coreml"], "coreml"),
    "unknown option": (["model.pt", "--to", "onnx", "--quantize"], "--quantize"),
    "unknown precision": (["model.pt", "--to", "onnx", "--precision", "int4"], "int4"),
    "opset a word": (["model.pt", "--to", "onnx", "--opset", "new"], "new"),
    "two models": (["model.pt", "other.pt", "--to", "onnx"], "other.pt"),
    "a length that is no number": (["model.pt", "--to", "trt", "--opt-length", "1,x"], "x"),
    "a batch of none": (["model.pt", "--to", "trt", "--max-batch", "0"], "--max-batch"),
    "build nothing": (["build"], "BUNDLE"),
    "verify nothing": (["verify"], "BUNDLE"),
    "verify two": (["verify", "a", "b"], "b"),
    "verify a provider unknown": (["verify", "a", "--provider", "rocm"], "rocm"),
    "inspect nothing": (["inspect"], "BUNDLE"),
    "bench nothing": (["bench"], "BUNDLE"),
    "bench no rounds": (["bench", "a", "--rounds", "0"], "--rounds"),
    "bench an engine unknown": (["bench", "a", "--engine", "coreml"], "coreml"),
}


@pytest.mark.parametrize("kind", BAD_WORDS)
def test_wrong_arguments_show_usage(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words, said = BAD_WORDS[kind]
    monkeypatch.chdir(tmp_path)
    outcome = run_here(words, capsys)
    assert outcome.code == 2
    assert re.fullmatch(r"error: aftexport.*\n  .*[sS]ee aftexport.* --help\.\n", outcome.err)
    assert said in outcome.err
    assert not listing(tmp_path)


def test_shortened_option_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run_here(["model.pt", "--to", "onnx", "--forc"], capsys), "Write --force")


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "opset too old": (["--opset", "17"], "18 to 25"),
    "opset too new": (["--opset", "26"], "18 to 25"),
    "max length 0": (["--max-length", "0"], "--max-length"),
    "max length negative": (["--max-length", "-5"], "--max-length"),
    "max length no engine can index": (["--max-length", "999999999999"], "1048576"),
    "labels too few": (["--labels", "a,b"], "label"),
    "labels too many": (["--labels", "a,b,c,d"], "label"),
    "labels twice": (["--labels", "a,a,b"], "label"),
    "labels that differ in spaces": (["--labels", "a, a,b"], "label"),
    "labels empty": (["--labels", ""], "label"),
    "a label without a name": (["--labels", "a,,b"], "label"),
    "tokenizer absent": (["--tokenizer", "absent.json"], "absent.json"),
    "tokenizer a folder": (["--tokenizer", "."], "--tokenizer"),
    "tokenizer no JSON": (["--tokenizer", "words.txt"], "tokenizer"),
    "tokenizer no Unicode": (["--tokenizer", "latin.txt"], "latin.txt"),
}


@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_unsuitable_option_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, said = BAD_OPTIONS[kind]
    monkeypatch.chdir(tmp_path)
    torch.save(tiny_models.Bag().state_dict(), "model.pt")
    Path("words.txt").write_text("no tokenizer")
    Path("latin.txt").write_bytes(b"\xe9")
    before = listing(tmp_path)
    words = ["model.pt", "--to", "onnx", "--factory", "tiny_models:Bag", *options]
    assert_refused(run_here(words, capsys), said)
    assert listing(tmp_path) == before


def test_labels_allow_spaces_after_commas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", "tiny_models:Bag", "--to", "onnx", "--out", tmp_path / "b", "--no-verify"]
    outcome = run_here([*words, "--labels", "a, b b ,c"], capsys)
    assert outcome.code == 0, outcome.err
    assert Bundle.open(tmp_path / "b").manifest.heads["logits"].names == ("a", "b b", "c")


@pytest.mark.slow
def test_file_size_limit_blames_no_path(checkpoint_file: Path, tmp_path: Path) -> None:
    """A file that grows too large is not blamed on its path."""
    code = (
        "import resource, sys; from aftexport.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); sys.exit(main())"
    )
    outcome = run_python("-c", code, checkpoint_file, "--to", "onnx", "--out", "b", cwd=tmp_path)
    assert_refused(outcome, "File too large", "ulimit")
    assert "Check the path" not in outcome.err
    assert listing(tmp_path) == {}


def test_unneeded_factory_is_refused(
    checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        checkpoint_file,
        "--to",
        "onnx",
        "--factory",
        "tiny_models:Bag",
        "--out",
        tmp_path / "out",
    ]
    assert_refused(run_here(words, capsys), "tiny_models:Bag")
    assert not listing(tmp_path)


def test_limit_of_one_token_is_kept(
    checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [checkpoint_file, "--to", "onnx", "--max-length", "1", "--out", tmp_path / "one"]
    outcome = run_here(words, capsys)
    assert outcome.code == 0, outcome.err
    assert Bundle.open(tmp_path / "one").manifest.max_tokens == 1


@pytest.mark.parametrize(
    "name", ["[red]model.pt", "model [bold].pt", "modèle.pt", "a[/b]/c.pt", "a:x:b.pt"]
)
def test_markup_names_are_shown_verbatim(
    name: str, checkpoint_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkpoint_file, name)
    outcome = run_here(["inspect", name], capsys)
    assert outcome.code == 0, outcome.err
    assert name in outcome.out
    assert_refused(run_here([f"{name}.absent", "--to", "onnx"], capsys), f"{name}.absent")


@pytest.mark.parametrize("name", ["[red]bundle", "a[/b]/c"])
def test_bundle_with_markup_name_is_shown(
    name: str, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundle_folder, name)
    for command in ("verify", "inspect"):
        outcome = run_here([command, name], capsys)
        assert outcome.code == 0, outcome.err
        assert name in outcome.out


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="ONNX Runtime has the CUDA execution provider",
)
def test_missing_provider_error_has_remedy(
    bundle_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(["verify", bundle_folder, "--provider", "cuda"], capsys)
    assert_refused(outcome, install_command("cuda"))


def test_inspect_shows_bundle_and_changes_nothing(
    bundle_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(bundle_folder)
    outcome = run_here(["inspect", bundle_folder], capsys)
    assert outcome.code == 0
    for said in (
        "aft_simple",
        "300",
        "1048576 tokens",
        *tiny_models.LABELS,
        "fp32",
        "model.onnx",
        "AftSimple",
        "MiB for 1,024",
        "8,192",
        "1,048,576",
    ):
        assert said in outcome.out
    assert listing(bundle_folder) == before


def test_inspect_reports_unchecked_parity(
    bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bundles import resealed

    (bundle_copy / "parity.json").write_text('{"cases": [], "checked": false}')
    assert "Not checked" in run_here(["inspect", resealed(bundle_copy)], capsys).out


def test_inspect_prints_no_none(bundle_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "None" not in run_here(["inspect", bundle_folder], capsys).out


def test_inspect_as_json(
    bundle_folder: Path, checkpoint_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = json.loads(run_here(["inspect", bundle_folder, "--json"], capsys).out)
    assert (bundle["verdict"], bundle["gaps"]) == ("Ship", [])
    assert bundle["worst"]["passed"]
    assert bundle["operators"]["AftSimple"]["nodes"] == 1
    assert bundle["manifest"]["heads"]["logits"]["labels"] == [*tiny_models.LABELS]
    model = json.loads(run_here(["inspect", checkpoint_file, "--json"], capsys).out)
    assert (model["kind"], model["labels"]) == ("aftexport checkpoint", [*tiny_models.LABELS])


def test_inspect_shows_a_model_file(
    checkpoint_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(["inspect", checkpoint_file], capsys)
    assert outcome.code == 0
    for said in ("aftexport checkpoint", "aft_simple", "invoice", "weights"):
        assert said in outcome.out


def test_inspect_of_pickle_needs_permission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(tiny_models.Bag(), tmp_path / "model.pt")
    assert_refused(run_here(["inspect", tmp_path / "model.pt"], capsys), "--allow-pickle")
    outcome = run_here(["inspect", "--allow-pickle", tmp_path / "model.pt"], capsys)
    assert outcome.code == 0
    assert "pickled module" in outcome.out


ENGINE_OPTIONS = ("--min-length", "--opt-length", "--workspace", "--compute-capability",
                  "--timing-cache")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--factory", "tiny_models:Bag", "--to", "onnx", "--allow-pickle"), "--allow-pickle"),
        (("--factory", "tiny_models:Bag", "--to", "onnx", "--trust-remote-code"), "--trust-remote"),
        (("CHECKPOINT", "--to", "onnx", "--trust-remote-code"), "--trust-remote-code"),
        (("CHECKPOINT", "--to", "trt", "--no-batching", "--max-batch", "4"), "--max-batch 4"),
        *(
            (("CHECKPOINT", "--to", to, option, "86"), "Engine options need --to trt")
            for to in ("onnx", "triton")
            for option in ENGINE_OPTIONS
        ),
        (("CHECKPOINT", "--to", "trt", "--compute-capability", "86"), "--compute-capability"),
        (("CHECKPOINT", "--to", "trt-rtx", "--timing-cache", "a"), "--timing-cache"),
        (("CHECKPOINT", "--to", "trt", "--precision", "int8"), "--precision"),
        (("CHECKPOINT", "--to", "onnx", "--tolerance", "0.1"), "--tolerance"),
        (("CHECKPOINT", "--to", "onnx", "--features", "3"), "features"),
        (("inspect", "BUNDLE", "--allow-pickle"), "--allow-pickle"),
        (("verify", "BUNDLE", "--trust-remote-code"), "--trust-remote-code"),
        (("bench", "BUNDLE", "--model", "CHECKPOINT", "--against", "portable"), "torch"),
        (("calibrate", "BUNDLE", "--data", "d.jsonl", "--force"), "--force needs --out"),
        (("calibrate", "BUNDLE", "--data", "d.jsonl", "--dry-run", "--out", "o"), "--dry-run"),
    ],
)
def test_option_without_effect_is_refused(
    words: tuple[str, ...],
    option: str,
    checkpoint_file: Path,
    bundle_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"CHECKPOINT": checkpoint_file, "BUNDLE": bundle_folder}
    is_export = "--to" in words
    out = ("--out", tmp_path / "b") if is_export else ()
    outcome = run_here([*(given.get(word, word) for word in words), *out], capsys)
    assert_refused(outcome, option)
    assert not list(tmp_path.iterdir())


def test_inspect_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    outcome = run_here(["inspect", tmp_path / "empty"], capsys)
    assert_refused(outcome, "empty", "manifest.json", "config.json", "modules.json")
    assert_refused(run_here(["inspect", tmp_path / "absent"], capsys), "absent")


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_check_runs_without_torch(command: str, bundle_folder: Path, tmp_path: Path) -> None:
    words = [command, bundle_folder]
    outcome = without(
        ["torch", "onnxscript", "onnx_ir", "fastapi"], "aftexport", *words, cwd=tmp_path
    )
    assert outcome.code == 0, outcome.err


def test_export_without_torch_names_package(checkpoint_file: Path, tmp_path: Path) -> None:
    outcome = without(["torch"], "aftexport", checkpoint_file, "--to", "onnx", cwd=tmp_path)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert install_command("torch") in outcome.err


def test_command_refuses_bad_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"\x80\x02.")
    outcome = run_python("-m", "aftexport", "model.pt", "--to", "onnx", cwd=tmp_path)
    assert_refused(outcome, "model.pt")
    assert listing(tmp_path).keys() == {"model.pt"}


_STOPPED = """
import os, signal, sys
from aftexport.cli import main

stopped = False

def stop(event, given):
    global stopped
    if event == "open" and str(given[0]).endswith("/parity.json"):
        assert any(name.startswith(".") for name in os.listdir())
        stopped = True
        os.kill(os.getpid(), {number})
    if event == "shutil.rmtree" and stopped and {number} == signal.SIGTERM:
        os.kill(os.getpid(), {number})  # as to the process and to its group

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
sys.addaudithook(stop)
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_export_leaves_nothing(
    number: signal.Signals, checkpoint_file: Path, tmp_path: Path
) -> None:
    code = _STOPPED.format(number=int(number))
    words = [checkpoint_file, "--to", "onnx", "--out", "model.bundle"]
    outcome = run_python("-c", code, *words, cwd=tmp_path)
    assert outcome.code == 128 + number, outcome.err
    assert "Traceback" not in outcome.err
    assert "interrupted" in outcome.err
    assert listing(tmp_path) == {}


def test_export_leaves_no_other_files(bundle_folder: Path, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry would write to the home and the temporary folder."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(temporary)}
    code = (
        "import os, sys; os.environ.pop('ORT_DISABLE_TELEMETRY', None); "
        "from aftexport.cli import main; sys.exit(main())"
    )
    outcome = run_python("-c", code, "verify", bundle_folder, cwd=tmp_path, **places)
    assert outcome.code == 0, outcome.err
    assert listing(home) == listing(temporary) == {}


def test_terminal_without_unicode_works(bundle_copy: Path, tmp_path: Path) -> None:
    from bundles import changed_manifest, classes

    changed_manifest(bundle_copy, classes(["é", "契約", "letter"]))
    outcome = run_python(
        "-m", "aftexport", "inspect", bundle_copy, cwd=tmp_path, PYTHONIOENCODING="ascii"
    )
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("factory", ["EmbeddedPositions", "ClassToken"])
def test_model_limit_is_shown_and_kept(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory_of = f"tiny_models:{factory}"
    words = ["--factory", factory_of, "--to", "onnx", "--out", tmp_path / "b", "--no-verify"]
    outcome = run_here(words, capsys)
    assert outcome.code == 0, outcome.err
    most = Bundle.open(tmp_path / "b").manifest.max_tokens
    assert f"at most {most} tokens" in outcome.out
    assert most is not None
    assert_refused(run_here([*words, "--force", "--max-length", str(most + 1)], capsys), "--max")


def test_limit_of_export_must_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forward takes 32 tokens of the 63 that the config declares."""
    words = ["--factory", "tiny_models:FewerPositions", "--to", "onnx", "--out", tmp_path / "b"]
    said = ("the 63 tokens of the model's config", "at most 32", "Add --max-length 32")
    assert_refused(run_here([*words, "--no-verify"], capsys), *said)
    assert not (tmp_path / "b").exists()
    outcome = run_here([*words, "--no-verify", "--max-length", "32"], capsys)
    assert outcome.code == 0, outcome.err
    assert Bundle.open(tmp_path / "b").manifest.max_tokens == 32


IMPORTED = (
    "import sys\n"
    "from aftexport.cli import main\n"
    "try:\n"
    "    main(sys.argv[1:])\n"
    "except SystemExit:\n"
    "    print(*(name for name in sys.modules if '.' not in name), file=sys.stderr)\n"
)
HEAVY = {"torch", "onnxruntime", "onnx", "onnxscript", "numpy", "tokenizers", "pydantic", "loky"}


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_imports_no_heavy_module(words: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run_python("-c", IMPORTED, *words, "--help", cwd=tmp_path)
    assert "usage: aftexport" in outcome.out
    assert not HEAVY & set(outcome.err.split())
    assert len(outcome.err.split()) > 50


def test_export_is_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(["export", "--help"], capsys)
    assert outcome == run_here(["--help"], capsys)
    assert "--precision" in outcome.out
    assert outcome == run_here(["help"], capsys)
    assert run_here(["help", "verify"], capsys) == run_here(["verify", "--help"], capsys)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("verfy", "x"), "Write aftexport verify"),
        (("serve", "a.bundle"), "Write aftserve a.bundle,"),
        (("convert", "--to", "onnx"), "Write aftexport MODEL --to onnx,"),
        (("Inspect", "x"), "Write aftexport inspect"),
        (("model.pt", "--force"), "Write aftexport MODEL --to onnx,"),
        (("model.pt", "--too", "onnx"), "Write --to,"),
        (("export", "model.pt", "--to", "onnx", "--presision=fp16"), "Write --precision"),
        (("verify", "x", "--portabel"), "Write --portable"),
        (("model.pt", "--to", "onnx", "--zzzz"), "unrecognized arguments: --zzzz"),
    ],
)
def test_mistyped_word_gets_suggestion(
    words: tuple[str, ...],
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_here(words, capsys)
    assert outcome.code == 2
    assert remedy in outcome.err


def test_missing_model_is_no_mistyped_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_here(["model.pt", "--to", "onnx"], capsys)
    assert outcome.code == 2
    assert "Write aftexport" not in outcome.err


@pytest.mark.parametrize("command", [["verify"], ["bench", "--lengths", "5", "--rounds", "1"]])
def test_json_is_only_output(
    command: list[str], bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, bundle_folder, "--json", "-o", tmp_path / "results.json"]
    outcome = run_here(words, capsys)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == json.loads((tmp_path / "results.json").read_text("utf-8"))
