"""Whole multimodal models: the tensors outside the language model, and their names in Megatron.

Megatron-Bridge uses transformers' own vision and audio encoders, next to a `language_model`. Every tensor-parallel rank
of the first stage holds them whole. Their names are those of the files without `model.`, except for RENAMED. Encoders
that Megatron-Bridge builds itself are in towers.py. Source: its mapping registries, 22 August 2026.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from formats.tensor import LazyTensor, Shape
from formats.wording import listing
from megaconv.errors import CorruptCheckpoint, NotExpressible, UnsupportedInput
from megaconv.families.parts.hf_config import QUANTIZATION, as_file
from megaconv.families.parts.language_model import INSIDE, TEXT, THINKER, inner_names, place_inside
from megaconv.families.parts.towers import IN_FILES, TOWERS
from megaconv.model.beside import BESIDE, TOWER, Beside, Whole
from megaconv.model.config import ModelConfig
from megaconv.model.naming import HF_STACKED_TRANSPOSED
from megaconv.model.table import Row

Renamed = tuple[tuple[str, str], ...]

TRANSPOSED = ("multi_modal_projector.proj.weight",)
"""Megatron's names of tensors that transformers stores transposed: the projector of Gemma 3."""

RENAMED: Mapping[str, Renamed] = {
    "gemma3": (
        ("multi_modal_projector.mm_input_projection_weight", TRANSPOSED[0]),
        ("multi_modal_projector.mm_soft_emb_norm.", "multi_modal_projector.mm_soft_embed_norm."),
        ("vision_tower.vision_model.", "vision_tower."),
    ),
}
"""model_type -> (prefix of names in transformers' files, the same prefix in Megatron-Bridge's models)."""

_MODEL = "model."
_AS_BRIDGE_HAS_THEM: Mapping[str, tuple[tuple[str, str], Renamed]] = {
    "gemma3": (INSIDE[1], RENAMED["gemma3"]),
    "qwen2_5_vl": (("", ""), ()),
    "glm4v_moe": (INSIDE[2], (("model.visual.", "visual."),)),
    "kimi_k25": (INSIDE[1], ()),
    "mistral3": (INSIDE[1], ()),
    "qwen2_audio": (INSIDE[1], ()),
    **dict.fromkeys(TOWERS, (INSIDE[2], ())),
}
_EXPERTS: Mapping[str, tuple[str, ...]] = {"qwen3_vl_moe": HF_STACKED_TRANSPOSED.variants}
"""model_type -> the form of the experts in the published files, and the only one that transformers reads. Those of all
other models are separate, or in the form of the language model's family."""

NAMED_AS_IN_BRIDGE = tuple(_AS_BRIDGE_HAS_THEM)
"""model_type of models whose tensors outside the language model have Megatron-Bridge's names. Those of all other models
keep the names of their files."""


def split_whole(
    found: Mapping[str, LazyTensor], config: ModelConfig, rows: tuple[Row, ...], where: str
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor], ModelConfig]:
    """Split a multimodal model into its language model and the other tensors.

    Returns (the language model's tensors by their names in the standalone model, the other tensors by their own names
    with the prefix BESIDE, the configuration with these).
    Raises UnsupportedInput for names that are ambiguous, and CorruptCheckpoint if there are no other tensors.
    """
    whole = config.whole
    assert whole is not None
    names = inner_names(found, rows)
    others = [name for name in found if name not in names]
    if not others:
        raise CorruptCheckpoint(
            f"{where}: holds a language model alone, and config.json is of {named(whole.config)}; --text-only converts it"
        )
    kind = str(whole.config.get("model_type"))
    if kind in TOWERS and any(name.startswith(IN_FILES) for name in others):
        whole = _with_tower(whole, kind)
    others = [name for name in others if not (whole.tower and name.startswith(IN_FILES))]
    renamed = _renamed(kind, others)
    tensors = tuple(
        _beside(_in_megatron(name, renamed), name, tuple(found[name].shape), hf_shape=True)
        for name in others
    )
    begin, inside = place_inside(found)
    whole = replace(whole, begin=begin, inside=inside, renamed=renamed, tensors=tensors)
    _require_distinct(whole, where)
    moved = next((old for old, new in names.items() if whole.hf_name(new) != old), None)
    if moved is not None:
        raise UnsupportedInput(
            f"{where}: {moved} is of the language model, whose other tensors' names begin with {inside}; --text-only converts it alone"
        )
    inner = {new: found[old] for old, new in names.items()}
    beside = {BESIDE + name: tensor for name, tensor in found.items() if name not in names}
    return inner, beside, replace(config, whole=whole)


