"""Run in a user's environment on any system: a wheel without kernels verifies and serves bundles.

Run it as ``python try_pure_wheel.py [BUNDLE]``. Without a bundle it exports a model of each
mechanism, which needs torch. The suite itself needs Linux.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aftplugins
import aftserve

START_SECONDS = 120
TEXT = "a long document"


def export_models(folder: Path) -> list[Path]:
    """Export a tiny classifier of each mechanism; the export fails if parity does."""
    import torch

    import aftexport
    from aftexport.nn import LAYERS, ClassifierConfig, DocumentClassifier

    bundles = []
    for name in LAYERS:
        torch.manual_seed(0)
        config = ClassifierConfig(
            mechanism=name, vocab_size=300, num_labels=2, dim=16, depth=1, max_length=512
        )
        model = DocumentClassifier(config).eval()
        out = folder / f"{name}.bundle"
        aftexport.export(model, labels=("letter", "invoice"), tokenizer="bytes", out=out)
        bundles.append(out)
    return bundles


def check_command(*words: str | Path) -> str:
    """Run ``aftexport`` as a process, and return its output without line breaks."""
    command = [sys.executable, "-m", "aftexport", *map(str, words)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return " ".join(done.stdout.split())


def ask_server(bundle: Path, log: Path) -> dict[str, Any]:
    """Serve a bundle on a free port, and return the answer to the text."""
    command = [sys.executable, "-m", "aftserve", str(bundle), "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_SECONDS
        while not (found := re.search(r"http://127.0.0.1:(\d+)", log.read_text("utf-8"))):
            assert server.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < end, log.read_text("utf-8")
            time.sleep(0.1)
        connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        connection.request(
            "POST", "/infer", json.dumps({"text": TEXT}), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        content: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, content
        return content
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    """Check that nothing is fused, that this is said, and that answers are right."""
    reason = aftplugins.missing("onnxruntime")
    assert reason is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        bundles = [Path(word) for word in sys.argv[1:]] or export_models(folder)
        for bundle in bundles:
            assert reason in check_command("inspect", bundle), bundle
            assert "Ship." in check_command("verify", bundle), bundle
            expected = aftserve.Predictor(bundle)(TEXT)
            log = folder / "server.log"
            answer = ask_server(bundle, log)
            assert answer["label"] == expected.label
            for label, score in expected.scores.items():
                assert math.isclose(answer["scores"][label], score, abs_tol=1e-6), bundle
            assert " ".join(log.read_text("utf-8").split()).count(reason) == 1, bundle
            print(f"{bundle.name}: {answer['label']}")


if __name__ == "__main__":
    main()
