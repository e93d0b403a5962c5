"""``python -m aftserve`` is the ``aftserve`` command."""

from typing import NoReturn

from aftexport.system.installation import exit_without_package
from aftexport.system.process import end_process


def run() -> NoReturn:
    """Run the command, and end the process with its status."""
    with exit_without_package():  # an installation without extras has not even rich
        from aftserve.cli import main
    end_process(main)


if __name__ == "__main__":
    run()
