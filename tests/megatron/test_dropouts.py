"""The dropouts of a run are those of its arguments, or else those of the model's config.json."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import megaconv
from formats.torch_zip import read as read_rank_file
from megaconv.errors import CorruptCheckpoint
from megaconv.families import families
from megaconv.families.parts.dropouts import KEYS, DropoutKeys, dropout_notices, dropouts_of
from megaconv.megatron.arguments.notices import core_notices
from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.state import read_dropouts
from tests.config_models import WITHOUT_CLASS, WITHOUT_CONFIG, raw_config, raw_gpt2, read
from tests.conftest import FIXTURES
from tests.families.test_encoder_config import BERT, T5
from tests.neighbours import write_bridge, write_nemo
from tests.optimizer_models import load

GPT2 = FIXTURES / "core-gpt2-tp1pp1" / "checkpoint"
OTHER_DROPOUTS = {
    "classifier_dropout",
    "activation_dropout",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "mlp_dropout",
    "summary_first_dropout",
}
"""Keys of classes for dropouts that Megatron doesn't have, and of heads for other tasks."""
WITH_CLASS = sorted(
    name
    for name in families().keys() - set(WITHOUT_CONFIG) - set(WITHOUT_CLASS)
    if families()[name].model_type in CONFIG_MAPPING
)


def rank_file(checkpoint: Path) -> Path:
    (file,) = checkpoint.glob("*/mp_rank_00/model_optim_rng.pt")
    return file


def dropouts_in(checkpoint: Path) -> tuple[float, float]:
    arguments = read_rank_file(rank_file(checkpoint))["args"]
    return arguments.attention_dropout, arguments.hidden_dropout


def set_dropouts(checkpoint: Path, attention: float, hidden: float) -> None:
    """Make these the dropouts of the run that saved a checkpoint."""
    state = load(rank_file(checkpoint))
    vars(state["args"]).update(attention_dropout=attention, hidden_dropout=hidden)
    torch.save(state, rank_file(checkpoint))


def written_hf(root: Path, **keys: Any) -> Path:
    """A Hugging Face GPT-2 with these keys in its config.json."""
    megaconv.convert(GPT2, root, saver="hf")
    file = root / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return root


def test_hugging_faces_dropouts_reach_megatron_directly_and_through_other_formats(
    tmp_path: Path,
) -> None:
    source = written_hf(tmp_path / "hf", attn_pdrop=0.2, resid_pdrop=0.3, embd_pdrop=0.3)
    megaconv.convert(source, tmp_path / "core", saver="core")
    assert dropouts_in(tmp_path / "core") == (0.2, 0.3)
    for saver in ("dcp", "deepspeed", "hf"):
        megaconv.convert(tmp_path / "core", tmp_path / saver / "out", saver=saver)
        megaconv.convert(tmp_path / saver / "out", tmp_path / saver / "back", saver="core")
        assert dropouts_in(tmp_path / saver / "back") == (0.2, 0.3), saver


@pytest.mark.parametrize("saver", ["dcp", "deepspeed", "hf"])
def test_a_runs_own_dropouts_are_written_to_a_new_config_json(saver: str, tmp_path: Path) -> None:
    source = tmp_path / "run"
    megaconv.convert(GPT2, source, saver="core")
    shutil.rmtree(source / "hf")
    set_dropouts(source, 0.25, 0.0)
    megaconv.convert(source, tmp_path / "out", saver=saver)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["attn_pdrop"], config["resid_pdrop"], config["embd_pdrop"]) == (0.25, 0, 0)
    megaconv.convert(tmp_path / "out", tmp_path / "back", saver="core")
    assert dropouts_in(tmp_path / "back") == (0.25, 0.0)


def test_a_runs_own_dropouts_count_more_than_those_of_the_config_json_beside_it(
    tmp_path: Path,
) -> None:
    source = written_hf(tmp_path / "hf", attn_pdrop=0.2, resid_pdrop=0.3, embd_pdrop=0.3)
    megaconv.convert(source, tmp_path / "core", saver="core")
    set_dropouts(tmp_path / "core", 0.0, 0.15)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="core", tp=1)
    assert dropouts_in(tmp_path / "back") == (0.0, 0.15)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (read(raw_gpt2()), (0.1, 0.1)),
        (read(raw_gpt2(attn_pdrop=0.0, resid_pdrop=None)), (0.0, 0.0)),
        (read(BERT | {"hidden_dropout_prob": 0.3}), (0.1, 0.3)),
        (read(T5 | {"dropout_rate": 0.05}), (0.05, 0.05)),
        (read(raw_config("llama") | {"attention_dropout": 0.2, "hidden_dropout": 0.3}), (0.2, 0.0)),
    ],
)
def test_the_keys_and_defaults_are_those_of_transformers_class_and_the_trainers(
    config: ModelConfig, expected: tuple[float, float]
) -> None:
    found = dropouts_of(config)
    assert (found["attention_dropout"], found["hidden_dropout"]) == expected
    assert read_dropouts(None, config) == found


@pytest.mark.parametrize("name", WITH_CLASS)
def test_every_dropout_of_transformers_class_is_known_with_its_default(name: str) -> None:
    described = CONFIG_MAPPING[families()[name].model_type]().to_dict()
    found = described | (described.get("attn_config") or {})
    of_class = {key: value for key, value in found.items() if "drop" in key}
    keys = KEYS.get(name, DropoutKeys())
    expected = {keys.attention: keys.usual_attention, keys.hidden: keys.usual_hidden}
    expected |= {keys.embedding: keys.usual_hidden}
    expected.pop("", None)
    assert {key: value for key, value in of_class.items() if key not in OTHER_DROPOUTS} == expected


@pytest.mark.parametrize("write", [write_bridge, write_nemo])
def test_the_dropouts_of_megatron_bridges_and_nemos_runs_reach_megatron(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    source = write(
        tmp_path / "source", "dist-llama-tp2pp2", attention_dropout=0.25, hidden_dropout=0.15
    )
    megaconv.convert(source, tmp_path / "core", saver="core", tp=1, pp=1)
    assert dropouts_in(tmp_path / "core") == (0.25, 0.15)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "0.1", True])
def test_a_dropout_that_is_no_probability_is_refused(value: object) -> None:
    with pytest.raises(
        CorruptCheckpoint, match=r"config\.json: attn_pdrop .* a number from 0 to 1"
    ):
        dropouts_of(read(raw_gpt2(attn_pdrop=value)))


def test_an_embedding_with_another_dropout_than_the_blocks_gets_a_notice() -> None:
    config = read(raw_gpt2(embd_pdrop=0.0, resid_pdrop=0.1))
    (notice,) = dropout_notices(config)
    assert notice.startswith("embd_pdrop is 0: in training, Megatron drops the embedding")
    assert notice in core_notices(config)
    assert dropout_notices(read(raw_gpt2(embd_pdrop=0.1, resid_pdrop=0.1))) == ()
