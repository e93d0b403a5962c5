"""The warning before the limit on open files."""

from contextlib import ExitStack
from pathlib import Path

from clients import eventually, http, raw_connection
from servers import serving

_FEW_FILES = (
    "-c",
    """
import resource, sys
from aftserve.cli import main

resource.setrlimit(resource.RLIMIT_NOFILE, (80, 100))
sys.exit(main())
""",
)


def test_open_file_limit_is_logged_once(bundle_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(bundle_folder, log, program=_FEW_FILES, measured=True) as (address, process):
        warning = "files are open, the limit is 100"

        def open_files() -> int:
            return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))

        with ExitStack() as stack:
            while (before := open_files()) < 85:
                stack.enter_context(raw_connection(address))
                eventually(lambda: open_files() > before, "the connection is accepted")
            assert warning not in log.read_text("utf-8")
            for _ in range(40):
                stack.enter_context(raw_connection(address))
            eventually(lambda: warning in log.read_text("utf-8"), "the warning is logged")
        eventually(lambda: open_files() < 80, "the connections are closed")
        assert http.get(f"{address}/healthz").status_code == 200
    assert log.read_text("utf-8").count(warning) == 1
