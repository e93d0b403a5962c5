"""``torch.export`` archives with changes, as an attacker would make them."""

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Members = list[tuple[str, bytes]]
Change = Callable[[Members], Members]


def rewritten(source: Path, folder: Path, change: Change) -> Path:
    """A copy of an archive with its members changed; a name may then occur twice."""
    with zipfile.ZipFile(source) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    target = folder / "model.pt2"
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w") as archive:
        warnings.simplefilter("ignore")
        for name, content in change(members):
            archive.writestr(name, content)
    return target


def decoded(change: Callable[[Any], None], ending: str, keep: str = "changed") -> Change:
    """Changes the JSON of a member; ``keep`` tells which of both forms are there, in order."""

    def apply(members: Members) -> Members:
        result = []
        for name, content in members:
            if not name.endswith(ending):
                result.append((name, content))
                continue
            value = json.loads(content)
            change(value)
            forms = {"changed": json.dumps(value).encode(), "good": content}
            result += [(name, forms[form]) for form in keep.split()]
        return result

    return apply


def graph(change: Callable[[dict[str, Any]], None], keep: str = "changed") -> Change:
    """Changes the program's JSON, as ``decoded`` does."""
    return decoded(change, "models/model.json", keep)


def nodes_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    return content["graph_module"]["graph"]["nodes"]  # type: ignore[no-any-return]


def argument(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"name": name, "arg": {kind: value}, "kind": 1}
