"""The check of a model before it is published: its tensors must be those of its own record."""

from pathlib import Path

from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.engine.record import RECORD_NAME
from megaconv.engine.source_check import check_source
from megaconv.input import Input
from megaconv.model.ir import Source
from megaconv.options import LoadOptions


def require_recorded(found: Input, source: Source, config: Path | None, *, is_signed: bool) -> None:
    """Read all tensors of a model with a megaconv.json, and compare them with it.

    source: the model's metadata. config: as for a conversion. is_signed: the files are compared with a signature, so
    that the tensors need not be read.
    Raises CorruptCheckpoint for a difference: the record would be published, and a card with its fingerprint.
    """
    remedy = f"copy it again, or remove {RECORD_NAME} if you changed the model"
    check = check_source(found.place, source, remedy=remedy)
    if check.record is None or is_signed:
        return
    whole = open_source(found, LoadOptions(config, optimizer=False, own_names=True))
    check.compare(fingerprint_source(whole, default_workers(writing=False)))
