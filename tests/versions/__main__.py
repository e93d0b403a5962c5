"""``python -m versions``: try the environments of the matrix, one at a time."""

import argparse
import datetime
import shutil
import sys
from pathlib import Path

from interpreters import InterpreterError

from versions.matrix import Environment, digest_tests, read_matrix, read_tests
from versions.suite import (
    LIBRARIES,
    Outcome,
    installed,
    make_environment,
    make_wheel,
    names_with,
    put_row,
    read_record,
    run_suite,
)

WORK = Path("build/versions")


def main() -> int:
    """Run the environments; return 1 if a test fails that is not known to fail."""
    tests, environments = read_matrix()
    parser = argparse.ArgumentParser(prog="python -m versions", description=__doc__)
    names = [environment.name for environment in environments]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(names)}; by default each of them"
    )
    parser.add_argument(
        "--again", action="store_true", help="also those whose row in the record has the same tests"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"expected {', '.join(names)}, got {', '.join(sorted(unknown))}")
    digest = digest_tests(read_tests(tests))
    done = set() if options.again else names_with(digest, read_record())
    chosen = [e for e in environments if e.name in (options.names or names) and e.name not in done]
    if not chosen:
        return 0
    wheel = make_wheel(WORK / "wheels")
    status = 0
    for environment in chosen:
        status |= run(environment, tests, digest, wheel, keep=options.keep)
    return status


def run(environment: Environment, tests: list[str], digest: str, wheel: Path, *, keep: bool) -> int:
    """Run one environment and add its row; return 1 if a test fails unexpectedly."""
    print(f"== {environment.name}", flush=True)
    folder = WORK / environment.name
    try:
        python = make_environment(environment, folder, wheel)
    except InterpreterError as error:
        print(error, file=sys.stderr)
        return 1
    outcome = run_suite(python.absolute(), tests)
    versions = installed(python)
    if not keep:
        shutil.rmtree(folder)
    if unexpected := outcome.unexpected(environment.known):
        print(f"{environment.name}: unexpected: {', '.join(unexpected)}", file=sys.stderr)
        return 1
    put_row(row_of(environment, outcome, versions) | {"tests": digest})
    return 0


def row_of(
    environment: Environment, outcome: Outcome, versions: dict[str, str]
) -> dict[str, object]:
    """Return the row of a run whose tests pass, but for those that are known to fail."""
    return {
        "name": environment.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": environment.python,
        "versions": {name: versions[name] for name in LIBRARIES},
        "processor": processor(),
        "passed": outcome.passed,
        "skipped": outcome.skipped,
        "failed": list(outcome.failed),
        "limits": [known.reason for known in environment.known],
        "cpu_seconds": outcome.cpu_seconds,
    }


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else "unknown"


if __name__ == "__main__":
    sys.exit(main())
