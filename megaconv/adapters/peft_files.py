"""An adapter as peft saves it: adapter_config.json beside adapter_model.safetensors (older: adapter_model.bin).

    base_model.model.<module>.lora_A.weight       [r, in]; lora_B.weight [out, r], lora_B.bias [out]
    base_model.model.<module>.lora_embedding_A    [r, vocabulary]; lora_embedding_B [hidden, r]
    base_model.model.<module>.lora_magnitude_vector   [out], of DoRA
    base_model.model.<module>.token_adapter.trainable_tokens_delta   [tokens, hidden], rows of trainable_token_indices
    base_model.model.<anything else>              replaces the model's tensor of this name (modules_to_save, trained biases)

A module's path may contain `base_layer`: if peft wrapped a module twice, and before the tensors of the wrapped module.
If the vocabulary was resized, peft stores embedding and head whole, under up to three names: <module>.weight, the same as
<module>.modules_to_save.weight, and <module>.original_module.weight before the training.
Source: peft 0.21.2, tuners/lora and utils/save_and_load.py.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from formats.rank_files import find_version
from formats.tensor import LazyTensor
from formats.wording import listing
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UnsupportedInput
from megaconv.huggingface.weight_files import read_file

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""File names in the order of preference, the newer first."""
PREFIX = "base_model.model."
_PARTS = {
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_B.bias": "bias", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude", "lora_embedding_A": "a", "lora_embedding_B": "b",
}  # fmt: skip
"""Suffix of a tensor's name -> the part of a module's adapter."""

_TOKENS = ".token_adapter.trainable_tokens_delta"
_WRAPPERS = re.compile(r"\.(base_layer|token_adapter|modules_to_save)(?=\.)")
"""Parts of the names of whole tensors that peft's wrappers add."""
_UNTRAINED = ".original_module."
"""Part of the names of whole tensors as they were before the training."""

_READ = frozenset((
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_parameters"),
    *("ensure_weight_tying", "init_lora_weights", "base_model_name_or_path", "lora_dropout", "trainable_token_indices", "fan_in_fan_out"),
))  # fmt: skip
_HARMLESS = frozenset((
    # The tensors show these: which modules have an adapter, which tensors are replaced.
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "bias", "lora_bias"),
    # These affect only the training.
    *("inference_mode", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # Names, and settings of features that are refused if they are enabled.
    *("task_type", "revision", "peft_version", "auto_mapping", "megatron_core", "qalora_group_size", "runtime_config"),
))  # fmt: skip
PISSA, OLORA = "pissa", "olora"
"""Values of init_lora_weights with which peft takes a part out of the base's weights, now and whenever it loads the adapter."""
MICA = "mica"
_CHANGES_THE_BASE = (PISSA, OLORA, "corda", "loftq", "lora_ga")
"""Values of init_lora_weights, or their beginnings, with which training begins by changing the base's own weights."""


_MOST_PATTERNS, _MOST_WAYS = 20_000, 1_000_000
"""Limits for one key of a configuration, which may have a pattern for every module."""


@dataclass(frozen=True)
class AdapterConfig:
    """The content of an adapter_config.json."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Pattern of a module's path -> the module's rank, where it isn't `rank`."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    """Suffixes of names of parameters that have their own adapter, not as the weight of a module."""
    keeps_tie: bool = False
    """True if head and embedding stay tied when the embedding has an adapter."""
    base: str = ""
    """The model that the adapter was trained on, for messages."""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Module -> tokens whose rows were trained alone. The module `""` stands for all modules."""
    dropout: float = 0.0
    """The dropout of the training. It is copied to the output."""
    flipped: bool = False
    """True if weights are stored as [in, out]. It counts for models without a family, which have no table that says so."""
    initialization: str = ""
    """PISSA or OLORA for an adapter that goes with a changed base; empty otherwise."""
    rounds_first: bool = False
    """True if peft rounds a delta to the weight's dtype before it adds it, as it does for MiCA."""

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """The tokens of a module's trained rows; empty if there are none."""
        named = (
            tokens
            for name, tokens in self.tokens.items()
            if name and f".{module}".endswith(f".{name}")
        )
        return next(named, self.tokens.get("", ()))

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """The factor of the product of a module's two matrices."""
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def alpha_of(self, module: str, rank: int) -> float:
        """The alpha that gives the same scale when divided by the rank, as in all methods but rsLoRA."""
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha * math.sqrt(rank) if self.rslora else alpha


