"""Megatron-Bridge itself asked for the settings by which it builds models: the fields of its providers.

    python -m tests.bridge_providers CONFIGS.json PROVIDERS.json      from {name: config.json}, writes the fields

The output has `common` fields, and for each of `models` the fields that differ from them.

Bridge's own AutoBridge makes the provider of a config.json, and its own ConfigContainer writes the fields into the
run_config.yaml of a checkpoint. The fusions that need Transformer Engine are turned off before the fields are complete.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bridge_oracle import import_bridge

FUSIONS = ("moe_permute_fusion", "apply_rope_fusion")


def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The section `model:` of run_config.yaml, for a model that Bridge makes of this config.json."""
    import yaml
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig
    from megatron.core.optimizer import OptimizerConfig
    from transformers import CONFIG_MAPPING

    settings = {name: value for name, value in raw.items() if name != "model_type"}
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(settings)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    for name in FUSIONS:
        setattr(provider, name, False)
    provider.finalize()
    unused = dict.fromkeys(("train", "ddp", "scheduler", "dataset", "tokenizer", "dist"))
    container = ConfigContainer(
        model=provider,
        optimizer=OptimizerConfig(),
        logger=LoggerConfig(),
        checkpoint=CheckpointConfig(save="unused"),
        **unused,
    )
    with tempfile.TemporaryDirectory() as folder:
        container.to_yaml(f"{folder}/run_config.yaml")
        written = yaml.safe_load(Path(f"{folder}/run_config.yaml").read_text())
    fields: dict[str, Any] = written["model"]
    return fields


def with_common_fields(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The usual values of fields that all models have, and of each model what differs."""
    shared = set.intersection(*(set(fields) for fields in found.values()))
    common = {name: _usual([fields[name] for fields in found.values()]) for name in sorted(shared)}
    models = {
        model: {
            name: value
            for name, value in sorted(fields.items())
            if name not in common or value != common[name]
        }
        for model, fields in found.items()
    }
    return {"common": common, "models": models}


def _usual(values: list[Any]) -> Any:
    return max(values, key=values.count)


if __name__ == "__main__":
    import_bridge()
    __import__("megatron.bridge.models")
    configs = json.loads(Path(sys.argv[1]).read_text())
    found = {name: fields_of(raw) for name, raw in configs.items()}
    Path(sys.argv[2]).write_text(json.dumps(with_common_fields(found), indent=1) + "\n")
