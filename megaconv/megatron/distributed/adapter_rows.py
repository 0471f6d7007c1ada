"""The row order of an adapter's B and of DoRA's magnitudes, as Megatron-Bridge saves them.

A rank's rows follow those of the rank before, except for linear_fc1:

    B of a fused [gate; up]                     gates of all ranks, then ups of all ranks: the order of the weight
    B of CanonicalLoRA's gate, or of its up     first halves of all ranks' rows, then their second halves
    B of a linear_fc1 without a gate            the same halves until Bridge 0.5.0; since 0.5.1 one rank after the other
    magnitudes of a fused [gate; up]            [gate; up] of each rank, one rank after the other

Source: sharded_state_dict() in utils.py and dora_layers.py of megatron/bridge/peft, 0.3.1 to 0.6.2.
"""

from formats.chunked import ChunkedTensor
from formats.tensor import Box, LazyTensor
from megaconv.adapters.translation import part_of
from megaconv.errors import NotExpressible, TensorMismatch, UsageError
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.model.layout import divide
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import Region


def rows_of_b(
    weight: NativeTensor, kind: str, ranks: int, where: str, *, halved: bool
) -> NativeTensor:
    """The weight with its rows in the order in which a run on `ranks` ranks saves B.

    kind: the part of a fused weight that `adapter_<kind>` adapts; empty for the whole weight.
    ranks: 0 if the number isn't known, which is an error for B of linear_fc1.
    halved: True if the first half of each rank's rows comes before all second halves.
    """
    part = weight
    if kind:
        name = next((name for name in weight.parts if name.endswith(f".{kind}.weight")), None)
        if name is None or len(weight.parts) < 2:
            raise TensorMismatch(
                f"{where}: {weight.name} has no part of this name", code="unknown-tensor"
            )
        part = part_of(weight, name)
    if not halved or not is_fc1(weight) or len(part.parts) > 1 or ranks == 1:
        return part
    _require_known(ranks, where)
    (name,), (rows, ins) = part.parts, part.shape
    half = divide(
        rows,
        2 * ranks,
        "rows of an adapter of linear_fc1",
        "tensor parallel size (tp), in two halves",
    )
    regions = []
    for rank in range(ranks):
        for second in (0, 1):
            row = (2 * rank + second) * half
            place = (second * ranks + rank) * half
            regions.append(Region(Box(row, row + half, 0, ins), place))
    return part._replace(parts={name: tuple(regions)})


def is_halved(weight: NativeTensor, kind: str, ranks: int, b: LazyTensor, where: str) -> bool:
    """True if the first half of each rank's rows of B comes before all second halves, according to its chunks.

    A half is a chunk in Bridge until 0.5.0. Since 0.5.1, all rows of a rank are one chunk if the layer has no gate.
    Raises TensorMismatch if neither is the case.
    """
    if kind or not is_fc1(weight) or len(weight.parts) > 1 or ranks == 1:
        return bool(kind)
    _require_known(ranks, where)
    assert isinstance(b, ChunkedTensor)
    found = len({chunk.offset[0] for chunk in b.chunks})
    if found not in (ranks, 2 * ranks):
        raise TensorMismatch(
            f"{where}: B has {found} chunks of rows; expected {ranks} (Bridge 0.5.1 and later) or {2 * ranks} (earlier "
            f"releases) of a run at tensor-parallel size {ranks}: its order of rows isn't known"
        )
    return found == 2 * ranks


def require_plain_rows(weight: NativeTensor, ranks: int, where: str) -> None:
    """Raises NotExpressible for a fused weight whose rows Bridge saves in an order of their own.

    Source: mamba_dim_info in utils.py of megatron/bridge/peft. It has no such case for other mixers, so that the rows of
    each of their ranks stay together.
    """
    if weight.name.endswith(".mixer.in_proj.weight"):
        raise of_mamba(where)
    is_fused = len(weight.parts) > 1 and weight.groups is None and not is_fc1(weight)
    if is_fused and weight.tp == 0 and ranks != 1:
        raise NotExpressible(
            f"{where}: Megatron-Bridge saves B of this fused weight by ranks; megaconv translates it at tensor-parallel size 1 alone"
        )


def of_mamba(where: str) -> NotExpressible:
    """The error for an adapter of a Mamba mixer's in_proj."""
    return NotExpressible(
        f"{where}: Megatron-Bridge saves B of a Mamba mixer's in_proj in five parts, which megaconv doesn't translate"
    )


def rows_of_lengths(weight: NativeTensor, ranks: int, where: str) -> NativeTensor:
    """The weight with its rows in the order in which a run saves DoRA's magnitudes.

    For linear_fc1 this is [gate; up] of each rank, one rank after the other.
    """
    if not is_fc1(weight) or len(weight.parts) == 1 or ranks == 1:
        return weight
    _require_known(ranks, where)
    rows, ins = weight.shape
    half = divide(
        rows, 2 * ranks, "magnitudes of linear_fc1", "tensor parallel size (tp), in two halves"
    )
    parts = {
        name: tuple(
            Region(Box(rank * half, (rank + 1) * half, 0, ins), (2 * rank + number) * half)
            for rank in range(ranks)
        )
        for number, name in enumerate(weight.parts)
    }
    return weight._replace(parts=parts)


def is_fc1(weight: NativeTensor) -> bool:
    return "linear_fc1" in weight.name


def _require_known(ranks: int, where: str) -> None:
    if ranks == 0:
        raise UsageError(
            f"{where}: its rows lie by the tensor-parallel size of its run, which only {RUN_CONFIG} says"
        )