def _by_pattern(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """The value of the first pattern that matches a module's path, or a suffix of it after a dot, as in peft."""
    starts = [0, *(match.end() for match in re.finditer(r"\.", module))]
    fitting = (
        value
        for key, value in patterns.items()
        if any(_compiled(key).match(module, start) for start in starts)
    )
    return next(fitting, otherwise)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{pattern})$")


@dataclass(frozen=True)
class ModuleAdapter:
    """The adapter of one module or one parameter."""

    module: str
    """The module's path in the model."""
    a: LazyTensor
    b: LazyTensor
    bias: LazyTensor | None = None
    magnitude: LazyTensor | None = None
    embedding: bool = False

    def refuse_contradiction(self, config: AdapterConfig, where: Path) -> None:
        """Raise TensorMismatch if exactly one of tensors and configuration has a magnitude. where: for the message."""
        if (self.magnitude is not None) != config.dora:
            has = "no" if self.magnitude is None else "a"
            raise TensorMismatch(
                f"{where}: {self.module} has {has} magnitude, but its configuration requires the opposite"
            )


@dataclass(frozen=True)
class Adapter:
    """An opened adapter directory. No tensor has been read."""

    directory: Path
    config: AdapterConfig
    modules: tuple[ModuleAdapter, ...]
    replaced: Mapping[str, LazyTensor]
    """The tensors that replace the model's tensors, by name."""
    weights: Path
    tokens: Mapping[str, LazyTensor] = field(default_factory=dict)
    """New rows of an embedding or a head for single tokens, by the name of the whole tensor."""


def adapter_directory(path: Path) -> Path:
    """The directory of the adapter: path, or the latest iteration if path is a run that trains an adapter.

    Raises CorruptCheckpoint if the run's tracker names a missing iteration.
    """
    if (path / CONFIG).is_file():
        return path
    version = find_version(path)
    return version if version is not None and (version / CONFIG).is_file() else path


def open_peft_adapter(directory: Path, config: AdapterConfig) -> Adapter:
    """Open an adapter. Raises CheckpointError if it isn't complete, or has tensors that can't be merged."""
    present = [directory / name for name in WEIGHTS if (directory / name).is_file()]
    if not present:
        raise CorruptCheckpoint(
            f"{directory}: has an {CONFIG} but no weights; expected {' or '.join(WEIGHTS)}",
            code="missing-file",
        )
    return adapter_of(directory, config, present[0], read_file(present[0]))


def adapter_of(
    directory: Path, config: AdapterConfig, weights: Path, tensors: Mapping[str, LazyTensor]
) -> Adapter:
    """The adapter in tensors with the names of peft's files. Raises CheckpointError like `open_peft_adapter`."""
    tokens = {name: each for name, each in tensors.items() if name.endswith(_TOKENS)}
    others = {name: each for name, each in tensors.items() if name not in tokens}
    modules, replaced = _sorted_out(others, str(weights))
    return Adapter(
        directory=directory,
        config=config,
        modules=modules,
        replaced=replaced,
        weights=weights,
        tokens={_of_tokens(name): each for name, each in tokens.items()},
    )


def _of_tokens(name: str) -> str:
    """The name of the whole tensor with some trained rows."""
    return name.removeprefix(PREFIX).removesuffix(_TOKENS) + ".weight"


def peft_config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """The settings of an adapter_config.json.

    Raises CorruptCheckpoint for a value of the wrong type, UnsupportedInput for a setting that can't be merged.
    """
    _refuse_unsupported(raw, str(path))
    try:
        return AdapterConfig(
            _rank(raw["r"]),
            _number(raw["lora_alpha"]),
            _flag(raw, "use_rslora"),
            _flag(raw, "use_dora"),
            {key: _rank(value) for key, value in _patterns(raw, "rank_pattern")},
            {key: _number(value) for key, value in _patterns(raw, "alpha_pattern")},
            _names(raw, "target_parameters"),
            _flag(raw, "ensure_weight_tying"),
            _text(raw, "base_model_name_or_path"),
            _tokens(raw.get("trainable_token_indices")),
            _dropout(raw.get("lora_dropout") or 0.0),
            _flag(raw, "fan_in_fan_out"),
            _initialization(raw),
            raw.get("init_lora_weights") == MICA,
        )
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise CorruptCheckpoint(
            f"{path}: is not the configuration of a LoRA adapter ({type(error).__name__}: {error})"
        ) from error


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise UnsupportedInput(
            f"{where}: an adapter of peft_type {kind!r}; only LORA can be merged into weights here"
        )
    start = raw.get("init_lora_weights")
    changes_base = isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE)
    if changes_base and not _initialization(raw):
        refuse_initialization(f"{start}", where)
    switched_on = [key for key, value in raw.items() if value and key not in _READ | _HARMLESS]
    if switched_on:
        raise UnsupportedInput(
            f"{where}: {listing(switched_on)}: not supported; only plain LoRA, rsLoRA and DoRA are"
        )


