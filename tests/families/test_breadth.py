"""The share of transformers' causal language models that megaconv reads: a model that drops out makes a test fail."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import CheckpointError
from megaconv.families import read_config

AT_LEAST = 90
"""Model types of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES whose default configuration is read."""
NOT_BY_DEFAULT = {
    "dots1": "its default configuration has no number of experts",
    "llama4": "its default configuration has no size: the text model's is llama4_text",
    "qwen3_5": "its default configuration has no size: the text model's is qwen3_5_text",
    "qwen3_5_moe": "its default configuration has no size: the text model's is qwen3_5_moe_text",
}
"""Supported model types whose default configuration describes no model."""

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model type -> its family; "" if the default configuration is not read."""
    transformers = pytest.importorskip("transformers")
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    place = tmp_path_factory.mktemp("defaults")
    found = {}
    for model_type, classes in names.items():
        raw = _default(transformers, model_type)
        if raw is not None:
            first = classes if isinstance(classes, str) else classes[0]
            found[model_type] = _family(raw | {"architectures": [first]}, place)
    return found


def _default(transformers: Any, model_type: str) -> dict[str, Any] | None:
    """The default configuration of a model type; None if its class has none."""
    try:
        config = transformers.AutoConfig.for_model(model_type)
    except Exception:  # some classes need arguments
        return None
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def _family(raw: Mapping[str, Any], place: Path) -> str:
    path = place / "config.json"
    path.write_text(json.dumps(raw))
    try:
        return read_config(path, whole=True)[0].name
    except CheckpointError:
        return ""


def test_most_causal_language_models_of_transformers_are_read(read: Mapping[str, str]) -> None:
    assert len(read) >= 188
    supported = [model_type for model_type, family in read.items() if family]
    assert len(supported) >= AT_LEAST, f"only {len(supported)} of {len(read)}: {supported}"


def test_supported_models_that_are_not_read_by_default_describe_no_model(
    read: Mapping[str, str],
) -> None:
    assert {model_type for model_type in NOT_BY_DEFAULT if not read[model_type]} == set(
        NOT_BY_DEFAULT
    )
