"""Inputs on the Hugging Face Hub: `hf://org/name@revision`, or `org/name` if no such path exists here.

The address of a model's page (https://huggingface.co/org/name/tree/main) and a repository in the Hub's cache
(models--org--name) are understood too. Names without an organisation, which some old models have (`gpt2`), are
accepted.
"""

import logging
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from formats import rank_files
from formats.regular_files import read_small
from megaconv import hub_headers
from megaconv.best_iteration import with_best
from megaconv.errors import CheckpointError, UnknownFormat, UsageError
from megaconv.hub_settings import answer_seconds
from megaconv.local_paths import UNEXPANDED, is_unexpanded, local_path
from megaconv.store_inputs import is_store, stand_in

Place = Path | str
"""The place of an input: a local path, or a URI for the loader that reads its scheme."""

_log = logging.getLogger("megaconv")

_SCHEME = "hf://"
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*(@[\w./-]+)?")
_PAGE = re.compile(
    r"https?://([^/]+)/(?P<name>[\w.-]+(/[\w.-]+)?)(/(tree|blob|resolve)/(?P<revision>[^/?#]+)[^?#]*)?/?([?#].*)?"
)
_NOT_MODELS = ("datasets/", "spaces/", "api/", "docs/")
_CACHED = "models--"
_REF_BYTES = 4096
_LISTED = 3
"""The largest number of files that a message names."""
_VARIANTS = ("*.fp16*", "*.fp32*", "*.bf16*", "*.non_ema*")
"""Files that hold the weights a second time, in another dtype."""
_PATTERNS = [
    *("*.json", "*.safetensors", "*.bin", "model.sig"),
    *("tokenizer*", "*.model", "*.txt", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.jinja"),
    *(
        "LICENSE*",
        "LICENCE*",
        "license*",
        "licence*",
        "NOTICE*",
        "Notice*",
        "notice*",
        "USE_POLICY*",
        "USAGE_POLICY*",
        "COPYING*",
    ),
]
"""Configuration, weights, and the small files that are copied along (megaconv/engine/sidecars.py).

Code is never downloaded.
"""
_NEVER = ("*.py", "*/*")
_TOKENIZER = [pattern for pattern in _PATTERNS if pattern not in ("*.safetensors", "*.bin")]
_WEIGHTS = ("*.safetensors", "*.bin")


def scheme_of(uri: str) -> str:
    """The scheme of a URI: `store` of store://bucket/model; empty for anything that isn't a URI."""
    match = _URI.fullmatch(uri)
    return match[1].lower() if match else ""


def resolve(place: str | Path, *, cache: bool = False) -> Place:
    """The local path of an input, for `RUN/best` that of the best iteration (best_iteration.py).

    A Hub id, and a URI of a store, become a directory of stand-ins, whose bytes are fetched when they are read. Small
    files of the Hub, and weights that are there already, are read from the Hub's own cache. Any other URI is returned
    unchanged. The path is valid until the process ends.

    A Path is always treated as a path, even if it looks like a URI or a Hub id.
    cache: download all files of a Hub id into the cache.

    Each call asks the Hub for the commit of the revision: resolve a place once, and pass the path on.
    Raises CheckpointError.
    """
    if isinstance(place, Path):
        return _in_cache(Path(with_best(str(place))))
    if not place:
        raise UsageError("the path to read is empty; is a variable unset that it was made of?")
    place = with_best(_of_page(place))
    if is_store(place):
        return stand_in(place)
    if not place.startswith(_SCHEME):
        if scheme_of(place):
            return place
        if Path(place).exists() or not _NAME.fullmatch(place):
            return _in_cache(Path(place))
    name, _, revision = place.removeprefix(_SCHEME).partition("@")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{place}: is not a Hub id; expected hf://organisation/name or hf://organisation/name@revision"
        )
    return _fetch(place, name, revision or None, cache=cache)


def hub_id(place: str) -> tuple[str, str | None] | None:
    """The repository and the revision that a place on the Hub names; None for any other place."""
    is_named = place.startswith(_SCHEME) or not Path(place).exists()
    name, _, revision = place.removeprefix(_SCHEME).partition("@")
    if is_named and _NAME.fullmatch(name) and "/" in name:
        return name, revision or None
    return None