def refuse_initialization(start: str, where: str) -> NoReturn:
    """Raise UnsupportedInput for an adapter whose base isn't the model without it."""
    raise UnsupportedInput(
        f"{where}: init_lora_weights {start!r} changed the base's weights before training, and the adapter doesn't hold "
        "what they became; save it converted to plain LoRA (peft: path_initial_model_for_weight_conversion)"
    )


def _initialization(raw: Mapping[str, Any]) -> str:
    start = raw.get("init_lora_weights")
    return start.lower() if isinstance(start, str) and start.lower() in (PISSA, OLORA) else ""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 31:
        raise ValueError(f"{value!r} is no rank and no alpha")
    return value


def _dropout(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no dropout")
    return float(value)


def _rank(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is no rank")
    return int(_number(value))


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, (bool, type(None))):
        raise ValueError(f"{key} {value!r} is neither true nor false")
    return bool(value)


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, (str, type(None))):
        raise ValueError(f"{key} {value!r} is no text")
    return value or ""


def _names(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} {value!r} is no list of names")
    return tuple(value)


def _tokens(value: Any) -> dict[str, tuple[int, ...]]:
    """trainable_token_indices by module. A list counts for each module that has trained rows."""
    by_module = value if isinstance(value, dict) else {"": value or []}
    for tokens in by_module.values():
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError(f"trainable_token_indices {value!r:.80} is no list of tokens")
    return {module: tuple(tokens) for module, tokens in by_module.items()}


def _patterns(raw: Mapping[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    """The patterns of a key with their values. Raises ValueError for patterns that could take too long.

    Python's regular expressions try all ways to divide a text among the repeats of a pattern.
    """
    patterns = raw.get(key) or {}
    for text in patterns:
        _compiled(text)
    if len(patterns) > _MOST_PATTERNS or sum(map(_ways, patterns)) > _MOST_WAYS:
        raise ValueError(
            f"{len(patterns):,} patterns in {key} with too many repeats and alternatives: {next(iter(patterns))!r:.80}"
        )
    return tuple(patterns.items())


def _ways(pattern: str) -> float:
    """Roughly, the number of ways to match a text of a hundred characters; infinite for a repeated group."""
    if re.search(r"\)[*+{]", pattern):
        return math.inf
    repeats = len(re.findall(r"[*+{]|(?<!\()\?", pattern))
    return math.prod(part.count("|") + 1 for part in pattern.split(")")) * 100.0 ** min(
        repeats, 100
    )


def _sorted_out(
    tensors: Mapping[str, LazyTensor], where: str
) -> tuple[tuple[ModuleAdapter, ...], dict[str, LazyTensor]]:
    """(adapters of modules, tensors that replace the model's)."""
    parts: dict[str, dict[str, LazyTensor]] = {}
    replaced: dict[str, LazyTensor] = {}
    embeddings = set()
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise TensorMismatch(
                f"{where}: {name}: names of a peft adapter begin with {PREFIX}",
                code="unknown-tensor",
            )
        rest = name.removeprefix(PREFIX)
        module, end = _split(rest)
        if end:
            parts.setdefault(module, {})[_PARTS[end]] = tensor
            embeddings |= {module} if "embedding" in end else set()
        elif "lora_" in rest:
            raise UnsupportedInput(
                f"{where}: {name} is a kind of adapter tensor that is not supported"
            )
        elif _UNTRAINED not in rest:
            replaced[_WRAPPERS.sub("", rest)] = tensor
    for module, held in parts.items():
        if not {"a", "b"} <= held.keys():
            raise TensorMismatch(
                f"{where}: {module} has only one of its two matrices", code="missing-tensor"
            )
    return tuple(
        ModuleAdapter(module, **held, embedding=module in embeddings)
        for module, held in parts.items()
    ), replaced


def _split(name: str) -> tuple[str, str]:
    """(module, suffix of a tensor's name); an empty suffix if the tensor isn't part of an adapter."""
    for end in _PARTS:
        if name.endswith("." + end):
            return name[: -len(end) - 1], end
    return name, ""


def module_path(module: str) -> str:
    """The module's path in the model, without the names that peft's wrappers add."""
    return module.replace(".base_layer", "")
