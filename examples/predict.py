"""Label files in this process, with the answers of the server but without one.

    pip install '.[cpu]'
    python examples/predict.py model.bundle first.txt second.txt

Each file gives one line: its name, the label, the label's score and the number of tokens. The exit
status is 1 if a file has no answer. The model must tell labels apart that exclude each other.
"""

import argparse
import sys
from pathlib import Path

import aftserve
from aftexport.errors import AftexportError


def main() -> int:
    """Print the answers; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path, help="a folder written by aftexport")
    parser.add_argument("files", nargs="+", type=Path, help="documents in UTF-8")
    arguments = parser.parse_args()

    failed = False
    with aftserve.Predictor(arguments.bundle) as predictor:
        answers = predictor.infer_each(file.read_text("utf-8") for file in arguments.files)
        for file, answer in zip(arguments.files, answers, strict=True):
            if isinstance(answer, AftexportError):  # the other documents may still have answers
                failed = True
                print(f"{file}: {answer}", file=sys.stderr)
            else:
                score = answer.scores[answer.label]
                print(f"{file}\t{answer.label}\t{score:.3f}\t{answer.tokens_total} tokens")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
