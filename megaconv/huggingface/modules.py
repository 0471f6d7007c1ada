"""The modules of a Hugging Face model, by the canonical tensors that their weights hold: the names of a calibration."""

from collections.abc import Mapping

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.naming import HF
from megaconv.model.natives import unsharded_tensors


def modules_of(config: ModelConfig) -> Mapping[str, str]:
    """Canonical tensor -> the module whose weight holds it."""
    rows = family(config.family).rows
    return {
        name: native.name.removesuffix(".weight")
        for native in unsharded_tensors(rows, config, HF)
        for name in native.parts
    }
