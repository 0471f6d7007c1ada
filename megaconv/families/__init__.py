"""Model families, one small file each: a table of tensors and the way from and to Hugging Face's configuration."""

import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from megaconv import plugins
from megaconv.errors import CheckpointError, UnknownFamily, UsageError
from megaconv.families.parts.hf_config import as_file, load_config, quant_method, updated
from megaconv.families.parts.keys import CONFIG_NAME, Keys, read_keys, write_keys
from megaconv.families.parts.language_model import inner_config
from megaconv.families.parts.whole_model import named, whole_config_json
from megaconv.model.beside import Whole
from megaconv.model.ceilings import require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED, changed, require_kept
from megaconv.model.table import Row

SHOWN_BY_TENSORS = ("tie_embeddings", "mtp_layers")
"""Fields that a larger model's config.json may say otherwise: whether there is a head, and layers beyond the last, its files show."""

PROOFS = {
    "megatron-core": "the real megatron-core computes transformers' logits from what is written",
    "custom module": "the same, with modules of the test's own for what megatron-core has none of",
    "names": "names, shapes and bytes; megatron-core has no model that computes the same",
}


@dataclass(frozen=True)
class Family:
    """What a file in this folder defines, as FAMILY."""

    name: str
    architectures: tuple[str, ...]
    """transformers' class names: `LlamaForCausalLM`."""
    model_type: str
    rows: tuple[Row, ...]
    keys: tuple[Keys, ...]
    """The keys of its config.json, and the fields of a model's description that they give."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are the same in all its models, whatever config.json says."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Further keys that compute something, each with the one value that is known; written as they are."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of native names that hold nothing of the model."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions of native names that are of the model and aren't converted -> what they are."""
    features: tuple[str, ...] = ()
    """What every model of the family has, of that which others may have: `qk_norm`."""
    prefix: str = ""
    """In front of all Hugging Face names but the head's; files saved from the bare model lack it."""
    older: Mapping[str, str] = field(default_factory=dict)
    """How Hugging Face names end in older files -> how they end now."""
    complete: Callable[[ModelConfig, Collection[str]], ModelConfig] = lambda config, names: config
    """What a config.json leaves open and only the names of the tensors beside it show."""
    recognized: str | None = None
    """Features (see ModelConfig.has) by which a model that only Megatron's arguments describe is known to be one of these;
    None where these don't distinguish it from another family that computes the same."""
    beyond_core: tuple[str, ...] = ()
    """Fields that Megatron has no argument for and that don't follow from others: without the argument that Megatron-Bridge's
    provider has for them, a config.json has to give them."""
    assumed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: {}
    """Fields that Megatron has no argument for and that follow from others, in all models of the family."""
    other_types: tuple[str, ...] = ()
    """Further values of model_type under which files say that they are of this architecture: `kimi_k2`."""
    proven: str = "megatron-core"
    """What shows that models come out right, one of PROOFS."""
    notices: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    """What a user should know of such a model where Megatron is on either side: in what it computes otherwise than transformers."""

    def read_hf(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The model of a config.json. Raises CorruptCheckpoint, NotExpressible or UnknownFamily for what isn't known."""
        quant_method(raw, CONFIG_NAME)
        return read_keys(self.name, self.keys, self.fixed, self.only, raw)

    def write_hf(self, config: ModelConfig) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 both understand. Raises NotExpressible, naming it, for a field that it can't keep."""
        return write_keys(self.keys, self.fixed, self.only, config, self.architectures[0], self.model_type)

    def config_json(self, config: ModelConfig) -> bytes:
        """The config.json to ship: the model's own where it is known. Raises NotExpressible, as write_hf."""
        if config.whole is not None:
            return self._whole_config_json(config)
        now = self.write_hf(config)
        if config.hf is None:
            return as_file(now)
        # Layers for multi-token prediction are listed in many a config.json whose files don't hold them.
        before = changed(self.read_hf(config.hf), {"mtp_layers": config.mtp_layers})
        return as_file(updated(config.hf, self.write_hf(before), now))

    def _whole_config_json(self, config: ModelConfig) -> bytes:
        """Of a model that sees or hears: its own. Raises NotExpressible where the language model is no longer what that describes."""
        assert config.whole is not None
        raw = config.whole.config
        original = self.read_hf(_text_only(raw, CONFIG_NAME))
        require_kept(config, original, f"the {CONFIG_NAME} of {named(raw)}", but=(*NOT_COMPUTED, *SHOWN_BY_TENSORS))
        return whole_config_json(raw, config.dtype)


REFUSED = {
    **dict.fromkeys(
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        "of Gemma 3, only models like Gemma3ForCausalLM are supported, and not Gemma 3n",
    ),
    "PaliGemmaForConditionalGeneration": "its language model attends to a prompt in both directions, Megatron core's backwards alone",
    **dict.fromkeys(
        (
            *("GPTNeoXForCausalLM", "GPTJForCausalLM", "PhiForCausalLM", "FalconForCausalLM", "CodeGenForCausalLM"),
            *("CohereForCausalLM", "Cohere2ForCausalLM"),
        ),
        "its attention and its MLP work side by side on the same input, for which Megatron core has no layer",
    ),
    **dict.fromkeys(
        ("BloomForCausalLM", "MptForCausalLM", "MPTForCausalLM"),
        "it knows positions by ALiBi, biases on attention scores that Megatron core doesn't have",
    ),
    **dict.fromkeys(
        ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM"),
        "it multiplies what each layer adds by a number of its own, for which Megatron core has no place",
    ),
    **dict.fromkeys(
        ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        "its router chooses experts by sparsemixer, which Megatron core doesn't have",
    ),
    "ApertusForCausalLM": "its activation (xIELU) has numbers that are learned, for which Megatron core has no module",
    "LongcatFlashForCausalLM": "its layers have two attentions, two MLPs and experts that compute nothing, for which Megatron core "
    "has no layer",
    **dict.fromkeys(
        ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
        "it norms q and k after they rotate, Megatron core before",
    ),
    **dict.fromkeys(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        "its full layers have heads of another size than those with a window, keys as values, and a factor each",
    ),
    "DeepseekV4ForCausalLM": "it has several residual streams, which are mixed (hyper-connections), and attention to compressed tokens",
    "MiMoV2FlashForCausalLM": "its layers with a window have other numbers of key/value heads than the others",
    **dict.fromkeys(
        ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
        "its layers with a window have other numbers of heads than the others, and each layer a base of rope of its own",
    ),
    "FalconH1ForCausalLM": "its layers have attention and a Mamba 2 side by side on the same input",
    "DeciLMForCausalLM": "its layers differ in the widths of their MLPs, and some have no attention",
    **dict.fromkeys(
        ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
        "most of its layers have Kimi Delta Attention, which has other projections than a gated delta net",
    ),
    "MiniMaxM3SparseForConditionalGeneration": "it attends to blocks of tokens that an indexer of its own kind chooses",
    "Ernie4_5_VLMoeForConditionalGeneration": "its layers have experts for images beside those for text, of another width",
    **dict.fromkeys(
        (
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen3OmniMoeForConditionalGeneration",
            "Qwen3ASRForConditionalGeneration",
        ),
        "its language model lies in a `thinker` beside towers for sound (and one that talks), of which no names in Megatron are known",
    ),
    **dict.fromkeys(
        ("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"),
        "its tower (RADIO) is in no transformers release; its language model, a Nemotron-H, has no text_config",
    ),
    "Qwen3_5ForTokenClassification": "it has a head for classes of tokens, not for the next one",
}
"""Known architectures without a family, with the reason."""


@cache
def families() -> dict[str, Family]:
    """Our own by name."""
    found = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg):
        family: Family = import_module(f"{__name__}.{module}").FAMILY
        found[family.name] = family
    return found


