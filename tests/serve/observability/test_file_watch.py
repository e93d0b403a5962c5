"""A watch of files: exceptions of the functions that read the files and use their content."""

import asyncio
import logging
from pathlib import Path

import pytest

from aftexport.errors import UsageError
from aftserve.observability.file_watch import FileWatch

LOGGER = logging.getLogger("aftserve.test")


@pytest.mark.parametrize("at_use", [False, True])
@pytest.mark.parametrize("error", [UsageError("broken", "Mend it."), RuntimeError("broken")])
def test_failed_reload_keeps_watching(
    error: Exception, at_use: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, used = tmp_path / "file", list[str]()
    file.write_text("first")

    def read() -> str:
        text = file.read_text("utf-8")
        if text == "bad" and not at_use:
            raise error
        return text

    def use(text: str) -> str:
        if text == "bad":
            raise error
        used.append(text)
        return text

    async def until_logged(message: str) -> None:
        async with asyncio.timeout(30):
            while not any(message in one.message for one in caplog.records):
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with FileWatch([file], read, use, name="words", logger=LOGGER).running():
            file.write_text("bad")
            await until_logged("the previous words stay in use")
            file.write_text("second")
            await until_logged("using the words of second")

    with caplog.at_level(logging.INFO, LOGGER.name):
        asyncio.run(scenario())
    assert used == ["second"]
    assert caplog.text.count("broken") >= 1
    assert ("Traceback" in caplog.text) == isinstance(error, RuntimeError)
