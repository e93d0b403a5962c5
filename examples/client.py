"""Ask a running server for the labels or values of documents.

    pip install '.[client]'
    aftserve model.bundle --port 8000
    python examples/client.py http://localhost:8000 first.txt second.txt
    cat document.txt | python examples/client.py http://localhost:8000 --evidence 3

Each document gives one line: its name, the label, the label's score and the number of tokens. The
answer of a model with another task is its labels with their scores, or its values.
``--evidence N`` adds up to N passages that contribute most to the largest logit, where the model
allows it. If the server asks for an API key, put it into the variable ``API_KEY``. The exit status
is 1 if a document has no answer.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from aftserve.client import Client, Result, ServerError


def read_documents(files: list[Path]) -> Iterator[str]:
    """Yield the text of each file, or of standard input if there are none."""
    if not files:
        yield sys.stdin.read()
    for file in files:
        yield file.read_text("utf-8")


def describe_answer(result: Result) -> str:
    """Return the label and its score, or the labels that hold or the values of each head."""
    if result.heads is None:
        return f"{result.label}\t{result.scores[result.label]:.3f}"
    parts = []
    for head in result.heads.values():
        numbers = head.values or {label: head.scores[label] for label in head.labels}
        parts += [f"{name}\t{number:.6g}" for name, number in numbers.items()]
    return "\t".join(parts) or "no label"


def describe(result: Result) -> str:
    """Return the answer as text: one line, and one more for each passage."""
    lines = [f"{describe_answer(result)}\t{result.tokens_total} tokens"]
    for span in result.evidence.spans if result.evidence else ():
        lines.append(f"  {span.contribution:+.3f}  {span.text!r}")
    return "\n".join(lines)


def main() -> int:
    """Print the answers; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("url", help="address of the server, http://host:port")
    parser.add_argument("files", nargs="*", type=Path, help="documents in UTF-8")
    parser.add_argument("--evidence", type=int, default=0, metavar="N")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for each request")
    arguments = parser.parse_args()

    names = [str(file) for file in arguments.files] or ["-"]
    failed = False
    key = os.environ.get("API_KEY")
    with Client(arguments.url, api_key=key, deadline=arguments.deadline) as client:
        answers = client.infer_each(read_documents(arguments.files), evidence=arguments.evidence)
        try:
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, ServerError):  # the other documents may still have answers
                    failed = True
                    print(f"{name}: {answer}", file=sys.stderr)
                else:
                    print(f"{name}\t{describe(answer)}")
        except ServerError as error:  # the request as a whole has no answer
            print(error, file=sys.stderr)
            return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
