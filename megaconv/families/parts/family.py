"""The definition of a model family: its tensors, its keys of config.json, and all in which families differ."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import NotExpressible
from megaconv.families.parts.bare import is_bare, read_bare
from megaconv.families.parts.dropouts import written_dropouts
from megaconv.families.parts.hf_config import as_file, quant_method, require_causal, updated
from megaconv.families.parts.keys import CONFIG_NAME, Keys, by_own_names, read_keys, write_keys
from megaconv.families.parts.language_model import inner_config
from megaconv.families.parts.own_names import config_of_own_names
from megaconv.families.parts.scores import (
    NOT_OF_KEYS,
    read_scores,
    with_scores,
    written_scores,
)
from megaconv.families.parts.whole_model import named, whole_config_json
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED, changed
from megaconv.model.meaning import require_kept
from megaconv.model.table import Row

SHOWN_BY_TENSORS = ("tie_embeddings", "mtp_layers")
"""Fields in which a multimodal model's config.json may differ. Its files show whether there is a head, and whether
there are layers after the last one."""

_NO_RUN: Mapping[str, Any] = {}

PROOFS = {
    "megatron-core": "the real megatron-core computes transformers' logits from the output",
    "custom module": "the same, with the test's own modules for parts that megatron-core lacks",
    "names": "names, shapes and bytes; megatron-core has no model that computes the same",
}


@dataclass(frozen=True)
class Family:
    """A model family, which a file in megaconv/families defines as FAMILY."""

    name: str
    architectures: tuple[str, ...]
    """Class names of transformers, such as `LlamaForCausalLM`."""
    model_type: str
    rows: tuple[Row, ...]
    keys: tuple[Keys, ...]
    """The keys of the family's config.json, with the fields of the model's description that they give."""
    classes_of_others: tuple[str, ...] = ()
    """Classes of another family that transformers uses for this family's models as well. Only `model_type` tells them
    apart."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are the same in all models of the family, whatever config.json says."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the computation but have only one supported value. They are written with that value."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of keys (`hidden_size`) -> the keys (`n_embd`), as in the attribute_map of transformers' class."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of native names that hold no part of the model."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions of native names that belong to the model but aren't converted -> their description."""
    unused: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    """A function that returns further patterns of the same kind: tensors that the class never computes with."""
    features: tuple[str, ...] = ()
    """Optional features that every model of the family has, such as `qk_norm`."""
    prefix: str = ""
    """Prefix of all Hugging Face names except the head's. Files saved from the bare model lack it."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of modules in transformers' class, and so in adapters -> the prefixes of the same modules in files."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Endings of Hugging Face names in older files -> the current endings."""
    other_names: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {}
    """A function from all Hugging Face names of a checkpoint: names that some release writes -> the usual names."""
    complete: Callable[[ModelConfig, Mapping[str, LazyTensor]], ModelConfig] = (
        lambda config, tensors: config
    )
    """A function that adds to a configuration what only the names and shapes of its tensors show."""
    recognized: str | None = None
    """Features (see ModelConfig.has) that identify the family if only Megatron's arguments describe a model. None if
    they don't distinguish it from another family with the same computation."""
    beyond_core: tuple[str, ...] = ()
    """Fields without a Megatron argument that don't follow from other fields. Megatron-Bridge's provider may give them;
    otherwise a config.json has to."""
    assumed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: {}
    """Fields without a Megatron argument that follow from other fields in all models of the family."""
    describes: Callable[[Mapping[str, Any]], bool] = lambda raw: True
    """A function that returns False for a config.json of the same class that another family describes."""
    other_types: tuple[str, ...] = ()
    """Further values of model_type for this architecture, such as `kimi_k2`."""
    older_types: tuple[str, ...] = ()
    """The members of `other_types` whose files have keys that transformers' class doesn't read. An output has the
    class's keys."""
    proven: str = "megatron-core"
    """The evidence that models are converted correctly: one of PROOFS."""
    no_class: str = ""
    """The reason why Hugging Face can't have models of the family, for messages; empty if it can."""
    reads_hf: bool = True
    """False if megaconv doesn't read the Hugging Face directories that it writes for the family."""
    numbered: str = ""
    """The values that the model computes with the numbers of its layers, for messages; empty if there are none. If there are,
    layers can't have other numbers."""
    notices: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    """A function that returns notices for the user, if Megatron is on either side of a conversion. They report where
    Megatron's computation of the model differs from transformers' computation."""

    def __post_init__(self) -> None:
        """Give each decoder the rows of a head of scores, which no family lists."""
        object.__setattr__(self, "rows", with_scores(self.rows))

    def read_hf(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The model of a config.json. Raises CorruptCheckpoint, NotExpressible or UnknownFamily for unsupported values."""
        quant_method(raw, CONFIG_NAME)
        found = read_keys(
            self.name, self.keys, self.fixed, self.only, by_own_names(raw, self.aliases)
        )
        if not found.has("encoder") and not found.has("transform"):
            require_causal(raw, CONFIG_NAME)
        own_head = {**read_scores(self.name, raw), **read_bare(self.name, self.architectures, raw)}
        return changed(replace(found, hf=dict(raw)), own_head)

    def is_bare(self, config: ModelConfig) -> bool:
        """True for a model without a head, as sentence-transformers stores embedding models."""
        return is_bare(self.architectures, config)

    def write_hf(self, config: ModelConfig) -> dict[str, Any]:
        """A config.json for transformers 4 and 5. Raises NotExpressible, which names the field, for a field that it
        can't represent."""
        if self.no_class:
            raise NotExpressible(self.no_class)
        has_scores = config.head.labels > 0
        written = write_keys(
            self.keys,
            self.fixed,
            self.only,
            config,
            self.architectures[0],
            self.model_type,
            but=NOT_OF_KEYS if has_scores else (),
        )
        return written | (written_scores(config) if has_scores else {})

    def config_json(self, config: ModelConfig, run: Mapping[str, Any] = _NO_RUN) -> bytes:
        """The config.json of the output: the model's own if it is known, with the necessary changes.

        run: Megatron's arguments of the run that trained the model. A new config.json gets its dropouts. Raises
        NotExpressible like write_hf.
        """
        if config.own_names is not None:
            return config_of_own_names(config.own_names, config.dtype)
        if config.whole is not None:
            return self._whole_config_json(config)
        now = self.write_hf(config)
        if config.hf is None or config.hf.get("model_type") in self.older_types:
            return as_file(now | written_dropouts(self.name, run))
        # Many a config.json lists MTP layers that its files don't hold.
        before = changed(self.read_hf(config.hf), {"mtp_layers": config.mtp_layers})
        return as_file(updated(config.hf, self.write_hf(before), now, self.aliases, self.keys))

    def _whole_config_json(self, config: ModelConfig) -> bytes:
        """The own config.json of a multimodal model. Raises NotExpressible if it no longer describes the language
        model."""
        assert config.whole is not None
        raw = config.whole.config
        inside = inner_config(raw)
        assert inside is not None
        original = self.read_hf(inside | {"architectures": [self.architectures[0]]})
        require_kept(
            config,
            original,
            f"the {CONFIG_NAME} of {named(raw)}",
            but=(*NOT_COMPUTED, *SHOWN_BY_TENSORS),
        )
        return whole_config_json(raw, config.dtype)
