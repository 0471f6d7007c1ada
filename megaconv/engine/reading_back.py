"""A finished output's tensors as they were streamed, put together again from what its files hold: for `--verify` of outputs that no
loader gives like that, GGUF's blocks and float32 norms, and adapters without the model that they are for."""

from collections.abc import Mapping
from pathlib import Path

from formats.tensor import ITEMSIZE, LazyTensor, byte_count, reshaped
from megaconv.engine.assembled import Assembled, Part
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.errors import ModelsDiffer
from megaconv.model.ir import Header, Key, OpenedSource


def as_streamed(path: Path, natives: Mapping[str, LazyTensor], header: Header, plan: OutputPlan) -> OpenedSource:
    """natives: all that lies at path, by record, in the dtypes of the stream. Raises ModelsDiffer for one that isn't as planned."""
    found = dict[Key, LazyTensor]()
    for key, info in header.manifest.items():
        parts = list[Part]()
        for place in plan.placements[key]:
            size = plan.files[place.file].records[place.record].nbytes
            native = _as_matrix(path, place, natives.get(place.record), info.dtype, size)
            parts += [Part(region, native, place.record, str(path)) for region in place.regions]
        found[key] = Assembled(key, info.shape, info.dtype, parts)
    return OpenedSource(header, found)


def _as_matrix(path: Path, place: Placement, native: LazyTensor | None, dtype: str, size: int) -> LazyTensor:
    """In the rows that regions count."""
    if native is None or native.dtype != dtype or byte_count(native.shape, dtype) != size:
        raise ModelsDiffer(f"{path}: {place.record} reads back otherwise than it was written; is the disk faulty?")
    return reshaped(native, (size // place.row_bytes, place.row_bytes // ITEMSIZE[dtype]))