def all_families() -> dict[str, Family]:
    """Ours, and those of other packages, by name."""
    others = plugins.usable("families", tuple(families()))
    return families() | {name: found.FAMILY for name, found in others.items()}


def family_of_hf(config: Mapping[str, Any], source: str) -> Family:
    """The family of a config.json. Raises UnknownFamily listing what is known."""
    found, architectures = _family_of(config), config.get("architectures") or []
    if found is not None:
        return found
    _refuse_known(architectures, source)
    inside = _family_inside(config)
    if inside is not None:
        raise UnknownFamily(
            f"{source}: {', '.join(map(str, architectures))} sees or hears; as a whole it is converted between Hugging Face directories "
            f"and Megatron core, the language model in it ({inside.architectures[0]}) from the former with --text-only"
        )
    asked = ", ".join(map(str, architectures)) or config.get("model_type") or "no architecture"
    near = _nearest(asked)
    raise UnknownFamily(
        f"{source}: architecture {asked} is not supported{near}; `megaconv formats` lists all that are, and "
        "docs/add-a-model.md says how to add one"
    )


def _nearest(asked: str) -> str:
    """The supported architectures whose names are most like one that isn't, which may be a misspelling."""
    # By what stands before ForCausalLM, which nearly all have.
    known = {name.partition("For")[0]: name for family in all_families().values() for name in family.architectures}
    found = [known[near] for near in get_close_matches(asked.partition("For")[0], known, n=3)]
    return f" (names like it that are: {', '.join(found)})" if found else ""