def _with_tower(whole: Whole, kind: str) -> Whole:
    """The multimodal model with its vision encoder as Megatron builds it. Raises CorruptCheckpoint for impossible
    sizes."""
    return replace(whole, tower=TOWERS[kind].rows, sizes=TOWERS[kind].sizes(whole.config))


def whole_in_megatron(
    whole: Whole, tensors: Mapping[str, Shape], recorded: Whole | None, where: str
) -> Whole:
    """The multimodal model of a Megatron checkpoint.

    tensors: name -> shape of the tensors outside the language model. recorded: the original names, if the checkpoint stores
    them.
    Raises UnsupportedInput if transformers' names of these tensors are unknown.
    """
    kind = str(whole.config.get("model_type"))
    if recorded is None and kind not in _AS_BRIDGE_HAS_THEM:
        raise UnsupportedInput(
            f"{where}: the names of the tensors of {named(whole.config)} in transformers' files are missing, and "
            "its names in Megatron-Bridge aren't known; --text-only converts its language model"
        )
    if recorded is None:
        (begin, inside), renamed = _AS_BRIDGE_HAS_THEM[kind]
        recorded = Whole(whole.config, begin, inside, _EXPERTS.get(kind, ()), renamed)
    found = replace(recorded, config=whole.config)
    if kind in TOWERS and any(name.startswith(TOWER) for name in tensors):
        found = _with_tower(found, kind)
    listed: list[Beside] = []
    for name, shape in tensors.items():
        in_tower = found.tower and name.startswith(TOWER)
        if not in_tower:
            in_files = _in_files(name, recorded.renamed)
            listed.append(_beside(name, in_files, shape))
    found = replace(found, tensors=tuple(listed))
    _require_distinct(found, where)
    return found


def named(config: Mapping[str, Any]) -> str:
    """The name of a model: its class, or its type."""
    return ", ".join(map(str, config.get("architectures") or [])) or str(config.get("model_type"))


def whole_config_json(config: Mapping[str, Any], dtype: str) -> bytes:
    """A multimodal model's config.json, with the current dtype of the weights and without quantization."""
    config, parts = _opened(config)
    for part in parts:
        part.pop(QUANTIZATION, None)
    stated = [
        (part, key)
        for part in parts
        for key in ("dtype", "torch_dtype")
        if part.get(key) is not None
    ]
    for part, key in stated or [(config, "torch_dtype")]:
        part[key] = dtype
    return as_file(config)


def with_values(whole: Whole, values: Mapping[str, tuple[Any, Any]]) -> Whole:
    """A multimodal model whose language model has other values. values: key of config.json -> (value before, value now)."""
    config, parts = _opened(whole.config)
    for key, (before, now) in values.items():
        written, earlier = (
            list(each) if isinstance(each, tuple) else each for each in (now, before)
        )
        for part in parts:
            is_token = key.endswith("_token_id") and part.get(key) is not None
            if part is parts[-1] or is_token or (key in part and part[key] == earlier):
                part[key] = written
    return replace(whole, config=config)


