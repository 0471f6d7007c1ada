"""Published models at their real sizes: a conversion of each is planned, and Megatron's arguments lead back to the same model.

tests/fixtures/published_models.json has what a model's config.json says, as far as `source` gives it; what no source gives is
left out. The sources are training scripts, tables of sizes and tests of others, at one commit each; the keys are transformers'.
Checkpoints are sparse: headers of all tensors, and no data.
"""

import json
import struct
from argparse import Namespace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megaconv import registry
from megaconv.engine.preparation import prepare
from megaconv.families import family_of_hf
from megaconv.input import find_input
from megaconv.megatron.arguments.read import from_arguments, tensor_fields
from megaconv.megatron.arguments.write import to_arguments
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.layout import Chunk, LayerSplit, Layout
from megaconv.model.meaning import lost_fields
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from megaconv.model.training import TrainingState
from megaconv.options import ConvertOptions, SaveOptions
from tests.conftest import FIXTURES
from tests.whole_models import elements_by_table, elements_of_class

PUBLISHED = {
    each["model"]: each for each in json.loads((FIXTURES / "published_models.json").read_text())
}
IN_MEGATRON = [name for name, each in PUBLISHED.items() if each.get("saver", "core") == "core"]
"""All but those that Megatron core can't compute, which are converted between Hugging Face's files."""
MOST_OF_A_FILE = 100_000
"""Tensors in one file. Headers of more are refused."""
COUNTED = {
    "ai21labs/Jamba-v0.1": ("JambaForCausalLM", 51.57),
    "microsoft/Phi-3.5-MoE-instruct": ("PhimoeForCausalLM", 41.87),
    "reflection/Beam-1.0-501B-A23B": ("BeamForCausalLM", 501.3),
    "databricks/dbrx-instruct": ("DbrxForCausalLM", 131.6),
    "state-spaces/mamba-2.8b-hf": ("MambaForCausalLM", 2.768),
    "swiss-ai/Apertus-8B-2509": ("ApertusForCausalLM", 8.053),
    "tiiuae/falcon-mamba-7b": ("FalconMambaForCausalLM", 7.273),
}
"""Model -> (transformers' class, its billions of parameters as its model card counts them)."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def write_sparse(raw: dict[str, Any], path: Path) -> None:
    """Safetensors files as large as the model, of which the headers alone take room."""
    family = family_of_hf(raw, "config.json")
    config = family.read_hf(raw)
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    natives = native_tensors(family.rows, config, HF, Layout(), 0, whole, config.vocab)
    shapes = [(native.name, native.shape) for native in natives if not native.copy]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    if len(shapes) <= MOST_OF_A_FILE:
        write_file(path / "model.safetensors", shapes)
        return
    places: dict[str, str] = {}
    for first in range(0, len(shapes), MOST_OF_A_FILE):
        held, file = shapes[first : first + MOST_OF_A_FILE], f"model-{first}.safetensors"
        write_file(path / file, held)
        places |= dict.fromkeys((name for name, _ in held), file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def write_file(path: Path, shapes: list[tuple[str, tuple[int, ...]]]) -> None:
    header: dict[str, Any] = {}
    start = 0
    for name, shape in shapes:
        end = start + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + start)


def has_experts(raw: dict[str, Any]) -> bool:
    return any(key in raw for key in EXPERTS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if has_experts(each["config"]) else [])
        for name, each in PUBLISHED.items()
    ],
)
def test_a_conversion_of_a_published_model_is_planned(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    assert published["source"]
    layout = dict(published["layout"])
    split = (
        LayerSplit(layers=tuple(layout.pop("layer_split")))
        if "layer_split" in layout
        else LayerSplit()
    )
    write_sparse(published["config"], tmp_path / "hf")
    options = ConvertOptions(save=SaveOptions(**layout, split=split))
    _, report = prepare(
        find_input(tmp_path / "hf"),
        tmp_path / "out",
        registry.saver(published.get("saver", "core")),
        options,
    )
    assert len(report.files) >= layout.get("tp", 1) * layout.get("pp", 1)
    assert not (tmp_path / "out").exists()


def test_there_are_sixty_of_them_and_each_has_a_source() -> None:
    assert len(PUBLISHED) >= 60
    assert all(
        address.startswith("https://") for each in PUBLISHED.values() for address in each["source"]
    )


@pytest.mark.parametrize("name", IN_MEGATRON)
def test_megatrons_arguments_of_a_published_model_mean_the_same(name: str) -> None:
    raw = PUBLISHED[name]["config"]
    config = family_of_hf(raw, "config.json").read_hf(raw)
    arguments = to_arguments(
        config, Layout(stage_layers=(config.layer_count,)), TrainingState(), transformer_impl="transformer_engine",
        grouped_experts=True, vocab_divisor=128, padded_vocab=config.vocab,
    )  # fmt: skip
    back = from_arguments(Namespace(**arguments), tensor_fields(config), family=config.family)
    assert not lost_fields(config, back, but=NOT_COMPUTED)


@pytest.mark.oracle
@pytest.mark.parametrize("name", COUNTED)
def test_published_models_have_as_many_elements_as_transformers_class(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw = PUBLISHED[name]["config"]
    kind, billions = COUNTED[name]
    counted = elements_by_table(raw["model_type"], raw)
    assert counted == elements_of_class(kind, transformers.AutoConfig.for_model(**raw))
    assert counted / 1e9 == pytest.approx(billions, rel=1e-3)
