"""HRM-Text: fused and separate names, older keys, marked prompts, parameters, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.meaning import lost_fields
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, create
from tests.whole_models import (
    assert_same_files,
    elements_by_table,
    elements_of_class,
    load_class,
    logits_of_text,
    raw_config_of,
    tokens,
    weights,
    write_model_files,
)

FUSED = "model.L_module.layers.0.attn.gqkv_proj.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model under the names of published files, and under those of transformers' class."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("hrm")
    create(CONVERTED["hrm_text"], root / "published")
    model = load_class(root / "published", "HrmTextForCausalLM")
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_model_files(root / "class", held, raw_config_of(root / "published"))
    return {name: root / name for name in ("published", "class")}


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["published", "class"])
def test_each_kind_of_names_is_read_and_becomes_the_published_one(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    assert (FUSED in weights(sources[form])) is (form == "published")
    megaconv.convert(sources[form], tmp_path / "dcp", saver="dcp", workers=1)
    megaconv.convert(tmp_path / "dcp", tmp_path / "hf", saver="hf", verify=True, workers=1)
    assert_same_files(tmp_path / "hf", sources["published"])
    found, expected = (
        load_class(path, "HrmTextForCausalLM") for path in (tmp_path / "hf", sources[form])
    )
    assert torch.equal(logits_of_text(found), logits_of_text(expected))


@pytest.mark.oracle
def test_tokens_of_a_marked_prompt_attend_in_both_directions_only_with_prefix_lm(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    table, raw = family("hrm_text"), raw_config_of(sources["published"])
    marked = (torch.arange(24) < 9).long().expand(2, -1)
    found = []
    for prefix in (True, False):
        own = table.write_hf(table.read_hf(raw | {"prefix_lm": prefix}))
        assert own["prefix_lm"] is prefix
        hf = write_model_files(tmp_path / str(prefix), weights(sources["published"]), own)
        model = load_class(hf, "HrmTextForCausalLM")
        with torch.no_grad():
            found.append(model(input_ids=tokens(), token_type_ids=marked).logits)
    assert not torch.equal(*found)
    assert lost_fields(table.read_hf(raw), table.read_hf(raw | {"prefix_lm": False}))


def test_without_the_layers_of_a_stack_the_number_of_layers_is_theirs() -> None:
    table, raw = family("hrm_text"), raw_config("hrm_text", H_cycles=2, L_cycles=3)
    older = {key: value for key, value in raw.items() if key != "num_layers_per_stack"}
    saved = raw | {"num_layers_per_stack": 4, "num_hidden_layers": 32}
    assert table.read_hf(older).layer_count == table.read_hf(saved).layer_count == 4
    assert table.read_hf(older | {"initializer_range": 0.05}).embedding_scale == 20


@pytest.mark.oracle
def test_a_model_of_transformers_default_sizes_has_as_many_elements_as_its_class() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.HrmTextConfig()
    counted = elements_by_table("hrm_text", config.to_dict())
    assert counted == elements_of_class("HrmTextForCausalLM", config)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_layers_per_stack": 4, "num_hidden_layers": 5}, "num_hidden_layers should be 32, .* found 5"),
    ({"H_cycles": 0}, "H_cycles should be a positive number, found 0"),
    ({"L_cycles": 10**9}, "recurrence.low should be at most"),
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"mlp_bias": True}, "mlp_bias True is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
)  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_settings_that_no_such_model_has_are_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("hrm_text").read_hf(raw_config("hrm_text", **keys))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.z_L_init", None, "missing"),
        (FUSED, torch.ones(96, 64), r"is \[96, 64\], expected \[384, 64\]"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_refused_by_name(
    name: str, change: torch.Tensor | None, words: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    held = weights(sources["published"])
    del held[name]
    changed = held if change is None else held | {name: change}
    hf = write_model_files(tmp_path / "hf", changed, raw_config_of(sources["published"]))
    with pytest.raises(CheckpointError, match=f"{name}.*{words}|{words}.*{name}"):
        megaconv.convert(hf, tmp_path / "out", saver="hf", workers=1)
