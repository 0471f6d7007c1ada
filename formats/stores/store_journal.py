"""The journal of a run beside its output in a store, for a run that resumes and for other processes.

ckpt/.megaconv-journal/0-files.json         names of the files that process 0 writes
ckpt/.megaconv-journal/0-00001.jsonl        finished tensors: lines as in `formats.journal`
ckpt/.megaconv-journal/0-sums.json          checksums of parts, for a store that doesn't list them
ckpt/.megaconv-journal/0-sent.json          uploads and parts of the files, when all are sent
ckpt/.megaconv-journal/0-small/config.json  small files, if several processes write the output
ckpt/.megaconv-journal/0-tail/4096          the bytes before byte 4096 of a growing file that no part holds yet
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from formats.errors import CorruptCheckpoint
from formats.journal import entry_of, line_of
from formats.stores.directory import JOURNAL
from formats.stores.writing import Held, Upload, WritableStore

Sums = Mapping[str, Mapping[str, int]]
"""Checksums of parts, by the name of their file and their ETag."""


class SentFile(NamedTuple):
    """A file all of whose parts the store has."""

    name: str
    upload: Upload
    parts: Mapping[int, Held]
    whole: Held
    """The expected state of the object."""


class StoreJournal:
    """The objects of one process."""

    def __init__(self, store: WritableStore, prefix: str, member: int) -> None:
        """member: number of the process among those that write the output together."""
        self._store, self._folder = store, f"{prefix}/{JOURNAL}/"
        self._member, self._count = member, 0

    def read(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """The entries of an earlier run. keys: the keys of the objects that are there."""
        entries: list[dict[str, Any]] = []
        for key in sorted(keys):
            if not self._is_entries(key):
                continue
            self._count = max(self._count, int(key.rpartition("-")[2].removesuffix(".jsonl")))
            there = self._store.get(key)
            for line in there.content.splitlines(keepends=True) if there is not None else ():
                entry = entry_of(line)
                if entry is None:
                    return entries
                entries.append(entry)
        return entries

    def _is_entries(self, key: str) -> bool:
        name = key.removeprefix(self._folder)
        number = name.removeprefix(f"{self._member}-").removesuffix(".jsonl")
        return name == f"{self._member}-{number}.jsonl" and number.isdigit()

    def append(self, entries: list[dict[str, Any]]) -> None:
        """Write entries as one more object."""
        if not entries:
            return
        self._count += 1
        name = f"{self._member}-{self._count:05}.jsonl"
        self._store.put(self._folder + name, b"".join(map(line_of, entries)))

    def put_files(self, names: Iterable[str]) -> None:
        content = json.dumps(list(names)).encode()
        self._store.put(f"{self._folder}{self._member}-files.json", content)

    def forget_files(self) -> None:
        """Delete the list of files: nothing of them is left to find."""
        self._store.delete(f"{self._folder}{self._member}-files.json")

    def put_sums(self, sums: Sums) -> None:
        """Note the checksums of parts, in place of those noted before."""
        self._store.put(f"{self._folder}{self._member}-sums.json", json.dumps(sums).encode())

    def sums(self) -> Sums:
        """The checksums of an earlier run."""
        key = f"{self._folder}{self._member}-sums.json"
        there = self._store.get(key)
        found: Sums = {} if there is None else _decoded(self._store, key, there.content)
        return found

    def put_small(self, name: str, content: bytes) -> None:
        self._store.put(f"{self._folder}{self._member}-small/{name}", content)

    def put_tail(self, end: int, content: bytes) -> None:
        """Store the last bytes of a growing file. end: the size of the file with them."""
        self._store.put(f"{self._folder}{self._member}-tail/{end}", content)

    def tail(self, end: int) -> bytes | None:
        """The last bytes of a growing file of this size; None if no run has stored them."""
        there = self._store.get(f"{self._folder}{self._member}-tail/{end}")
        return None if there is None else there.content

    def forget_tail(self, end: int) -> None:
        """Delete the last bytes of a growing file that has grown."""
        self._store.delete(f"{self._folder}{self._member}-tail/{end}")

    def put_sent(self, files: Iterable[SentFile], small: Iterable[str]) -> None:
        content = {"files": [_described(file) for file in files], "small": list(small)}
        self._store.put(f"{self._folder}{self._member}-sent.json", json.dumps(content).encode())

    def small(self, member: int, name: str) -> bytes:
        """The content of a small file of another process."""
        return self._content(f"{member}-small/{name}")

    def sent(self, member: int) -> tuple[list[SentFile], list[str]]:
        """(files in parts, names of small files) of a process that has sent everything."""
        name = f"{member}-sent.json"
        found = _decoded(self._store, self._folder + name, self._content(name))
        return [_parsed(file) for file in found["files"]], list(found["small"])

    def _content(self, name: str) -> bytes:
        there = self._store.get(self._folder + name)
        if there is None:
            raise CorruptCheckpoint(
                f"{self._store.uri}/{self._folder}{name}: was deleted by another program; run again"
            )
        return there.content


def names_in(store: WritableStore, prefix: str, keys: Iterable[str]) -> list[str]:
    """The names of the files that the processes of a run write."""
    names: list[str] = []
    for key in sorted(keys):
        if key.startswith(f"{prefix}/{JOURNAL}/") and key.endswith("-files.json"):
            there = store.get(key)
            names += _decoded(store, key, there.content) if there is not None else []
    return names


def _decoded(store: WritableStore, key: str, content: bytes) -> Any:
    """The value in a JSON object of the journal. Raises CorruptCheckpoint for another content."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise CorruptCheckpoint(
            f"{store.uri}/{key}: is not as a run writes it; run again, and delete the object if this happens again"
        ) from None


def _described(file: SentFile) -> dict[str, Any]:
    parts = [[number, *held] for number, held in file.parts.items()]
    return {"name": file.name, "upload": file.upload, "parts": parts, "whole": file.whole}


def _parsed(found: Mapping[str, Any]) -> SentFile:
    parts = {number: Held(*held) for number, *held in found["parts"]}
    return SentFile(found["name"], Upload(*found["upload"]), parts, Held(*found["whole"]))
