from pathlib import Path

import pytest

from aftexport.demo.server import ServerError, ask, serving


def test_server_exit_is_reported_with_output(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(ServerError) as caught, serving(tmp_path / "no-bundle", log):
        pytest.fail("it cannot be serving")
    assert "status 2" in caught.value.problem
    assert "no such folder" in " ".join(caught.value.problem.split())
    assert str(log) in caught.value.remedy


def test_server_answers_only_within_block(bundle_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with serving(bundle_folder, log) as port:
        answer = ask(port, "some text")
        assert answer["label"] in answer["scores"]
        with pytest.raises(ServerError, match="200 from POST /infer, got 4"):
            ask(port, "")
    with pytest.raises(ServerError, match="did not answer"):
        ask(port, "some text")
    assert "Traceback" not in log.read_text("utf-8")
