"""The findings of `scan` in SARIF 2.1.0, which GitHub and other code-scanning tools read.

    {"version": "2.1.0", "runs": [{"tool": {"driver": {"name": "megaconv", "rules": [...]}},
     "automationDetails": {"id": "megaconv/CHECKPOINT/"},
     "results": [{"ruleId": "unsafe-pickle", "level": "error", "message": {"text": ...}, "locations": [...]}]}]}

The id tells the checkpoints of a repository apart, so that the findings of one don't replace those of another.
Levels: `error` for content that runs code, `warning` for damaged files, `note` for remarks. Places of files are relative
to the directory in which the command runs, as GitHub expects, if the checkpoint lies below it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from megaconv._version import __version__
from megaconv.commands.scanning import Scan
from megaconv.errors import UsageError
from megaconv.local_paths import require_place

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = {
    "unsafe-pickle": ("error", "A pickle calls a function that is not part of a checkpoint."),
    "unsafe-content": ("error", "A file asks for code to be run, or leads out of the checkpoint."),
    "unknown-global": ("note", "A pickle names a class or function that megaconv doesn't know."),
    "damaged-file": ("warning", "A file's structure is damaged."),
    "remark": ("note", "A file that scan doesn't judge."),
}
"""Level and meaning of each rule."""


class _Result(NamedTuple):
    rule: str
    file: str
    text: str


def require_findings(option: str, file: Path) -> None:
    """Check the place of the findings. Older findings are replaced, and no other file. Raises UsageError."""
    require_place(option, file)
    if file.is_file() and file.stat().st_size and not _is_sarif(file):
        raise UsageError(
            f"{option} {file}: exists and holds no findings in SARIF, which alone are replaced; choose another name"
        )


def _is_sarif(file: Path) -> bool:
    # Documents begin with the address of SARIF's schema.
    with file.open("rb") as opened:
        start = opened.read(4096).lstrip()
    return start.startswith(b"{") and b"sarif" in start


def sarif_json(found: Scan) -> bytes:
    """The findings as a SARIF document."""
    rules = [
        {
            "id": name,
            "shortDescription": {"text": meaning},
            "defaultConfiguration": {"level": level},
        }
        for name, (level, meaning) in _RULES.items()
    ]
    driver = {"name": "megaconv", "version": __version__, "rules": rules}
    results = [_to_json(each, found.path) for each in _results(found)]
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"megaconv/{found.path.strip('/')}/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return (json.dumps(document, indent=1) + "\n").encode()


def _results(found: Scan) -> Iterator[_Result]:
    for each in found.globals:
        if each.judgement == "ordinary":
            continue
        is_unsafe = each.judgement == "unsafe"
        rule, verb = ("unsafe-pickle", "calls") if is_unsafe else ("unknown-global", "names")
        yield _Result(rule, each.file, f"a pickle {verb} {each.name}")
    for rule, findings in (
        ("unsafe-content", found.code),
        ("damaged-file", found.faults),
        ("remark", found.remarks),
    ):
        for finding in findings:
            yield _Result(rule, finding.file, finding.what)


def _to_json(result: _Result, path: str) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": _uri(path, result.file)}}
    return {
        "ruleId": result.rule,
        "ruleIndex": list(_RULES).index(result.rule),
        "level": _RULES[result.rule][0],
        "message": {"text": f"{result.file}: {result.text}"},
        "locations": [{"physicalLocation": place}],
    }


def _uri(path: str, file: str) -> str:
    """The place of a file, for a URI reference."""
    root = Path(path)
    whole = root if root.is_file() else root / file
    relative = os.path.relpath(whole) if root.exists() else file
    shown = file if relative.startswith("..") else relative
    return quote(shown.encode(errors="surrogateescape"))
