"""Whole multimodal models of transformers: loads them, computes with them, and compares their files."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.families import family
from megaconv.model.meaning import lost_fields
from megaconv.model.table import canonical_shapes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_class(directory: Path, name: str, **options: Any) -> "PreTrainedModel":
    """Load a model of this class in float32, with weights at aligned addresses.

    A mapped file has them at any address, which changes the rounding.
    """
    transformers = pytest.importorskip("transformers")
    model: PreTrainedModel
    model, report = getattr(transformers, name).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not report["missing_keys"]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model.eval()


def tokens() -> torch.Tensor:
    """[2, 24], the same ones every time."""
    return torch.randint(7, 110, (2, 24), generator=torch.Generator().manual_seed(3))


def logits_of_text(model: "PreTrainedModel") -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens()).logits
    return logits


def hidden_states(model: Any) -> torch.Tensor:
    """The last hidden states for the same text, of a model without a head."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens()).last_hidden_state
    return found


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def raw_config_of(directory: Path) -> dict[str, Any]:
    """The keys of a config.json."""
    return dict(json.loads((directory / "config.json").read_text()))


def write_model_files(
    directory: Path, tensors: dict[str, torch.Tensor], raw: dict[str, Any]
) -> Path:
    """Write a Hugging Face directory; returns it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def assert_same_files(found: Path, expected: Path) -> None:
    """Names, dtypes and values."""
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


@dataclass(frozen=True)
class WholeModel:
    """A model whose language model has a class of its own, without a head."""

    classes: str
    """The beginning of transformers' class names."""
    family: str
    text: Mapping[str, Any]
    """The text_config."""
    config: Callable[..., dict[str, Any]]
    """A function that returns the config.json, with other keys of the text_config."""
    create: Callable[..., None]
    """A function that saves the model in a directory, with other keys of the text_config."""

    def load(
        self, directory: Path, kind: str = "ForConditionalGeneration", **options: Any
    ) -> "PreTrainedModel":
        return load_class(directory, self.classes + kind, **options)

    def assert_settings_are_written(
        self, source: Path, others: Mapping[str, dict[str, Any]]
    ) -> None:
        """Each config.json is written from a description alone. others: settings of models with the same weights."""
        transformers = pytest.importorskip("transformers")
        made = getattr(transformers, f"{self.classes}Config")
        table, expected = family(self.family), logits_of_text(self.load(source))
        for words, settings in {"the same": {}, **others}.items():
            stated = {**self.text, **settings}
            written = table.write_hf(table.read_hf(stated))
            wholes = self.config(**settings), {**self.config(), "text_config": written}
            logits = [logits_of_text(self.load(source, config=made(**whole))) for whole in wholes]
            assert torch.equal(*logits), words
            assert torch.equal(logits[0], expected) is not bool(settings), words
            lost = lost_fields(table.read_hf(dict(self.text)), table.read_hf(stated))
            assert bool(lost) is bool(settings), words

    def assert_layers_are_written(self, settings: dict[str, Any], folder: Path) -> None:
        """A model with other tensors: transformers computes the same with a config.json from a description alone."""
        source, output = folder / "hf", folder / "out"
        self.create(source, **settings)
        megaconv.convert(source, output, saver="hf", verify=True, workers=1, text_only=True)
        table = family(self.family)
        written = table.write_hf(table.read_hf({**self.text, **settings}))
        (output / "config.json").write_text(json.dumps(written))
        expected = hidden_states(self.load(source).model.language_model)
        assert torch.equal(hidden_states(self.load(output, "TextModel")), expected)


def elements_by_table(name: str, raw: Mapping[str, Any]) -> int:
    """Elements of all tensors of a model of a family, by the family's table. raw: its config.json."""
    table = family(name)
    shapes = canonical_shapes(table.rows, table.read_hf(raw))
    return sum(prod(shape) for shape in shapes.values())


def elements_of_class(name: str, config: "PretrainedConfig") -> int:
    """Elements of all tensors that a class of transformers saves. A tied head counts once."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() for tensor in tensors.values())
