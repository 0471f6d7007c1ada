"""Puts a model on the Hugging Face Hub in one commit, and compares what arrived with what was sent.

Large files are uploaded before the commit and change no branch. An interrupted push therefore leaves the repository
unchanged, and the same command then sends only the files that the Hub doesn't have yet. The Hub refuses the commit if
the branch has moved since the push began.
"""

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from formats.ceilings import CONFIG_BYTES, RECORD_BYTES
from formats.partial_files import fetch_whole
from formats.regular_files import read_json, read_small
from formats.wording import listing
from megaconv import registry
from megaconv.adapters.peft_files import adapter_directory
from megaconv.best_iteration import with_best
from megaconv.commands.hub_commit import PushReport, apart, commit, hub_client, hub_errors
from megaconv.commands.hub_files import (
    Hashes,
    files_to_push,
    hashes_of_content,
    hashes_of_file,
    is_excluded,
)
from megaconv.commands.model_card import CARD, describe, published_record
from megaconv.commands.recorded import require_recorded
from megaconv.engine.completeness import TOKENIZER, has_tokenizer
from megaconv.engine.conversion import convert
from megaconv.engine.opening import open_source
from megaconv.engine.record import RECORD_NAME, find_record
from megaconv.engine.report import Report
from megaconv.errors import ModelsDiffer, UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.hub import nothing_at
from megaconv.hub_settings import answer_seconds
from megaconv.input import Input
from megaconv.local_paths import local_path
from megaconv.options import ConvertOptions, LoadOptions, PushOptions
from megaconv.signatures.bundle import SIGNATURE_NAME, read_bundle
from megaconv.store_inputs import is_store, stand_in

_log = logging.getLogger("megaconv")

_REPOSITORY = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]{,94}\w)?", re.ASCII)
_ADAPTER = "adapter_config.json"
_RUN = frozenset(("optimizer.safetensors", "trainer_state.json"))
"""Files beside an adapter with which the trainer continues its run."""


def push(
    directory: str | Path, repository: str, options: PushOptions, *, dry_run: bool = False
) -> PushReport:
    """Push a finished output.

    Raises CheckpointError: UsageError for a directory that can't be pushed, ModelsDiffer if the Hub has other content
    afterwards.
    """
    require_repository(repository)
    place = with_best(str(directory))
    is_stored = is_store(place)
    path = stand_in(place) if is_stored else local_path(place)
    if not options.as_is:
        path = adapter_directory(path)
    kind = _kind(path)
    if not dry_run:
        require_token(repository)
    if kind in ("hf", "peft") or options.as_is:
        return _push_files(path, kind, repository, options, dry_run, _missing(path, kind))
    if dry_run:
        raise UsageError(
            f"--dry-run: {directory} would be converted to hf first; convert it, then push that, or add --as-is"
        )
    # A directory beside the source most likely has enough space for a second copy.
    beside = None if is_stored else path.resolve().parent
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.push-", dir=beside) as room:
        made = Path(room) / "hf"
        done = convert(
            path, made, "hf", ConvertOptions(load=LoadOptions(options.config)), planned=_warn
        )
        return _push_files(made, "hf", repository, options, dry_run, done.missing)


def _warn(planned: Report) -> None:
    """Log the notices before the copy and the uploads, which take long: for example, which parts will be missing."""
    for notice in planned.notices:
        _log.warning("%s", notice)


def require_repository(name: str) -> None:
    """Raises UsageError if the name isn't a repository's."""
    if not _REPOSITORY.fullmatch(name):
        raise UsageError(
            f"{name}: is not the name of a repository; expected organisation/name, of letters, digits, `-`, `_` and `.`"
        )


def require_token(repository: str) -> None:
    """Raises CheckpointError if the Hub doesn't recognise the user's token. Called before anything is read or sent."""
    seconds = answer_seconds()
    with hub_errors(repository):
        hub_client(seconds).whoami()


def _kind(path: Path) -> str:
    """The loader's name for a finished model; `peft` for an adapter."""
    if not path.exists():
        raise nothing_at(path)
    if not path.is_dir():
        raise UsageError(f"{path}: is not a directory; push takes a finished output")
    if (path / _ADAPTER).is_file() and not (path / CONFIG_NAME).is_file():
        return "peft"
    return registry.detect(path).name