def require_input(place: str) -> None:
    """Raise UsageError if an input can only be a local path, and nothing is there. It opens nothing and asks no one.

    resolve() raises the same error. This is for commands that have to import torch before they resolve an input.
    """
    is_elsewhere = (
        bool(scheme_of(place)) or place.startswith(_SCHEME) or bool(_NAME.fullmatch(place))
    )
    if place and not is_elsewhere and not Path(with_best(place)).exists():
        raise nothing_at(Path(place))


def tokenizer_directory(place: str) -> Path:
    """The directory with the small files of a local directory or a Hub id, for `RUN/best` that of the best iteration.

    Downloads no weights. Raises CheckpointError.
    """
    place = _of_page(place)
    place = place if scheme_of(place) else with_best(place)
    if not place.startswith(_SCHEME) and Path(place).exists():
        return _in_cache(Path(place))
    name, _, revision = place.removeprefix(_SCHEME).partition("@")
    if not _NAME.fullmatch(name):
        raise nothing_at(local_path(place.removeprefix(_SCHEME)))
    timeout = answer_seconds()
    from huggingface_hub import HfApi, snapshot_download

    wanted: dict[str, Any] = {
        "allow_patterns": _TOKENIZER,
        "ignore_patterns": list(_NEVER),
    }
    given = revision or None
    try:
        # One request without retries, as in _fetch. The download gets the branch, not the commit: the cache then knows the
        # branch, and a later run finds it without the Hub.
        HfApi().model_info(name, revision=given, timeout=timeout)
        return Path(snapshot_download(name, revision=given, **wanted))
    except Exception as error:
        try:
            return Path(snapshot_download(name, revision=given, local_files_only=True, **wanted))
        except Exception:
            is_restricted = hub_headers.status_of(error) == 403
            reason = hub_headers.reason(error)
            raise _not_found(place, reason, restricted=is_restricted) from error


def _similar(path: Path) -> Path | None:
    """An existing path with nearly the same name, in the same directory."""
    from difflib import get_close_matches

    try:
        names = {entry.name.lower(): entry.name for entry in path.parent.iterdir()}
    except OSError:
        return None
    found = get_close_matches(path.name.lower(), names, 1, 0.8)
    return path.with_name(names[found[0]]) if found else None


def nothing_at(path: Path) -> UsageError:
    """The error for a path that doesn't exist. For a relative path it says where the path was looked for."""
    where = "" if path.is_absolute() else f" (looked for {path.absolute()})"
    where += f"; {UNEXPANDED}" if is_unexpanded(path) else ""
    similar = _similar(path)
    where += f"; did you mean {similar}?" if similar else ""
    return UsageError(f"{path}: no such file or directory{where}", code="no-such-input")


def _of_page(place: str) -> str:
    """The Hub id of the address of a model's page; any other text unchanged."""
    match = _PAGE.fullmatch(place)
    address = re.match(r"https?://([^/]+)/(.*)", place)
    hosts = {
        "huggingface.co",
        "www.huggingface.co",
        "hf.co",
        os.environ.get("HF_ENDPOINT", "").partition("://")[2].strip("/"),
    }
    if address is None or address[1] not in hosts:
        return place
    if match is None or address[2].startswith(_NOT_MODELS):
        raise UsageError(
            f"{place}: is not a model's page; expected https://huggingface.co/organisation/name"
        )
    # In the address of a page, the slashes of a branch such as refs/pr/1 are %2F.
    revision = unquote(match["revision"] or "")
    return f"{_SCHEME}{match['name']}" + (f"@{revision}" if revision else "")


def _in_cache(path: Path) -> Path:
    """The snapshot of a repository in the Hub's cache, models--org--name; any other path unchanged.

    Raises UsageError if there are several snapshots and none of them is the commit of the branch main.
    """
    snapshots = path / "snapshots"
    if not path.name.startswith(_CACHED) or not snapshots.is_dir():
        return path
    found = sorted(snapshot for snapshot in snapshots.iterdir() if snapshot.is_dir())
    main = path / "refs" / "main"
    if main.is_file():
        commit = read_small(main, _REF_BYTES).decode(errors="replace").strip()
        head = snapshots / commit
        if head in found:
            return head
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"{path}: has {len(found)} snapshots, and none is of the branch main; "
        f"give one of them: {snapshots}/..."
    )


