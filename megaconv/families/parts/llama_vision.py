"""Llama 3.2 Vision: the Llama that remains without the layers for images.

    {"model_type": "mllama_text_model", "num_hidden_layers": 40, "cross_attention_layers": [3, 8, 13, ...], "vocab_size": 128256}

    in the original   layers 0 1 2 3 4 ...    3 is a layer with cross-attention to images
    in the Llama      layers 0 1 2   3 ...

For a text without images, transformers skips the layers with cross-attention. The embedding has eight more rows than the
head: `<|image|>` has the first of them, and the head can't predict it. Source: modeling_mllama.py of transformers 5.24.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.rows import Rows
from formats.tensor import LazyTensor, Shape
from formats.wording import listing
from megaconv.errors import CorruptCheckpoint, TensorMismatch
from megaconv.families.parts.hf_config import load_config, naming_file
from megaconv.families.parts.keys import CONFIG_NAME, Raw, need_size
from megaconv.families.parts.language_model import DEFAULTS, inner_config
from megaconv.model.check import well_formed

KIND = "mllama_text_model"
"""model_type of the language model, by itself or as text_config."""
IMAGE_ROWS = 8
"""Rows of the embedding after those of the vocabulary."""
LISTED = "cross_attention_layers"
_USUAL = (3, 8, 13, 18, 23, 28, 33, 38)
"""The layers with cross-attention if the key is missing."""
LEFT_OUT = "layers with cross-attention"
EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_LAYER = re.compile(r"((?:model\.)?(?:language_model\.)?(?:model\.)?layers\.)(\d{1,9})\.(.+)")
"""(prefix, number, rest) of the name of a layer's tensor: by itself, in files of the whole model, or in its class."""
_IN_BOTH = (
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
)
_OF_SELF = tuple(f"self_attn.{each}_proj.weight" for each in "qkvo")
_OF_CROSS = (
    *(f"cross_attn.{each}_proj.weight" for each in "qkvo"),
    *("cross_attn.q_norm.weight", "cross_attn.k_norm.weight"),
    *("cross_attn_attn_gate", "cross_attn_mlp_gate"),
)


def text_config(raw: Raw) -> dict[str, Any] | None:
    """The text_config with all sizes; None for other models.

    raw: the config.json of the whole model, or of its language model by itself. Raises CorruptCheckpoint for a text_config
    that is not an object.
    """
    if raw.get("model_type") == KIND:
        return {**DEFAULTS[KIND], **raw}
    inside = inner_config(raw)
    return inside if inside is not None and inside["model_type"] == KIND else None


def cross_layers(raw: Raw) -> tuple[int, ...]:
    """The layers with cross-attention. raw: a text_config. Raises CorruptCheckpoint for an impossible list."""
    layers, listed = need_size(raw, "num_hidden_layers"), raw.get(LISTED)
    if listed is None:
        return tuple(layer for layer in _USUAL if layer < layers)
    are_numbers = isinstance(listed, list) and all(type(each) is int for each in listed)
    if not are_numbers or len(set(listed)) != len(listed) or not set(listed) < set(range(layers)):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {LISTED} should list some of the layers 0 to {layers - 1}, each once, found {listed!r:.80}"
        )
    return tuple(sorted(listed))


def llama_config(raw: Raw) -> dict[str, Any]:
    """The config.json of the Llama. raw: a text_config. Raises CorruptCheckpoint for an impossible list of layers."""
    layers = need_size(raw, "num_hidden_layers") - len(cross_layers(raw))
    kept = {key: value for key, value in raw.items() if key != LISTED}
    # The class of the original never ties the head, since the embedding has more rows.
    changes = {"num_hidden_layers": layers, "tie_word_embeddings": False, "model_type": "llama"}
    return {**kept, **changes, "architectures": ["LlamaForCausalLM"]}


