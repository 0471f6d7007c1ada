"""Every place in a checkpoint where a pickle or a torch file lies: to take what is there, and to put something else."""

import io
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from formats import dcp_metadata, torch_legacy


class Container(NamedTuple):
    """A torch file in a checkpoint."""

    checkpoint: str
    pattern: str
    """A pattern of the container's path."""
    kind: str
    """`zip`, `bare` (a pickle and nothing else), `legacy` (torch before 1.6) or `envelope` (a range of a .distcp file)."""

    def __str__(self) -> str:
        return f"{self.pattern} of {self.checkpoint} ({self.kind})"


CONTAINERS = [
    Container("core-bare", "*/mp_rank_00_001/model_optim_rng.pt", "zip"),
    Container("core-optimizer-bare", "*/mp_rank_00/model_optim_rng.pt", "zip"),
    Container("legacy-bare", "*/mp_rank_01/model_optim_rng.pt", "zip"),
    Container("bin", "pytorch_model.bin", "zip"),
    Container("meta-bare", "consolidated.00.pth", "zip"),
    Container("torch_dist-bare", "*/common.pt", "zip"),
    Container("zarr-bare", "*/common.pt", "zip"),
    Container("zarr-bare", "*/*/shard_*.pt", "zip"),
    Container("torch_dist-bare", "*/.metadata", "bare"),
    Container("dcp-bare", ".metadata", "bare"),
    Container("torch_dist-optimizer-bare", "*/.metadata", "bare"),
    Container("legacy_bin", "pytorch_model-00001*.bin", "legacy"),
    Container("torch_dist-bare", "*/*.distcp", "envelope"),
    Container("fsdp", "model_world_size_3_rank_1.pt", "zip"),
    Container("deepspeed", "global_step3/mp_rank_00_model_states.pt", "zip"),
    Container("deepspeed", "global_step3/*_optim_states.pt", "zip"),
    Container("universal", "global_step3_universal/zero/*/step.pt", "zip"),
    Container("universal", "global_step3_universal/zero/*/fp32.pt", "zip"),
    Container("universal", "global_step3_universal/zero/optimizer_state.pt", "zip"),
]


def replace_pickle(source: Path, container: Container, change: Callable[[bytes], bytes]) -> bool:
    """Put change(the pickle that is there) in its place. False where there is no room for it."""
    file = min(source.glob(container.pattern))
    if container.kind == "envelope":
        return _replace_in_envelope(file, change)
    content = file.read_bytes()
    if container.kind == "bare":
        file.write_bytes(change(content))
    elif container.kind == "legacy":
        file.write_bytes(_with_object(content, change))
    else:
        file.write_bytes(_with_pickle(content, change))
    return True


def _with_object(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The object is the fourth of a file's five pickles, in front of which are a number, a version and the machine's sizes."""
    ends = [len(torch_legacy.MAGICS[0])]
    while len(ends) < 4:
        *_, (_, _, stop) = pickletools.genops(content[ends[-1] :])
        ends.append(ends[-1] + stop + 1)
    return content[: ends[2]] + change(content[ends[2] : ends[3]]) + content[ends[3] :]


def members(content: bytes) -> list[tuple[str, bytes]]:
    with ZipFile(io.BytesIO(content)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def stored(entries: list[tuple[str, bytes]]) -> bytes:
    """An archive as torch writes it, without its alignment."""
    made = io.BytesIO()
    with ZipFile(made, "w", ZIP_STORED) as archive:
        for name, data in entries:
            archive.writestr(ZipInfo(name), data)
    return made.getvalue()


def _with_pickle(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    changed = []
    for name, data in members(content):
        is_pickle = name.endswith("data.pkl")
        changed.append((name, change(data) if is_pickle else data))
    return stored(changed)


def _replace_in_envelope(file: Path, change: Callable[[bytes], bytes]) -> bool:
    """An object's range keeps its length: the rest is a member of zeros."""
    metadata = dcp_metadata.read(file.with_name(".metadata"))
    places = [place for place in metadata.objects.values() if place.file == file.name]
    start = places[0].offset
    end = start + places[0].nbytes
    content = file.read_bytes()
    old = members(content[start:end])
    name, data = next(entry for entry in old if entry[0].endswith("data.pkl"))
    root, _, _ = name.partition("/")
    padding = f"{root}/pad"
    pickle = name, change(data)
    without_padding = stored([pickle, (padding, b"")])
    missing = places[0].nbytes - len(without_padding)
    if missing < 0:
        return False
    made = stored([pickle, (padding, bytes(missing))])
    file.write_bytes(content[:start] + made + content[end:])
    return True
