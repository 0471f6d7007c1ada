"""Compares the settings of a NeMo 1 model with the configuration that --config gives for it.

    num_attention_heads: 32             attention.heads
    scale_positional_embedding: true    the position scaling of Llama 3.1

Only values are compared that no tensor's shape shows. With another number of heads, the rows of a fused query, key and
value would be read as other heads' rows. A setting that is null, or refers to another one, is not compared. Source:
megatron_gpt_config.yaml and megatron_gpt_model.py of NeMo 1.23 and 2.0.
"""

from collections.abc import Callable, Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any

from formats.yaml_file import read_yaml
from megaconv.errors import TensorMismatch
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig

SETTINGS = "model_config.yaml"
_DISTRIBUTED = "model_weights"

_Field = Callable[[ModelConfig], Any]
_ALWAYS: Mapping[str, _Field] = {
    "num_layers": lambda config: config.layer_count,
    "num_attention_heads": lambda config: config.attention.heads,
    "num_query_groups": lambda config: config.attention.kv_heads,
    "kv_channels": lambda config: config.attention.head_dim,
    "layernorm_epsilon": lambda config: config.norm.epsilon,
}
_ROPE: Mapping[str, _Field] = {
    "rotary_base": lambda config: config.positions.theta,
    "rotary_percentage": lambda config: config.positions.rotary_percent,
    "seq_len_interpolation_factor": lambda config: _scaled(config, "linear", "factor", 1.0),
    "scale_positional_embedding": lambda config: _scaled(config, "llama3", "rope_type", "") != "",
}
_EXPERTS: Mapping[str, _Field] = {"moe_router_topk": lambda config: config.experts.per_token}
"""Setting -> the value that it has by the configuration."""


def require_agreement(settings: Any, config: ModelConfig, where: str) -> None:
    """Raise TensorMismatch if a setting contradicts the configuration.

    settings: the value of model_config.yaml. where: its name in messages.
    """
    if not isinstance(settings, dict):
        return
    for name, field in _compared(settings, config):
        found, expected = settings.get(name), field(config)
        if not isinstance(found, (int, float)) or expected is None:
            continue
        if not isclose(found, expected, rel_tol=1e-6):
            raise TensorMismatch(
                f"{where}: says {name} = {found!r:.60}, the configuration {expected}. Give --config of the same model"
            )


def require_agreement_beside(version: Path, directory: Path) -> None:
    """Do the same for the `model_weights/` of an unpacked archive, whose settings lie beside it.

    version: the directory of a distributed checkpoint. directory: that of the configuration.
    """
    file = version.parent / SETTINGS
    if version.name == _DISTRIBUTED and file.is_file():
        _, config = read_config(directory / CONFIG_NAME)
        require_agreement(read_yaml(file), config, str(file))


def _compared(settings: Mapping[Any, Any], config: ModelConfig) -> Iterator[tuple[str, _Field]]:
    yield from _ALWAYS.items()
    if config.positions.kind == "rope" and settings.get("position_embedding_type") == "rope":
        yield from _ROPE.items()
    if config.experts.count:
        yield from _EXPERTS.items()


def _scaled(config: ModelConfig, kind: str, key: str, without: Any) -> Any:
    """A value of the scaling of positions; `without` for another kind of scaling, or none."""
    scaling = config.positions.scaling or {}
    return scaling.get(key) if scaling.get("rope_type") == kind else without
