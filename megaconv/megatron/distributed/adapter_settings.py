"""The settings of an adapter: `peft:` and the parallel sizes in the run_config.yaml of a Megatron-Bridge run.

    peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 32, alpha: 32, dropout: 0.0, target_modules: [...] ...}
    model: {tensor_model_parallel_size: 2, expert_tensor_parallel_size: 1 ...}

Source: the dataclasses LoRA, CanonicalLoRA and DoRA in megatron/bridge/peft, 0.3.1 to 0.6.2.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import CorruptCheckpoint, UnsupportedInput
from formats.yaml_file import read_yaml
from megaconv.errors import UsageError
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.options import LoadOptions

_log = logging.getLogger("megaconv")

LORA = "megatron.bridge.peft.lora.LoRA"
CANONICAL = "megatron.bridge.peft.canonical_lora.CanonicalLoRA"
DORA = "megatron.bridge.peft.dora.DoRA"
OPTION = "lora_alpha"
READ = frozenset({"_target_", "alpha", "dropout", "dropout_position"})
HARMLESS = frozenset(
    {
        # Which modules have an adapter: the checkpoint's tensors say so.
        *("target_modules", "exclude_modules", "canonical_mapping", "params_to_save"),
        # The rank and its division by the router's top k: the matrices have it. Bridge scales by alpha / rank of each.
        *("dim", "normalize_moe_lora"),
        # One adapter for all experts of a grouped layer, or one for each: the checkpoint has the values of each expert.
        "share_expert_adapters",
        # The start of a training, and the dtype of the matrices, which they have themselves.
        *("lora_A_init_method", "lora_B_init_method", "lora_dtype"),
        # Communication between ranks.
        *("a2a_experimental", "sequence_parallel_input_regather"),
    }
)
"""Settings of Bridge's classes that don't change the function of the matrices in the checkpoint."""
_MOST_RANKS = 1 << 16


class Settings(NamedTuple):
    """The settings of an adapter in run_config.yaml."""

    alpha: float
    dropout: float
    tp: int
    """Tensor-parallel size of the run that saved it; 0 if it isn't known."""
    etp: int
    dora: bool = False


def read_settings(version: Path, options: LoadOptions) -> Settings:
    path = next(
        (each for each in (version / RUN_CONFIG, version.parent / RUN_CONFIG) if each.is_file()),
        None,
    )
    if path is None:
        if OPTION not in options.extra:
            raise UsageError(
                f"{version}: has no {RUN_CONFIG}, which says the alpha of its LoRA; give --option {OPTION}=NUMBER"
            )
        return Settings(_positive(options.extra[OPTION], f"--option {OPTION}"), 0.0, 0, 0)
    settings = read_yaml(path)
    sections = settings if isinstance(settings, dict) else {}
    peft, model = sections.get("peft"), sections.get("model")
    if not isinstance(peft, dict):
        raise CorruptCheckpoint(f"{path}: has no `peft:` with the settings of its adapter")
    kind = str(peft.get("_target_", LORA))
    if kind not in (LORA, CANONICAL, DORA):
        raise UnsupportedInput(
            f"{path}: an adapter of {kind}; only LoRA, CanonicalLoRA and DoRA are translated"
        )
    _require_known(path, peft)
    dropout = peft.get("dropout", 0.0)
    if not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise CorruptCheckpoint(f"{path}: dropout {dropout!r:.40}: expected a number from 0 to 1")
    if dropout and peft.get("dropout_position") == "post":
        _log.warning(
            "%s: its dropout acts behind the adapter (dropout_position: post), and peft's before it; training goes on differently",
            path,
        )
    tp = _ranks(path, model, "tensor_model_parallel_size") or 1
    etp = _ranks(path, model, "expert_tensor_parallel_size") or tp
    alpha = options.extra.get(OPTION, peft.get("alpha"))
    return Settings(_positive(alpha, f"{path}: peft: alpha"), float(dropout), tp, etp, kind == DORA)


def _require_known(path: Path, peft: Mapping[str, Any]) -> None:
    """Raises UnsupportedInput for a setting that is neither read nor harmless, unless it is off."""
    for name, value in peft.items():
        if name not in READ and name not in HARMLESS and value not in (None, False):
            raise UnsupportedInput(
                f"{path}: peft: {name}: {value!r:.60}: isn't known or not supported; megaconv translates adapters without it"
            )


def _ranks(path: Path, model: Any, name: str) -> int:
    """A number of ranks in a configuration; 0 if it is missing."""
    found = model.get(name) if isinstance(model, dict) else None
    if found is not None and (type(found) is not int or not 1 <= found <= _MOST_RANKS):
        raise CorruptCheckpoint(f"{path}: {name} {found!r:.40}: expected a number of ranks")
    return found or 0


def _positive(word: Any, what: str) -> float:
    try:
        number = float(word)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < 1 << 31:
        raise UsageError(f"{what} {word!r:.40}: expected a positive number")
    return number
