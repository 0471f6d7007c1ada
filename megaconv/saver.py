"""The record of a saver: the functions that write one kind of checkpoint, and what it can hold.

Each module of `savers` has one, `SAVER`. Savers of other packages have the same; see docs/plugins.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from formats.tensor import LazyTensor
    from megaconv.engine.plan import OutputPlan
    from megaconv.engine.reading_back import Stored
    from megaconv.model.config import ModelConfig
    from megaconv.model.ir import Header, Key, Source
    from megaconv.options import SaveOptions
    from megaconv.values.forms import Form


class Refuse(Protocol):
    """The type of `Saver.refuse`."""

    def __call__(self, config: "ModelConfig", options: "SaveOptions", *, has_layout: bool) -> None:
        """Raise LayoutError for requested sizes that the model can't be sharded to.

        has_layout: True if the input has a layout. Sizes that are not requested are then not known yet.
        """


@dataclass(frozen=True, kw_only=True)
class Saver:
    """Writes one kind of checkpoint."""

    name: str
    """The name for `--saver`. The entry point of a plugin has the same name."""
    description: str
    """One line for `megaconv formats`."""
    plan: Callable[["Header", "SaveOptions"], "OutputPlan"]
    """`plan(header, options)`: the complete plan of the output.

    Raises LayoutError or NotExpressible for a model that can't be written.
    """
    options: Mapping[str, str] = field(default_factory=dict)
    """Keys of `--option key=value` with their descriptions. The saver gets the values in SaveOptions.extra."""
    uses: Callable[["SaveOptions"], tuple[str, ...]] | None = None
    """`uses(options)`: the fields of SaveOptions that the saver reads. Any other field is refused if it is given.

    None: no field is refused.
    """

    holds_optimizer: bool = False
    """True if the saver gets the optimizer's tensors too."""
    trains_weights: bool = False
    """True if the optimizer of the output's software trains the weights themselves, without fp32 copies. With optimizer
    state, the weights are then written in fp32."""
    unfit: Callable[["Header"], str | None] | None = None
    """`unfit(header)`: the reason why the output can't hold the source's optimizer state; None if it can.

    The state is then left out, unless the user insists on it.
    """
    holds_adapter: bool = False
    """True if the saver gets adapters (`Header.adapter`). Other savers get whole models only."""
    holds_scores: bool = False
    """True if the saver gets models with a head of scores: reward models, critics and classifiers."""
    holds_whole: bool = False
    """True if the saver gets all parts of a multimodal model."""
    keeps_names: bool = False
    """True if the saver gets models that no family describes, with tensors under their own names."""
    holds_shifted: bool = False
    """True if the saver gets tensors as their source stores them (`values/shifted.py`), with the added constants in
    Header.shifts.

    Other savers always get canonical values.
    """

    refuse: Refuse | None = None
    """`refuse(config, options, has_layout=...)`: may raise LayoutError before the input's tensors are looked up, if a
    config.json describes the model (`engine/early_check.py`)."""
    fit_adapter: Callable[["Source", "SaveOptions"], "Source"] | None = None
    """`fit_adapter(source, options)`: an adapter in the form that the output's software supports."""
    forms: Callable[["Header", "SaveOptions"], "dict[Key, Form]"] | None = None
    """`forms(header, options)`: the form of each tensor that is stored with other than canonical values
    (`values/stored_forms.py`)."""

    reads_back: bool = False
    """True if megaconv's loaders read the forms that `forms` returns, so that `--verify` needs no `read_back`."""
    read_back: Callable[[Path], "dict[str, LazyTensor]"] | None = None
    """`read_back(directory)`: a finished output's native tensors by record, as stored. If records of several files have
    equal names: by `file/record`.

    `--verify` needs it if no loader returns the tensors as stored (`engine/reading_back.py`).
    """
    as_stored: Callable[[Path], "Stored"] | None = None
    """`as_stored(path)`: an output with the values of its fingerprints, if a loader returns other values. `verify`,
    `inspect` and the check of a source use it (`engine/source_check.py`).

    Only for megaconv's own savers.
    """