def _opened(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(a copy of a config.json, its parts that are about the language model: itself and those inside it)."""
    copied = dict(config)
    parts = [copied]
    for key in (TEXT, THINKER):
        if isinstance(config.get(key), Mapping):
            copied[key], inner = _opened(config[key])
            parts += inner
    return copied, parts


def whole_notices(whole: Whole | None) -> tuple[str, ...]:
    """Facts for the user of such a model in Megatron."""
    if whole is None:
        return ()
    name, kind = named(whole.config), whole.config.get("model_type")
    words = listing(whole.parts())
    if kind not in _AS_BRIDGE_HAS_THEM:
        return (
            f"{name}: Megatron-Bridge doesn't support this model; tensors outside the language model ({words}) keep their names",
        )
    return ()


def refuse_optimizer(config: ModelConfig, where: str) -> None:
    """Raise NotExpressible for a multimodal model: the order in which an optimizer numbers an encoder's parameters is
    unknown."""
    if config.whole is not None:
        raise NotExpressible(
            f"{where}: optimizer state of {named(config.whole.config)} as a whole can't be converted; --no-optimizer converts the "
            "weights alone"
        )


def _renamed(kind: str, names: Collection[str]) -> Renamed:
    """The prefixes that occur in these names; the longer ones come first."""
    known = (
        *RENAMED.get(kind, ()),
        *((_MODEL + old, new) for old, new in RENAMED.get(kind, ())),
        (_MODEL, ""),
    )
    used = tuple(pair for pair in known if any(name.startswith(pair[0]) for name in names))
    if (_MODEL, "") not in used:
        return used
    plain = [name for name in names if not name.startswith(_MODEL)]
    begins = dict.fromkeys(
        _beginning(name.removeprefix(_MODEL), plain) for name in names if name.startswith(_MODEL)
    )
    return (
        *(pair for pair in used if pair != (_MODEL, "")),
        *((_MODEL + begin, begin) for begin in begins),
    )


def _beginning(name: str, others: Collection[str]) -> str:
    """The shortest beginning of the name, in whole words, that no other name shares. It shows that `model.` stood
    before it."""
    words = re.findall(r"[^.]+\.?|\.", name)
    begins = ("".join(words[:count]) for count in range(1, len(words)))
    return next(
        (begin for begin in begins if not any(other.startswith(begin) for other in others)), name
    )


def _in_megatron(name: str, renamed: Renamed) -> str:
    return next((new + name[len(old) :] for old, new in renamed if name.startswith(old)), name)


def _in_files(name: str, renamed: Renamed) -> str:
    return next((old + name[len(new) :] for old, new in renamed if name.startswith(new)), name)


def _beside(name: str, hf: str, shape: Shape, *, hf_shape: bool = False) -> Beside:
    transposed = name in TRANSPOSED and len(shape) == 2
    return Beside(name, hf, shape[::-1] if transposed and hf_shape else shape, transposed)


def _require_distinct(whole: Whole, where: str) -> None:
    """Raise UnsupportedInput unless renaming is reversible, and no name belongs to the language model or has a meaning
    in a table."""
    seen: set[str] = set()
    for each in whole.tensors:
        is_reversible = _in_files(each.name, whole.renamed) == each.hf and each.name not in seen
        is_of_language_model = each.name.startswith("language_model.")
        has_meaning = whole.builds(BESIDE + each.name) or set("{}|") & set(each.name + each.hf)
        if not is_reversible or is_of_language_model or has_meaning:
            raise UnsupportedInput(
                f"{where}: {each.hf}, outside the language model of {named(whole.config)}, has a name that Megatron core can't store; "
                "--text-only converts the language model alone"
            )
        seen.add(each.name)


def pairs(value: Any) -> Iterable[tuple[str, str]]:
    """Yield pairs of two words. Raises ValueError for anything else."""
    for pair in value:
        if not (
            isinstance(pair, (list, tuple))
            and len(pair) == 2
            and all(isinstance(word, str) for word in pair)
        ):
            raise ValueError(f"{pair!r:.60} should be two names")
        yield pair[0], pair[1]
