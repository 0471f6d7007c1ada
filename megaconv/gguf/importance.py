"""The importance matrix of a GGUF output: the mean of the squared inputs of each matrix, from a calibration.

llama.cpp's llama-imatrix measures the same. Embeddings and the output matrix have no importance, as in llama.cpp's files.
"""

from collections.abc import Mapping, Sequence

from formats.tensor import matrix_shape
from megaconv.errors import UsageError
from megaconv.huggingface.modules import modules_of
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor
from megaconv.options import SaveOptions
from megaconv.values.calibration import CHANNEL_SQUARE, read_calibration
from megaconv.values.forms import Scaling
from megaconv.values.ggml_weighted import WEIGHTED

_TYPES = ("q4_0", "q4_k_m", "q5_k_m", "q6_k")


def importances(
    natives: Sequence[NativeTensor], kinds: Mapping[str, str], header: Header, options: SaveOptions
) -> dict[str, Scaling]:
    """The importance of each canonical matrix of a layer; empty without --calibration.

    kinds: the type of each native tensor. Raises TensorMismatch for a missing statistic, UsageError for unneeded ones.
    """
    if options.calibration is None:
        return {}
    if not any(kind in WEIGHTED for kind in kinds.values()):
        raise UsageError(
            f"--calibration: this type of matrices needs no statistics; choose --option gguf_type={'|'.join(_TYPES)}, or leave it out"
        )
    statistics = read_calibration(options.calibration)
    modules = modules_of(header.config)
    found: dict[str, Scaling] = {}
    for native in natives:
        if kinds[native.name] not in WEIGHTED or not native.name.startswith("blk."):
            continue
        for name in native.parts:
            cols = matrix_shape(header.manifest[Key(name)].shape)[1]
            mean_square = statistics.vector(modules[name], CHANNEL_SQUARE, cols)
            found[name] = Scaling(importance=mean_square)
    return found
