"""The statistics of a calibration: how large the inputs of each matrix were. `megatron-lite calibrate` writes the file.

    X.input_amax []               the largest |x| of the inputs of the matrix X.weight
    X.input_channel_amax [in]     the same for each column
    X.input_channel_mean [in]     the mean of |x| for each column
    X.input_channel_square [in]   the mean of x^2 for each column: GGUF's importance
    X.awq_scale [in]              AWQ's factors of the columns; only from `calibrate --awq`
    X.k_amax, X.v_amax []         the largest |x| of the keys behind the rotation, and of the values; X is the matrix
                                  that makes them

Names are those of the Hugging Face model, all numbers float32. The metadata key `weights_fingerprint` is the fingerprint
of the weights that the statistics belong to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from formats import safetensors
from formats.lazy_numpy import Floats, np
from formats.tensor import LazyTensor, Shape, read_tensor
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UsageError
from megaconv.values import rounding

FINGERPRINT = "weights_fingerprint"
"""The metadata key of the weights' fingerprint."""
INPUT_AMAX, CHANNEL_AMAX, CHANNEL_MEAN = "input_amax", "input_channel_amax", "input_channel_mean"
CHANNEL_SQUARE = "input_channel_square"
AWQ_SCALE, K_AMAX, V_AMAX = "awq_scale", "k_amax", "v_amax"


@dataclass(frozen=True, eq=False)
class Calibration:
    """An opened file of statistics."""

    path: Path
    weights_fingerprint: str
    tensors: Mapping[str, LazyTensor]

    def number(self, module: str, statistic: str) -> float:
        """A statistic that is one number. Raises TensorMismatch if it is missing, CorruptCheckpoint if it is impossible."""
        return float(self._numbers(module, statistic, ())[0])

    def vector(self, module: str, statistic: str, size: int) -> Floats:
        """A statistic with a number for each column. Raises as `number` does."""
        return self._numbers(module, statistic, (size,))

    def _numbers(self, module: str, statistic: str, shape: Shape) -> Floats:
        name = f"{module}.{statistic}"
        stored = self.tensors.get(name)
        if stored is None:
            raise TensorMismatch(
                f"{self.path}: has no {name}; {_remedy(statistic)}", code="missing-tensor"
            )
        if tuple(stored.shape) != shape or stored.dtype != "float32":
            raise TensorMismatch(
                f"{self.path}: {name} is {list(stored.shape)} {stored.dtype}; expected {list(shape)} float32",
                code="misshapen-tensor",
            )
        numbers = rounding.exact(read_tensor(stored).reshape(-1), "float32").astype(np.float32)
        if not np.isfinite(numbers).all() or (numbers < 0).any():
            raise CorruptCheckpoint(
                f"{self.path}: {name} has a number that is negative or not finite; calibrate again"
            )
        return numbers


def _remedy(statistic: str) -> str:
    if statistic == AWQ_SCALE:
        return "run `megatron-lite calibrate` with --awq"
    return (
        "the matrix saw no token, or the file is of another model: run `megatron-lite calibrate` on "
        "this model with more samples"
    )


def read_calibration(path: Path) -> Calibration:
    """Open a file of statistics. Raises UsageError if there is none, CorruptCheckpoint for another file."""
    if not path.is_file():
        raise UsageError(
            f"--calibration {path}: no such file; `megatron-lite calibrate` writes one",
            code="no-such-input",
        )
    fingerprint = safetensors.read_metadata(path).get(FINGERPRINT)
    if not fingerprint:
        raise CorruptCheckpoint(
            f"{path}: has no {FINGERPRINT} in its metadata, so it is no file of `megatron-lite calibrate`"
        )
    return Calibration(path, fingerprint, safetensors.read(path))


def calibration_bytes(
    weights_fingerprint: str, measured: Mapping[str, Floats], how: Mapping[str, str]
) -> bytes:
    """The content of a file of statistics.

    measured: float32 numbers and vectors by name. how: facts about the calibration, for people, as metadata.
    """
    metadata = {**how, FINGERPRINT: weights_fingerprint}
    shapes = {name: (each.shape, "float32") for name, each in measured.items()}
    layout = safetensors.SafetensorsLayout(shapes, metadata)
    content = bytearray(layout.size)
    for offset, part in layout.headers({}):
        content[offset : offset + len(part)] = part
    for name, each in measured.items():
        offset, size = layout.records[name]
        content[offset : offset + size] = np.ascontiguousarray(each, np.float32).tobytes()
    return bytes(content)
