"""``aftserve health``."""

import socket
import ssl
import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from aftexport.errors import UsageError
from aftexport.system.arguments import make_parser

if TYPE_CHECKING:  # slow: other commands do not need it
    from aftserve.settings import Settings

_TIMEOUT_SECONDS = 3.0
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address that reaches a server on all addresses."""
_EPILOG = """\
It takes the settings of the server, as flags, as AFTSERVE_* variables, or in the file of --config,
and asks GET /healthz at its Unix socket, or else at its first address; by TLS if it has a
certificate, which is not compared with a name.

Exit status: 0 if the server is alive, 1 if it is not, 2 if a setting cannot be used.
"""


def run(words: Sequence[str]) -> int:
    """Ask a server on this machine whether it is alive; return the exit status."""
    parser = make_parser("aftserve health", "Ask a server on this machine for its health.", _EPILOG)
    parser.usage = "%(prog)s [--pid PID] [--SETTING ...]"
    parser.add_argument(
        "--pid",
        type=int,
        metavar="PID",
        help="process of the server, whose flags are read first; 1 in a container",
    )
    options, others = parser.parse_known_args(words)
    flags = _flags_of(options.pid) if options.pid is not None else []
    from aftserve.settings import Settings

    settings = Settings.read([*flags, *others])
    try:
        status = _ask(settings)
    except (OSError, HTTPException) as error:
        print(f"The server does not answer: {error}.", file=sys.stderr)
        return 1
    if status != 200:
        print(f"Expected the status 200 of /healthz, got {status}.", file=sys.stderr)
    return int(status != 200)


def _flags_of(pid: int) -> list[str]:
    """Return the flags of the process of a server, which another program may have started."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text("utf-8").split("\0")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Expected the command line of process {pid}, got: {error}.",
            "Give the flags of the server instead of --pid.",
        ) from error
    command = next((i for i, word in enumerate(words) if Path(word).name == "aftserve"), None)
    if command is None:
        raise UsageError(
            f"Process {pid} is not aftserve: {' '.join(words)[:200]}.",
            "Give the flags of the server instead of --pid.",
        )
    given = words[command + 1 :]
    return given[1:] if given[:1] == ["serve"] else given


def _ask(settings: "Settings") -> int:
    """Return the status of ``GET /healthz``."""
    with _connect(settings) as connected:
        connection = HTTPConnection("localhost")
        connection.sock = connected
        connection.request("GET", "/healthz")
        return connection.getresponse().status


def _connect(settings: "Settings") -> socket.socket:
    """Connect to the server, by TLS if it has a certificate."""
    if settings.uds is not None:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(_TIMEOUT_SECONDS)
        connected.connect(str(settings.uds))
    elif settings.port == 0:
        raise UsageError("--port 0 is a free port, which is not known.", "Give the server a port.")
    else:
        host = settings.port_hosts[0]
        address = _LOOPBACK.get(host, host), settings.port
        connected = socket.create_connection(address, _TIMEOUT_SECONDS)
    if settings.ssl_certfile is None:
        return connected
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the answer says only that the server is alive
    return context.wrap_socket(connected)
