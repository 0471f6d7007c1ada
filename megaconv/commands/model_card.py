"""The model card (README.md, with YAML metadata between two `---` at its start) and the record of a pushed model.

They contain only what is known: licence, languages and data sets come from the source's own card, or are left out.
Directories of this machine are named only by their last component.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from formats.regular_files import read_small
from megaconv._version import __version__
from megaconv.commands.units import readable
from megaconv.engine.record import Record, source_of
from megaconv.errors import CheckpointError
from megaconv.model.ir import Header, main_dtype

CARD = "README.md"
_KEPT = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag", "tags")
_HUB_ID = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@[\w./-]+)?")


def describe(
    directory: Path, repository: str, header: Header, record: Record | None
) -> tuple[bytes, list[str]]:
    """(a model card, notices for the user). record: the directory's record, if it has one."""
    import yaml

    origin = source_of(record) if record is not None else {}
    source = str(origin.get("path") or "")
    kept = _card_of(Path(source)) if source else {}
    adapters = [
        str(each.get("path")) for each in origin.get("adapters", ()) if isinstance(each, dict)
    ]
    metadata = {key: kept[key] for key in _KEPT if key in kept}
    metadata |= _ancestry(source, kept, adapters)
    is_hf = header.layout is None
    metadata |= {"library_name": "transformers"} if is_hf else {}
    is_known = header.config.own_names is None
    if is_known:
        metadata.setdefault("pipeline_tag", "text-generation")
    metadata["tags"] = sorted(
        {*_words(metadata.get("tags")), "megaconv", *([] if is_hf else ["megatron-core"])}
    )
    facts = {
        "family": header.config.family if is_known else "",
        "parameters": f"{header.parameters:,}",
        "dtype": main_dtype(header.manifest),
        "weights": readable(header.nbytes),
        "converted from": f"{Path(source).name} ({origin.get('kind', '')})" if source else "",
        "adapters merged": ", ".join(Path(each).name for each in adapters),
        "fingerprint": record.fingerprint if record is not None else "",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    front = yaml.safe_dump(metadata, sort_keys=True, allow_unicode=True)
    check = (
        "`megaconv verify` compares the weights with the fingerprints in megaconv.json."
        if record is not None
        else ""
    )
    text = (
        f"---\n{front}---\n\n# {repository.partition('/')[2]}\n\n| | |\n|---|---|\n{rows}\n\n"
        f"Written by megaconv {__version__}. {check}\n"
    )
    unlicensed = [f"the model card names no licence, since the source's doesn't: add one to {CARD}"]
    return text.encode(), [] if "license" in metadata else unlicensed


def published_record(content: bytes) -> bytes:
    """A megaconv.json for publication, without the directories of this machine."""
    found = json.loads(content)
    adapters = found.get("adapters")
    for each in (found.get("source"), *(adapters if isinstance(adapters, list) else ())):
        if (
            isinstance(each, dict)
            and isinstance(each.get("path"), str)
            and _of_the_hub(each["path"]) is None
        ):
            each["path"] = Path(each["path"]).name
    return (json.dumps(found, indent=1) + "\n").encode()


def _of_the_hub(source: str) -> str | None:
    """The Hub id of a model's source; None for a path."""
    match = None if Path(source).exists() else _HUB_ID.fullmatch(source)
    return match[1] if match else None


def _ancestry(source: str, kept: Mapping[str, Any], adapters: list[str]) -> dict[str, Any]:
    """The metadata on the model's ancestors, if they are on the Hub."""
    base = _of_the_hub(source) or kept.get("base_model")
    return ({"base_model": base} if base else {}) | (
        {"base_model_relation": "finetune"} if base and adapters else {}
    )


def _words(tags: Any) -> list[str]:
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def _card_of(directory: Path) -> Mapping[str, Any]:
    """The metadata of a directory's model card; empty if it has no readable card."""
    import yaml

    try:
        text = read_small(directory / CARD, SIDECAR_BYTES).decode()
    except (CheckpointError, UnicodeDecodeError):
        return {}
    match = re.match(r"---\s*\n(.*?)\n---\s*\n", text, re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
