"""Refuses the statistics of a calibration that belong to other weights than those to be converted."""

from megaconv.engine.adapted import adapted
from megaconv.engine.fingerprints import fingerprint_source
from megaconv.errors import TensorMismatch
from megaconv.model.ir import WEIGHT, Source
from megaconv.options import ConvertOptions
from megaconv.values.calibration import read_calibration


def require_same_weights(given: str, source: Source, options: ConvertOptions, workers: int) -> None:
    """Compare the weights with the fingerprint in --calibration, if it is given. Reads all weights.

    The compared weights have the adapters merged, but not the --dtype: they are those that `merge` writes without it.
    given: the input, for messages. source: the input as it was opened. Raises TensorMismatch and UsageError.
    """
    path = options.save.calibration
    if path is None:
        return
    expected = read_calibration(path).weights_fingerprint
    remedy = "run `megatron-lite calibrate` on this checkpoint"
    if options.adapters:
        overflow = "overflow" in options.save.allow_lossy
        source = adapted(source, options.adapters, overflow=overflow)
        given = f"{given} with the adapters"
        remedy += ", and pass the same adapters with --adapter"
    weights = frozenset(key for key in source.header.manifest if key.slot == WEIGHT)
    found = fingerprint_source(source, workers, only=weights).weights
    if found != expected:
        raise TensorMismatch(
            f"{path}: its statistics are of the weights {expected[:12]}, and {given} has the weights {found[:12]}; {remedy}"
        )