@dataclass(frozen=True)
class LlamaInside:
    """The Llama inside a Llama 3.2 Vision."""

    layers: int
    """Layers of the original."""
    cross: tuple[int, ...]
    """The layers with cross-attention, in order."""
    vocab: int
    """Rows of the head."""

    def _kept(self) -> list[int]:
        return [layer for layer in range(self.layers) if layer not in self.cross]

    def name_in_original(self, name: str) -> str:
        """The name that the original has for a tensor of the Llama. Unchanged for a layer that the Llama doesn't have."""
        match, kept = _LAYER.fullmatch(name), self._kept()
        if match is None or int(match[2]) >= len(kept):
            return name
        return f"{match[1]}{kept[int(match[2])]}.{match[3]}"

    def _name_in_llama(self, name: str) -> str | None:
        """The Llama's name of a tensor of the original; None for layers for images."""
        match, kept = _LAYER.fullmatch(name), self._kept()
        if match is None:
            return name
        layer = int(match[2])
        return f"{match[1]}{kept.index(layer)}.{match[3]}" if layer in kept else None

    def shape_in_original(self, name: str, shape: Shape) -> Shape:
        """The shape that the original has for a tensor of the Llama."""
        return (shape[0] + IMAGE_ROWS, *shape[1:]) if name == EMBEDDING else shape

    def require_layers(self, names: Collection[str], where: str) -> None:
        """Raise TensorMismatch for a missing or duplicate tensor, and for a layer of another kind than config.json says.

        names: of all tensors, in any of the forms of the original's files.
        """
        found: dict[int, set[str]] = {layer: set() for layer in range(self.layers)}
        for name in names:
            match = _LAYER.fullmatch(name)
            if match is None:
                continue
            layer, rest = int(match[2]), match[3]
            held = found.setdefault(layer, set())
            if rest in held:
                raise TensorMismatch(
                    f"{where}: holds layers.{layer}.{rest} twice, the second time as {name}; remove one of the two models"
                )
            held.add(rest)
        for layer, held in found.items():
            self._require_kind(layer, held, where)
        missing = list(self._missing(found))
        if missing:
            raise TensorMismatch(
                f"{where}: the language model lacks {listing(missing)}; copy the whole model",
                code="missing-tensor",
            )

    def _require_kind(self, layer: int, held: Collection[str], where: str) -> None:
        if layer >= self.layers:
            raise TensorMismatch(
                f"{where}: holds layer {layer}, and {CONFIG_NAME} has {self.layers} layers (num_hidden_layers)",
                code="unknown-tensor",
            )
        has_cross = any(name.startswith("cross_attn") for name in held)
        has_self = any(name.startswith("self_attn.") for name in held)
        if (has_self if layer in self.cross else has_cross) or (has_self and has_cross):
            kinds = " and ".join(
                word for word, is_held in (("self", has_self), ("cross", has_cross)) if is_held
            )
            stated = list(self.cross)
            raise TensorMismatch(
                f"{where}: layer {layer} has {kinds}-attention, which {CONFIG_NAME} contradicts ({LISTED} is {stated!s:.80}); "
                "use the original's own config.json"
            )

    def _missing(self, found: Mapping[int, Collection[str]]) -> Iterator[str]:
        for layer in range(self.layers):
            own = _OF_CROSS if layer in self.cross else _OF_SELF
            for name in (*_IN_BOTH, *own):
                if name not in found[layer]:
                    yield f"layers.{layer}.{name}"

    def take(
        self, found: Mapping[str, LazyTensor], where: str
    ) -> tuple[dict[str, LazyTensor], dict[str, int]]:
        """(the tensors of the Llama by its names, descriptions of what is left out -> number of tensors).

        found: the language model's tensors by the names of `MllamaForCausalLM`, with all layers. Raises TensorMismatch for a
        missing head or embedding.
        """
        for name, rows in ((_HEAD, self.vocab), (EMBEDDING, self.vocab + IMAGE_ROWS)):
            self._require_rows(name, rows, found.get(name), where)
        taken: dict[str, LazyTensor] = {}
        for name, tensor in found.items():
            name_in_llama = self._name_in_llama(name)
            if name_in_llama is not None:
                taken[name_in_llama] = tensor
        taken[EMBEDDING] = Rows(found[EMBEDDING], 0, self.vocab)
        left_out = {LEFT_OUT: len(found) - len(taken)}
        return taken, {**left_out, f"the last {IMAGE_ROWS} rows of the embedding": 1}

    def _require_rows(self, name: str, rows: int, tensor: LazyTensor | None, where: str) -> None:
        """Raise TensorMismatch unless the embedding or the head is there, with this number of rows."""
        if tensor is None:
            raise TensorMismatch(
                f"{where}: the language model has no {name}; copy the whole model",
                code="missing-tensor",
            )
        if len(tensor.shape) != 2 or tensor.shape[0] != rows:
            raise TensorMismatch(
                f"{where}: {name} is {list(tensor.shape)}; with vocab_size {self.vocab}, it should have {rows} rows",
                code="misshapen-tensor",
            )


def llama_inside(path: Path) -> LlamaInside | None:
    """The Llama inside the model of this config.json; None for other models. Raises CorruptCheckpoint for impossible values."""
    raw = load_config(path)
    with naming_file(path), well_formed(str(path)):
        text = text_config(raw)
        if text is None:
            return None
        layers, vocab = need_size(text, "num_hidden_layers"), need_size(text, "vocab_size")
        return LlamaInside(layers, cross_layers(text), vocab)
