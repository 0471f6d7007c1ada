"""Compares the metadata of a GGUF file with the configuration that --config gives for it.

    llama.rope.freq_base 500000.0       positions.theta
    rope_freqs.weight                   positions.scaling of Llama 3.1

The shapes of tensors show most sizes of a model. They don't show the values that are compared here, such as the epsilon
of norms: with the configuration of a similar model, the weights would be right and the model would be another one. A
value is compared if both sides have it. The number of positions isn't compared, because it changes no computation.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from formats.lazy_numpy import Floats, np
from megaconv.errors import NotExpressible, TensorMismatch, UnsupportedInput
from megaconv.gguf.metadata import divisors, metadata
from megaconv.gguf.names import ARCHITECTURES, DIVISORS
from megaconv.gguf.unread import unread
from megaconv.model.config import ModelConfig

_log = logging.getLogger("megaconv")

_SHOWN = frozenset((
    # The shapes of tensors show these, and llama.cpp's converter has changed some of them over time.
    *("vocab_size", "embedding_length", "feed_forward_length", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.key_length_mla", "attention.value_length_mla", "expert_feed_forward_length"),
    *("expert_shared_feed_forward_length", "expert_shared_count"),
    # The length of texts changes no computation, and a window may be longer than all texts.
    *("context_length", "attention.sliding_window"),
))  # fmt: skip
_ALWAYS: Mapping[str, Callable[[ModelConfig], Any]] = {
    "attention.head_count": lambda config: config.attention.heads,
    "block_count": lambda config: config.layer_count,
    "expert_used_count": lambda config: config.experts.per_token or None,
    "rope.freq_base": lambda config: config.positions.theta,
}
"""Keys that are compared even if llama.cpp can't represent the rest of the configuration."""
_FACTOR = "rope.scaling.factor"
_TOLERANCE = 1e-5
"""Relative. Both sides are float32, and some values are stored as a share of another one."""


def require_agreement(
    keys: Mapping[str, Any],
    stored: Mapping[str, Floats],
    config: ModelConfig,
    where: str,
) -> None:
    """Raise TensorMismatch if a file's metadata contradict the configuration, and UnsupportedInput for another
    architecture. A warning says that the configuration scales positions and the file doesn't.

    keys: the file's metadata. stored: its tensors of divisors, by name.
    """
    architecture = _require_architecture(keys, config.family, where)
    prefix = f"{architecture}."
    expected = _expected(config, prefix)
    for name, value in expected.items():
        found = keys.get(prefix + name)
        if found is not None and value is not None and not _same(found, value):
            raise TensorMismatch(
                f"{where}: says {prefix}{name} = {found!r:.60}, the configuration {value}"
            )
    scaled = keys.get(prefix + _FACTOR)
    if scaled not in (None, 0, 1) and config.positions.scaling is None:
        raise TensorMismatch(
            f"{where}: says {prefix}{_FACTOR} = {scaled!r:.60}, the configuration scales no positions"
        )
    if scaled is None and _FACTOR in expected:
        _warn_unscaled(where, f"{prefix}{_FACTOR}")
    _require_divisors(stored, config, where)


def _require_architecture(keys: Mapping[str, Any], family: str, where: str) -> str:
    found, wanted = keys.get("general.architecture"), ARCHITECTURES.get(family)
    if wanted is not None and wanted == found:
        return wanted
    others = f"which is not supported; supported are {', '.join(ARCHITECTURES)}"
    raise UnsupportedInput(
        f"{where}: is of llama.cpp's architecture {found!r:.40}; the configuration is of a {family}, "
        + (f"which is {wanted!r} there" if wanted else others)
    )


def _expected(config: ModelConfig, prefix: str) -> dict[str, Any]:
    """Key without the prefix -> its value by the configuration."""
    found = {name: read(config) for name, read in _ALWAYS.items()}
    try:
        written = metadata(config, file_type=0)
    except NotExpressible:
        return found
    for key, value in written.items():
        name = key.removeprefix(prefix)
        if name not in (key, *_SHOWN, *_ALWAYS):
            found[name] = value.value
    return found


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, str)) or isinstance(found, str):
        return bool(found == expected)
    if not isinstance(found, (int, float)):
        return False
    return bool(np.isclose(np.float32(found), np.float32(expected), rtol=_TOLERANCE, atol=0))


def _require_divisors(stored: Mapping[str, Floats], config: ModelConfig, where: str) -> None:
    try:
        expected = divisors(config)
    except NotExpressible:
        expected = {}
    for name in DIVISORS:
        found, wanted = stored.get(name), expected.get(name)
        if found is None and wanted is None:
            continue
        if found is None:
            _warn_unscaled(where, name)
        elif wanted is None:
            raise TensorMismatch(
                f"{where}: has {name}, which scales positions; the configuration scales none. Give --config of the same model"
            )
        elif found.shape != wanted.shape or not np.allclose(found, wanted, rtol=_TOLERANCE, atol=0):
            raise TensorMismatch(
                f"{where}: {name} scales positions by other numbers than the configuration. Give --config of the same model"
            )


def _warn_unscaled(where: str, name: str) -> None:
    _log.warning(
        "%s: has no %s: the configuration scales positions, and llama.cpp would not scale them in this file",
        where,
        name,
    )


def name_other_keys(keys: Mapping[str, Any], config: ModelConfig, where: str) -> None:
    """Warn of keys that --config gives no value to, and that may change what the model computes.

    There is no warning if llama.cpp can't represent the configuration, because its keys are not known then.
    """
    architecture = ARCHITECTURES[config.family]
    expected = _expected(config, f"{architecture}.")
    if expected.keys() == _ALWAYS.keys():
        return
    read = {*expected, *_SHOWN} - {"attention.sliding_window"}
    for key, value in unread(architecture, keys, read, config.attention.head_dim):
        has_window = key.endswith(".sliding_window") and config.window is not None
        is_scaling = ".rope.scaling." in key and config.positions.scaling is not None
        if not has_window and not is_scaling:
            _log.warning(
                "%s: says %s = %.60r, which the configuration has no value for; --config wins",
                where,
                key,
                value,
            )