def _family_of(config: Mapping[str, Any]) -> Family | None:
    architectures = config.get("architectures") or []

    def fits(family: Family) -> bool:
        if architectures:
            return bool(set(architectures) & set(family.architectures))
        return config.get("model_type") in (family.model_type, *family.other_types)

    for known_families in (families, all_families):  # looking for other packages only where ours don't fit
        for family in known_families().values():
            if fits(family):
                return family
    return None


def _refuse_known(architectures: Collection[Any], source: str) -> None:
    for architecture in map(str, architectures):
        if architecture in REFUSED:
            raise UnknownFamily(f"{source}: {architecture} can't be converted: {REFUSED[architecture]}")


def _family_inside(raw: Mapping[str, Any]) -> Family | None:
    """That of the language model in a model which is none itself; None where there is none, or not one of ours."""
    inside = inner_config(raw)
    kind = None if inside is None else inside["model_type"]
    if kind is None:
        return None
    return next((each for each in all_families().values() if kind in (each.model_type, *each.other_types)), None)


def sees_or_hears(directory: Path) -> bool:
    """Whether a Hugging Face directory's model is none of the families', and the language model in it is."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        return False
    raw = load_config(path)
    with well_formed(str(path)):
        return _sees_or_hears(raw)


def _sees_or_hears(raw: Mapping[str, Any]) -> bool:
    refused = any(str(architecture) in REFUSED for architecture in raw.get("architectures") or [])
    return not refused and _family_of(raw) is None and _family_inside(raw) is not None


def _text_only(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config.json that the language model would have by itself. Raises UsageError where there is none inside, UnknownFamily."""
    _refuse_known(raw.get("architectures") or [], source)
    inside, family = inner_config(raw), _family_inside(raw)
    named = ", ".join(map(str, raw.get("architectures") or [])) or raw.get("model_type")
    if inside is None:
        raise UsageError(
            f"--text-only: {source} has no text_config: {named} is a language model by itself; leave it out"
        )
    if family is None:
        raise UnknownFamily(
            f"{source}: the language model in {named} is {inside['model_type']}, which is not supported"
        )
    return inside | {"architectures": [family.architectures[0]]}


def read_config(path: Path, *, text_only: bool = False, whole: bool = False) -> tuple[Family, ModelConfig]:
    """The model that a config.json describes. Raises CorruptCheckpoint for values that can't be, UnknownFamily.

    text_only: of one that sees or hears the language model inside. Raises UsageError where there is none.
    whole: the same as a part of the larger model, which otherwise is refused.
    """
    raw = load_config(path)
    require_countable(raw, str(path))
    try:
        with well_formed(str(path)):
            larger = Whole(raw) if whole and not text_only and _sees_or_hears(raw) else None
            raw = _text_only(raw, str(path)) if text_only or larger else raw
            found = family_of_hf(raw, str(path))
            return found, replace(found.read_hf(raw), whole=larger)
    except CheckpointError as error:  # families know the file by its name alone
        if str(error).startswith(f"{CONFIG_NAME}: "):
            error.args = (f"{path}{str(error).removeprefix(CONFIG_NAME)}",)
        raise


def family(name: str) -> Family:
    """One of ours, or of another package's. Raises UnknownFamily."""
    found = families().get(name) or all_families().get(name)
    if found is None:
        raise UnknownFamily(f"model family {name!r} is not known; known: {', '.join(all_families())}")
    return found


def recognize(config: ModelConfig) -> Family:
    """The family of a model whose configuration doesn't say it. Raises UnknownFamily where none fits, or more than one."""
    for known in (families, all_families):  # another package's only where none of ours fits
        found = [
            family for family in known().values() if family.recognized is not None and config.has(family.recognized)
        ]
        if found:
            break
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownFamily(
            f"the checkpoint may be of several model families: {', '.join(family.name for family in found)}; "
            "give --config with the Hugging Face directory of the model"
        )
    near = min(
        (family for family in all_families().values() if family.recognized),
        key=lambda family: len(_unlike(config, family)),
    )
    raise UnknownFamily(
        f"the checkpoint is of no supported model family; the nearest is {near.name}, and differs in: "
        + "; ".join(_unlike(config, near))
    )


def _unlike(config: ModelConfig, family: Family) -> list[str]:
    """What a model would need to have, or to lack, to be recognized as one of a family's."""
    return [
        f"the model has {name[1:]}" if name.startswith("!") else f"the model has no {name}"
        for name in (family.recognized or "").split()
        if not config.has(name)
    ]