def _missing(path: Path, kind: str) -> tuple[str, ...]:
    """The parts that a finished Hugging Face directory lacks. A warning names them before anything is sent."""
    if kind != "hf" or has_tokenizer(file.name for file in path.iterdir()):
        return ()
    _log.warning(
        "%s: has no tokenizer, and so won't the repository; the original's files belong there first",
        path,
    )
    return (TOKENIZER,)


def _push_files(
    path: Path,
    kind: str,
    repository: str,
    options: PushOptions,
    dry_run: bool,
    missing: Sequence[str],
) -> PushReport:
    files = files_to_push(path, options)
    fetch_whole(files.values())  # files of a store: the Hub wants hashes before the content
    notices = list[str]()
    made: dict[str, bytes] = {}
    is_signed = SIGNATURE_NAME in files
    if kind == "peft" and not options.as_is:
        files = _without_run(path, files, notices)
    if kind != "peft":
        found = Input(str(path), path, registry.loader(kind))
        source = open_source(
            found,
            LoadOptions(options.config, metadata_only=True, optimizer=False, own_names=True),
        )
        require_recorded(found, source, options.config, is_signed=is_signed)
        # A card of the directory may be left out on purpose: no other takes its place.
        needs_card = not (path / CARD).exists() and not is_excluded(CARD, options)
        if options.card and needs_card and not is_signed:
            made[CARD], notices = describe(path, repository, source.header, find_record(path))
        if RECORD_NAME in files and find_record(path) is not None and not is_signed:
            made[RECORD_NAME] = published_record(read_small(files.pop(RECORD_NAME), RECORD_BYTES))
    hashes = {name: hashes_of_file(file) for name, file in files.items()}
    if is_signed:
        notices += _signed_notices(path, hashes)
    if dry_run:
        hashes |= {name: hashes_of_content(content) for name, content in made.items()}
        return PushReport(
            repository, dict(sorted(hashes.items())), notices=notices, missing=missing
        )
    with hub_errors(repository):
        report = apart(lambda: commit(repository, files, hashes, made, notices, options))
    return replace(report, missing=missing)


def _without_run(path: Path, files: dict[str, Path], notices: list[str]) -> dict[str, Path]:
    """The files of an adapter, without those with which the trainer continues its run. Adds notices about them and the base."""
    described = read_json(path / _ADAPTER, CONFIG_BYTES)
    base = described.get("base_model_name_or_path") if isinstance(described, dict) else None
    if isinstance(base, str) and base and Path(base).exists():
        notices.append(
            f"{path / _ADAPTER}: names the base model {base}, a path of this machine: write the base's name on the Hub into "
            "base_model_name_or_path, so that others can load the adapter"
        )
    if not set(files) >= _RUN:
        return files
    notices.append(f"{path}: left out {listing(sorted(_RUN))}, which only continue the run")
    return {name: file for name, file in files.items() if name not in _RUN}


def _signed_notices(path: Path, hashes: Mapping[str, Hashes]) -> list[str]:
    """Notices about a sealed directory, which is pushed as it was signed, without a model card.

    Raises ModelsDiffer (`changed-since-signed`) if a file was changed or added since.
    """
    statement = read_bundle(path / SIGNATURE_NAME).statement()
    if (statement.method.name, statement.method.hash_type) != ("files", "sha256"):
        return [f"{SIGNATURE_NAME}: was not compared with the files; megaconv verify does it"]
    ignored = {*statement.method.ignore_paths, SIGNATURE_NAME}
    other = [
        name
        for name, each in hashes.items()
        if name.partition("/")[0] not in ignored
        and name not in ignored
        and statement.digests.get(name) != each.sha256
    ]
    if other:
        raise ModelsDiffer(
            f"{path}: is not as it was signed: {listing(other)}; seal it again with --overwrite, or remove {SIGNATURE_NAME}",
            code="changed-since-signed",
        )
    absent = [name for name in statement.digests if name not in hashes]
    if absent:
        return [f"the signature is about files that are not pushed: {listing(absent)}"]
    return []
