"""``aftserve deploy``."""

from collections.abc import Sequence

from aftexport.system.arguments import make_parser
from aftexport.system.process import interruptible

_EPILOG = """\
Set the server's settings as flags, as AFTSERVE_* variables, or in FILE; each replica uses them.
The section [ray] of FILE has the options of a Ray Serve deployment:

  threads = 2

  [ray.autoscaling_config]
  min_replicas = 1
  max_replicas = 8
  target_ongoing_requests = 4

Without --address, a Ray on this machine runs until SIGTERM or an interrupt. On a cluster, every
node must have aftexport, and the bundle at the same path. The command then returns once the
replicas are ready. Run again, it replaces them one after the other.

Exit status: 0 if the bundle was deployed, or the server stopped on request; 1 if Ray Serve failed;
2 if the bundle or a setting cannot be used. Before it serves, it is 130 if the command was
interrupted and 143 if it was terminated.
"""


def run(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser(
        "aftserve deploy",
        "Serve a bundle from several processes or machines with Ray Serve.",
        _EPILOG,
    )
    parser.usage = (
        "%(prog)s BUNDLE --engine ray [--config FILE] [--address ADDRESS] [--SETTING ...]"
    )
    # Settings.read parses BUNDLE, --config and the settings.
    add = parser.add_argument
    add("--engine", choices=["ray"], required=True, help="system that runs the replicas")
    add("--address", help="address of a Ray cluster (default: RAY_ADDRESS, or a local Ray)")
    options, others = parser.parse_known_args(words)

    from rich.console import Console

    from aftserve.observability.logging import unblock_output
    from aftserve.ray.deployment import DeploymentSettings, deploy

    settings = DeploymentSettings.read(others)
    unblock_output()
    with interruptible() as interruption:
        return deploy(settings, options.address, Console(emoji=False), interruption)