def _skipped(files: Sequence[str]) -> list[str]:
    """Patterns of weight files that repeat the weights that will be read.

    The order in which transformers looks for file names decides which files will be read.
    """
    if "model.safetensors" in files:
        return [
            name
            for name in files
            if name.endswith((".safetensors", ".bin", ".index.json"))
            and name != "model.safetensors"
        ]
    if "model.safetensors.index.json" in files:
        return ["*.bin", "*.bin.index.json", "consolidated*.safetensors", *_VARIANTS]
    return ["*.bin"] if any(name.endswith(".safetensors") for name in files) else [*_VARIANTS]


def _fetch(place: str, name: str, revision: str | None, *, cache: bool) -> Path:
    timeout = answer_seconds()
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # One request, without the retries of a listing: an unreachable Hub is reported at once.
        found = HfApi().model_info(name, revision=revision, timeout=timeout)
        files = [sibling.rfilename for sibling in found.siblings or ()]
        skip = [*_skipped(files), *_NEVER]
        _require_model(place, name, files, skip)
        if not cache and (by_ranges := _by_ranges(place, name, str(found.sha), files, skip)):
            return by_ranges
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=skip
            )
        )
    except UnknownFormat:
        raise
    except (
        Exception
    ) as error:  # the client's network errors have no common class with its other errors
        reason = hub_headers.reason(error)
        try:
            kept: dict[str, Any] = {
                "allow_patterns": _PATTERNS,
                "ignore_patterns": ["*.bin", *_NEVER],
            }
            cached = Path(snapshot_download(name, revision=revision, local_files_only=True, **kept))
            # Only its headers were downloaded before.
            if not any(_fits(file.name, _WEIGHTS) for file in cached.iterdir()):
                raise FileNotFoundError(cached)
            _log.warning(
                "%s: the Hub can't be reached (%s); using the earlier download: %s",
                place,
                reason,
                cached,
            )
            return cached
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
            raise _not_found(
                place, reason, restricted=hub_headers.status_of(error) == 403
            ) from error


def _require_model(place: str, name: str, files: Sequence[str], skip: Sequence[str]) -> None:
    """Raise UnknownFormat if a repository has no file of a Hugging Face model, or holds the files of a Megatron run."""
    is_megatron = rank_files.TRACKER in files and "config.json" not in files
    if not is_megatron and any(_fits(file, _PATTERNS) and not _fits(file, skip) for file in files):
        return
    shown = ", ".join(files[:_LISTED]) + (", ..." if len(files) > _LISTED else "")
    has = f"it has {shown}" if files else "it is empty"
    raise UnknownFormat(
        f"{place}: the repository has no file of a Hugging Face model ({has}); give a branch that has one ({name}@BRANCH), "
        f"or download the files (hf download {name}) and give their local path"
    )


def _not_found(place: str, reason: str, *, restricted: bool) -> CheckpointError:
    """The error for a place that can't be fetched.

    restricted: the Hub has the model, but denies access. A place without `hf://` may also be a mistyped path.
    """
    fetched = f"can't be fetched from the Hugging Face Hub: {reason}"
    if place.startswith(_SCHEME) or restricted:
        return CheckpointError(f"{place}: the model {fetched}", code="hub-unreachable")
    return UsageError(
        f"{nothing_at(Path(place))}; and a model of this name {fetched}", code="no-such-input"
    )


def _by_ranges(
    place: str, name: str, commit: str, files: Sequence[str], skip: Sequence[str]
) -> Path | None:
    """A directory with stand-ins of the weights.

    None if the weights are in the cache already, or if the server answers no ranges; the latter is logged.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    wanted = [file for file in files if _fits(file, _PATTERNS) and not _fits(file, skip)]
    absent = [
        file
        for file in wanted
        if not isinstance(try_to_load_from_cache(name, file, revision=commit), str)
    ]
    weights = [file for file in wanted if _fits(file, _WEIGHTS)]
    if not set(weights) & set(absent):
        return None
    # Use the commit, not the branch: the branch may move between two requests.
    small = [file for file in wanted if file not in weights]
    cached = Path(
        snapshot_download(
            name, revision=commit, allow_patterns=small, ignore_patterns=[*skip, *weights]
        )
    )
    try:
        return hub_headers.directory(name, commit, [cached / file for file in small], weights)
    except hub_headers.NoRanges:
        _log.warning("%s: the server answers no range requests: the weights are downloaded", place)
        return None


def _fits(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)
