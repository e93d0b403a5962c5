"""``python -m families``: export a tiny model of each family, and write the record.

Each family has a process of its own. A run of some families keeps the rows of the others.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from families.measure import PRECISIONS, measure_alone
from families.record import read_rows, write_rows
from families.table import BY_TITLE


def main() -> None:
    """Measure the families that the command names, by default all."""
    parser = argparse.ArgumentParser(prog="python -m families", description=__doc__)
    titles = list(BY_TITLE)
    parser.add_argument("family", nargs="*", help=f"{', '.join(titles)}; by default all of them")
    parser.add_argument(
        "--fp32", action="store_true", help="leave out bf16 and int8, each an export of its own"
    )
    options = parser.parse_args()
    if unknown := set(options.family) - set(titles):
        parser.error(f"expected {', '.join(titles)}, got {', '.join(sorted(unknown))}")
    rows = {row["family"]: row for row in read_rows()}
    for title in options.family or titles:
        print(f"== {title}", flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows[title] = pool.submit(
                measure_alone, title, () if options.fp32 else PRECISIONS
            ).result()
        # A run that is stopped keeps the families before.
        write_rows([rows[title] for title in titles if title in rows])


if __name__ == "__main__":
    main()
