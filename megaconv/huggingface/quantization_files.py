"""Settings of GPTQ and AWQ in a file of their own, which older tools wrote in place of config.json's quantization_config.

quantize_config.json    AutoGPTQ: bits, group_size, desc_act and others, under the names of quantization_config
quant_config.json       AutoAWQ: w_bit, q_group_size, version
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megaconv.families.parts.hf_config import (
    MODELOPT_FILE,
    QUANTIZATION,
    load_config,
    quantization,
)

_GPTQ_FILE, _AWQ_FILE = "quantize_config.json", "quant_config.json"
QUANTIZATION_FILES = (MODELOPT_FILE, _GPTQ_FILE, _AWQ_FILE)
"""Files beside config.json that describe quantized weights."""
_WORDS = ".qweight"
"""The end of the names of packed matrices."""
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


def with_quantization_file(
    config: Mapping[str, Any], directory: Path, names: Iterable[str]
) -> Mapping[str, Any]:
    """A config.json, completed by such a file if the weights are packed and it doesn't describe the quantization itself.

    names: those of the stored tensors. Raises CorruptCheckpoint for a file that isn't a JSON object.
    """
    if quantization(config) or not any(name.endswith(_WORDS) for name in names):
        return config
    if (directory / _GPTQ_FILE).is_file():
        found = load_config(directory / _GPTQ_FILE)
        return {**config, QUANTIZATION: {"quant_method": "gptq", **found}}
    if (directory / _AWQ_FILE).is_file():
        stated = load_config(directory / _AWQ_FILE)
        renamed = {_AWQ_NAMES.get(key, key): value for key, value in stated.items()}
        return {**config, QUANTIZATION: {"quant_method": "awq", **renamed}}
    return config
