"""``python -m aftserve`` is the ``aftserve`` command."""

from typing import NoReturn

from aftexport.system.process import end_process
from aftserve.cli import main


def run() -> NoReturn:
    """Run the command, and end the process with its status."""
    end_process(main)


if __name__ == "__main__":
    run()
