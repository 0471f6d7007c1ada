"""megaconv's own arguments for a multimodal model: the names of its tensors in transformers' files.

megaconv_hf_names       begin, inside (the prefix of the language model's names in a model by itself, and in the
multimodal model),
                        experts (how they are stored), renamed (prefixes of the other parts' names in files, and in megaconv)
position_embedding_type, mrope_section      `mrope`: positions in time, height and width; for text alone all three are
the same
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from formats.tensor import Shape
from formats.wording import counted, listing
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families.parts.language_model import TEXT
from megaconv.families.parts.whole_model import named, pairs, whole_in_megatron
from megaconv.model.beside import Whole
from megaconv.model.check import well_formed
from megaconv.model.naming import Naming

HF_NAMES = "megaconv_hf_names"


def whole_arguments(whole: Whole | None) -> dict[str, Any]:
    """The arguments for a multimodal model; empty for a language model by itself."""
    if whole is None:
        return {}
    names = {
        "begin": whole.begin,
        "inside": whole.inside,
        "experts": list(whole.experts),
        "renamed": [list(pair) for pair in whole.renamed],
    }
    section = mrope_section(whole.config)
    mrope = {"position_embedding_type": "mrope", "mrope_section": section} if section else {}
    return {HF_NAMES: names, **mrope}


def mrope_section(config: Mapping[str, Any]) -> list[int] | None:
    """The mrope section in a multimodal model's config.json; None if images don't give a token three positions."""
    text = config.get(TEXT) or config
    for key in ("rope_parameters", "rope_scaling"):
        found = text.get(key)
        if isinstance(found, Mapping) and found.get("mrope_section"):
            return [int(part) for part in found["mrope_section"]]
    return None


def read_whole(whole: Whole, tensors: Mapping[str, Shape], args: Namespace, where: str) -> Whole:
    """The parts of a multimodal model that a checkpoint holds. tensors: the tensors beside the language model.

    Raises UsageError if there are none, TensorMismatch for positions that differ from config.json, UnsupportedInput.
    """
    if not tensors:
        raise UsageError(
            f"{where}: holds a language model alone, and the config.json is of {named(whole.config)}; give --text-only, "
            "and --base to put it back into the original's files"
        )
    given = getattr(args, HF_NAMES, None)
    if given is not None:
        _check_sections(whole, args, where)
    with well_formed(f"{where}: {HF_NAMES}"):
        recorded = None if given is None else _recorded(whole.config, given)
    return whole_in_megatron(whole, tensors, recorded, where)


def _check_sections(whole: Whole, args: Namespace, where: str) -> None:
    """Raise TensorMismatch if megaconv wrote a checkpoint from a model whose images have other positions.

    Arguments of other programs say less: Megatron-Bridge's are often the defaults of its providers.
    """
    section, stated = getattr(args, "mrope_section", None), mrope_section(whole.config)
    if section is not None and list(section) != stated:
        raise TensorMismatch(
            f"{where}: its mrope_section is {section!r:.60}, that of {named(whole.config)} is {stated}; pass --config with "
            "the original's directory"
        )


def without_images(args: Namespace) -> Namespace:
    """The arguments of the language model by itself. For text, mrope's three positions are equal."""
    if getattr(args, "position_embedding_type", None) != "mrope":
        return args
    return Namespace(**{**vars(args), "position_embedding_type": "rope", "mrope_section": None})


def _recorded(config: Mapping[str, Any], given: Mapping[str, Any]) -> Whole:
    begin, inside, experts = given["begin"], given["inside"], tuple(given["experts"])
    if not all(isinstance(word, str) for word in (begin, inside, *experts)):
        raise ValueError("names should be words")
    Naming("hf", experts)
    return Whole(config, begin, inside, experts, tuple(pairs(given["renamed"])))


def refuse_unknown_beside(tensors: Mapping[str, Shape], where: str) -> None:
    """Raises UsageError for a checkpoint of a multimodal model without a config.json."""
    if tensors:
        words = dict.fromkeys(name.partition(".")[0] for name in tensors)
        number = counted(len(tensors), "tensor")
        raise UsageError(
            f"{where}: holds {number} outside the language model ({listing(words)}), and no config.json names the model; "
            "pass --config with the Hugging Face directory of the original, or --text-only"
        )
