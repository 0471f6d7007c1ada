"""Parameters of rank files that later releases of Megatron core renamed. Distributed checkpoints kept their keys.

    up to core 0.16    mtp.layers.0.transformer_layer...    decoder.layers.0.mixer.conv1d.weight
    0.17 and 0.18      mtp.layers.0.mtp_model_layer...      decoder.layers.0.mixer.conv1d.weight
    0.19 and later     mtp.layers.0.mtp_model_layer...      decoder.layers.0.mixer.conv1d_weight

From 0.19 on, the convolution is no module of its own. Its parameters therefore come first in the mixer. Source:
multi_token_prediction.py and mamba_mixer.py of megatron-core 0.16.1 to 0.19.2.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megaconv.errors import UsageError
from megaconv.megatron.states.order import NameOrder, Order
from megaconv.model.config import ModelConfig

FOR_RELEASE = "release"
"""The saver's option: the release of Megatron core that loads the rank files."""
RELEASES = ("0.16", "0.17", "0.19")
"""The first releases with each set of names, the oldest first."""
NAMED_BY = "megaconv_named_by"
"""megaconv's own argument while it converts: the release whose names the rank files of the source have."""

_Rename = Callable[[str], str]
_MTP = re.compile(r"((?:language_model\.)?mtp\.layers\.\d+\.)mtp_model_layer\.")
_MTP_OF_GPT = re.compile(_MTP.pattern + r"(?!layers\.)")
"""A hybrid's MTP layer is a stack of layers. Core has had it since 0.17, under this name alone."""
_OLDER_MTP = re.compile(r"(mtp\.layers\.\d+\.)transformer_layer\.")
_CONVOLUTION = re.compile(r"(\.mixer\.conv1d)_(weight|bias)$")
_OLDER_CONVOLUTION = re.compile(r"(\.mixer\.conv1d)\.(weight|bias)$")


def _may_be_later(name: str) -> bool:
    """False for names that no release changed: nearly all of the tens of thousands in a mixture."""
    return "mtp_model_layer" in name or "conv1d_" in name


def older_name(name: str) -> str:
    """The name of a parameter in core 0.16, from its name in any release."""
    if not _may_be_later(name):
        return name
    return _CONVOLUTION.sub(r"\1.\2", _MTP_OF_GPT.sub(r"\1transformer_layer.", name))


def release_of(names: Collection[str]) -> str:
    """The first release that gives these names to the parameters of a rank file."""
    later = [name for name in names if _may_be_later(name)]
    if any(_CONVOLUTION.search(name) for name in later):
        return "0.19"
    return "0.17" if any(_MTP.search(name) for name in later) else "0.16"


def note_release(args: Namespace, names: Collection[str]) -> None:
    """Keep the release of a source in its args, for an output of rank files. names: those of its parameters."""
    release = release_of(names)
    if release != RELEASES[0]:
        setattr(args, NAMED_BY, release)


def release_for(asked: Mapping[str, str], arguments: Mapping[str, Any], config: ModelConfig) -> str:
    """The release whose names rank files get: by the option, otherwise the source's, otherwise the first with such a model.

    asked: the saver's options. arguments: those of the source's run. Raises UsageError for an unknown release, and for
    one without MTP layers in hybrids.
    """
    first = "0.17" if config.mtp_layers and config.has("hybrid_stack") else RELEASES[0]
    release = asked.get(FOR_RELEASE) or str(arguments.get(NAMED_BY, first))
    if release not in RELEASES:
        raise UsageError(
            f"--option {FOR_RELEASE}={release}: is not known; choose one of {', '.join(RELEASES)}"
        )
    if release < first:
        raise UsageError(
            f"--option {FOR_RELEASE}={release}: has no MTP layers in hybrids; choose {first} or a later release"
        )
    return release


def names_for(release: str) -> _Rename:
    """Returns a function from the name of a parameter in core 0.16 to its name in a release."""

    def renamed(name: str) -> str:
        if release >= "0.17":
            name = _OLDER_MTP.sub(r"\1mtp_model_layer.", name)
        return _OLDER_CONVOLUTION.sub(r"\1_\2", name) if release >= "0.19" else name

    return renamed


def order_for(release: str, order: Order) -> Order:
    """Sorts names of core 0.16 in the order of a release. order: that of core 0.16."""
    if release < "0.19":
        return order

    def of_release(name: str) -> NameOrder:
        found = order(name)
        if not _OLDER_CONVOLUTION.search(name):
            return found
        *mixer, _, (_, place, _) = found
        return (*mixer, (0, -1, place))

    return of_release


def release_notices(config: ModelConfig, release: str) -> tuple[str, ...]:
    """The notice for rank files that later releases of Megatron core load without some of their tensors."""
    if release < "0.19" and config.has("mamba_layers"):
        later, what = "0.19", "the convolutions of Mamba layers"
    elif release < "0.17" and config.mtp_layers:
        later, what = "0.17", "MTP layers"
    else:
        return ()
    return (
        f"rank files have the names of Megatron core {release}: from {later} on, {what} have other names, and Megatron-LM starts with "
        f"random ones; for these releases, add --option {FOR_RELEASE}={later}, or choose --ckpt-format torch_dist",
    )
