"""The public interface for editors: a user's file passes ``mypy --strict``, with types that say
more than Any, and the packages show their names."""

import pydoc
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import aftexport
import aftserve

REPOSITORY = Path(__file__).parents[1]
SETTINGS = REPOSITORY / "pyproject.toml"
USER_FILE = '''
"""A training script, a job and a service of a user."""

from pathlib import Path

import numpy as np
import torch

import aftexport
import aftserve
from aftexport.errors import AftexportError, ParityError
from aftexport.nn import (
    AftLocal,
    ClassifierConfig,
    DocumentClassifier,
    HeadConfig,
    MultiHeadClassifier,
    MultiHeadConfig,
    task_loss,
)
from aftserve.client import BusyError, Client, Part, Result, ServerError


def train(path: Path) -> None:
    config = ClassifierConfig(
        mechanism="aft_local", vocab_size=256, num_labels=2, dim=16, depth=1
    )
    model = DocumentClassifier(config)
    ids, lengths = torch.zeros(1, 8, dtype=torch.int64), torch.tensor([8])
    logits = model(ids, lengths)
    loss = task_loss("single_label_classification", logits, torch.zeros(1, dtype=torch.int64))
    print(loss.item())
    layer: torch.nn.Module = AftLocal(16, window=4)
    print(layer, MultiHeadClassifier, MultiHeadConfig, HeadConfig)
    aftexport.save(path, model=model, labels=("invoice", "letter"))
    checkpoint = aftexport.load(path)
    reveal_type(checkpoint.labels)


def convert(path: Path) -> Path:
    try:
        source = aftexport.ModelSource(path, allow_pickle=True)
        options = aftexport.ExportOptions(to="trt", engine=aftexport.EngineOptions(max_batch=4))
        bundle = aftexport.export(source, options, out=path.with_suffix(".bundle"))
    except ParityError as error:
        print(error.problem, error.remedy)
        raise
    reveal_type(bundle.path)
    return bundle.path


def predict(bundle: Path) -> list[str | None]:
    with aftserve.Predictor(bundle, threads=2) as predictor:
        one = predictor("a text", evidence=3)
        reveal_type(one)
        several = predictor(["a text", [1, 2], np.zeros((3, 4), np.float32)], progress=False)
        reveal_type(several)
        for answer in predictor.infer_each(text for text in ("a", "b")):
            reveal_type(answer)
            if isinstance(answer, AftexportError):
                print(answer.remedy)
        wrong: int = one.label
        return [result.label for result in several]


def ask(url: str) -> Result:
    with Client(url, deadline=60) as client:
        try:
            result = client.infer("a text")
        except BusyError as error:
            print(error.retry_after)
            raise
        reveal_type(result.heads)
        for answer in client.infer_each(["a", "b"]):
            print(answer if isinstance(answer, ServerError) else answer.scores)
        with client.stream("a text") as stream:
            for part in stream:
                print(isinstance(part, Part))
        return result
'''
REVEALED = [
    "tuple[str, ...] | None",
    "pathlib.Path",
    "Result",
    "list[Result]",
    "Result | AftexportError",
    "Mapping[str, HeadAnswer] | None",
]
"""The types that are not Any, without the names of their modules."""


def test_strict_user_file(tmp_path: Path) -> None:
    """The project's own settings are strict, so the cache of `make lint` has torch and NumPy."""
    assert tomllib.loads(SETTINGS.read_text("utf-8"))["tool"]["mypy"]["strict"]
    (tmp_path / "user.py").write_text(USER_FILE)
    cache = REPOSITORY / ".mypy_cache"
    if cache.is_dir():  # a copy, so that the test leaves the cache of `make lint` as it was
        shutil.copytree(cache, tmp_path / "cache")
    words = ["--config-file", SETTINGS, "--cache-dir", tmp_path / "cache", tmp_path / "user.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = done.stdout + done.stderr
    revealed = re.findall(r'Revealed type is "(.*)"', said)
    assert [re.sub(r"\b(?:aft\w+|collections|typing|builtins)\.(?:\w+\.)*", "", one)
            for one in revealed] == REVEALED, said  # fmt: skip
    errors = [line for line in said.splitlines() if "error:" in line]
    assert len(errors) == 1, said
    assert 'expression has type "str | None", variable has type "int"' in errors[0]


def test_packages_show_their_public_names() -> None:
    """In ``dir``, which completion reads, and in ``help``."""
    for package in (aftexport, aftserve):
        assert set(package.__all__) <= set(dir(package))
        text = pydoc.render_doc(package, renderer=pydoc.plaintext)
        for name in set(package.__all__) - {"__version__"}:
            assert re.search(rf"(class|^    ) ?{name}\b", text, re.MULTILINE), name
