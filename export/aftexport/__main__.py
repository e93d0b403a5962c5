"""The ``aftexport`` command by ``python -m aftexport``."""

from typing import NoReturn

from aftexport.cli import main
from aftexport.system.process import end_process


def run() -> NoReturn:
    """Run the command, and end the process with its status."""
    end_process(main)


if __name__ == "__main__":
    run()
