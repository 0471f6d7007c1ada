"""Holds the claim on the prefix of --save in an object store, so that only one run saves there."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from formats.stores import leftovers
from formats.stores.claim import Claim
from formats.stores.writing import WritableStore
from megaconv import __version__
from megaconv.errors import TargetExists
from megaconv.store_inputs import output_prefix, writable_store
from megatron_lite.processes.failure import all_or_none

_log = logging.getLogger("megaconv")


@contextmanager
def held(save: str, rank: int, patience_s: float) -> Iterator[None]:
    """Hold the claim. Collective. patience_s: seconds to wait for a run that lives.

    Raises TargetExists if another run saves there, UsageError for a URI without a prefix.
    """
    prefix = output_prefix(save)
    store = writable_store(save)
    claim = None if rank else Claim(store, prefix, __version__)
    all_or_none(lambda: None if claim is None else _take(claim, store, prefix, patience_s))
    try:
        yield
    finally:
        if claim is not None:
            claim.remove()


def _take(claim: Claim, store: WritableStore, prefix: str, patience_s: float) -> None:
    """Take the claim, and remove what a killed run has left."""
    end = time.monotonic() + patience_s
    while True:
        found = leftovers.find(store, prefix)
        try:
            if found.holder is None:
                foreign = tuple(upload.identity for upload in store.uploads(f"{prefix}/"))
                claim.take(replaces=bool(found.objects), foreign=foreign)
            else:
                claim.take_over(found.holder, found.tag, take=False, age=found.age)
            break
        except TargetExists:
            if time.monotonic() >= end:
                raise
            time.sleep(1)
    leftovers.remove(store, found, claim)
    claim.keep_renewed(lambda error: _log.warning("--save: %s", error))
