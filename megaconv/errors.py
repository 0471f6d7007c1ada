"""Every error that a user can act on, and the code of every cause.

The command line catches these errors and no others.
"""

from typing import NamedTuple

from formats.errors import (
    CheckpointError,
    CorruptCheckpoint,
    NotEnoughSpace,
    TargetExists,
    UnsafeContent,
    UnsupportedInput,
)

__all__ = [
    "CODES",
    "Cancelled",
    "Cause",
    "CheckpointError",
    "CorruptCheckpoint",
    "Interrupted",
    "LayoutError",
    "ModelsDiffer",
    "NotEnoughSpace",
    "NotExpressible",
    "TargetExists",
    "TensorMismatch",
    "UnknownFamily",
    "UnknownFormat",
    "UnsafeContent",
    "UnsupportedInput",
    "UsageError",
    "is_interruption",
]


class UsageError(CheckpointError):
    """The options contradict each other or the input."""

    exit_status = 2
    code = "wrong-usage"


class LayoutError(CheckpointError):
    """The model can't be sharded over the requested ranks."""

    exit_status = 2
    code = "layout-impossible"


class NotExpressible(CheckpointError):
    """The target's naming scheme or configuration can't represent something that the source has."""

    exit_status = 2
    code = "not-representable"


class UnknownFormat(CheckpointError):
    """No loader recognises the input, or the input has another format than the requested loader reads."""

    exit_status = 3
    code = "unknown-format"


class UnknownFamily(CheckpointError):
    """No model family has this architecture."""

    exit_status = 3
    code = "unknown-family"


class TensorMismatch(CheckpointError):
    """A tensor is missing, unknown or duplicate, or its shape or dtype contradicts the model."""

    exit_status = 3
    code = "tensor-mismatch"


class ModelsDiffer(CheckpointError):
    """Two checkpoints were expected to hold the same model and don't."""

    exit_status = 4
    code = "models-differ"


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not a subclass of KeyboardInterrupt, which Typer would turn into a silent exit."""


def is_interruption(error: BaseException) -> bool:
    """True if an error is an interruption.

    An interruption can arrive while a thread is reacquiring a lock. The lock then raises a RuntimeError, whose context
    is the interruption.
    """
    return isinstance(error, (Interrupted, KeyboardInterrupt)) or (
        isinstance(error, RuntimeError) and isinstance(error.__context__, Interrupted)
    )


class Cancelled(CheckpointError):
    """The other side of the stream ended first; its own error is the one to report."""

    code = "cancelled"


class PluginError(CheckpointError):
    """An object that another package offers by an entry point can't be loaded, or isn't what the entry point says."""

    code = "plugin-broken"


class Cause(NamedTuple):
    """One row of the table of codes."""

    exit_status: int
    meaning: str


CODES = {
    "failed": Cause(1, "none of the causes below"),
    "system-error": Cause(
        1, "the operating system refused something: no permission, a broken disk"
    ),
    "too-many-files": Cause(
        1, "this process may not open any further file; the limit (`ulimit -n`) is too low"
    ),
    "no-renames": Cause(
        1, "directories can't be renamed at --save-dir, which is how an output appears"
    ),
    "hub-unreachable": Cause(
        1,
        "the Hugging Face Hub can't be reached, or doesn't have or hand out the model that was asked for as hf://",
    ),
    "hub-refused": Cause(
        1, "the Hugging Face Hub refuses a push: no token, no permission, a branch that has moved"
    ),
    "store-unreachable": Cause(
        1,
        "an object store (s3://, gs://, az://) doesn't answer, or answers wrongly, also after several attempts",
    ),
    "store-refused": Cause(
        1,
        "an object store (s3://, gs://, az://) refuses a request: no credentials, no permission, another region",
    ),
    "plugin-broken": Cause(1, "a loader, saver or family of another package can't be used"),
    "rank-lost": Cause(
        1, "one of several processes doesn't start, or ended without reporting an error"
    ),
    "internal-error": Cause(1, "an error in megaconv itself; please report it"),
    "cancelled": Cause(1, "another thread failed first, and its error is reported"),
    "wrong-usage": Cause(
        2, "options that are not known, contradict each other, or don't go with the input"
    ),
    "unknown-option": Cause(2, "a key of --option that neither loader nor saver knows"),
    "unknown-loader": Cause(2, "no loader has the name that --loader gives"),
    "unknown-saver": Cause(2, "no saver has the name that --saver gives"),
    "no-such-input": Cause(
        2, "nothing is at the input's path, nor a model of this name on the Hub"
    ),
    "config-needed": Cause(2, "the input doesn't describe its model: --config is needed"),
    "option-needed": Cause(
        2, "the input doesn't show how a part of it is stored: an --option is needed"
    ),
    "no-optimizer": Cause(
        2,
        "--optimizer is given, and the input has no optimizer state or the output no place for it",
    ),
    "unusable-key": Cause(2, "a key's file holds no key that can sign or verify"),
    "layout-impossible": Cause(
        2, "parallel sizes or a layer split that no model, or not this one, can have"
    ),
    "layout-indivisible": Cause(2, "a size of the model can't be divided over so many ranks"),
    "not-representable": Cause(2, "the output has no place for something that the model has"),
    "target-exists": Cause(2, "something is already at --save-dir"),
    "target-busy": Cause(2, "another run is writing to --save-dir"),
    "unknown-format": Cause(3, "no loader recognises the input"),
    "unsupported-input": Cause(
        3,
        "the input is of a known kind that can't be read: quantized otherwise, an adapter, a compressed archive ...",
    ),
    "incomplete-output": Cause(
        3, "a run is writing the input into an object store, or was killed while it did"
    ),
    "corrupt-checkpoint": Cause(3, "a file contains an impossible value"),
    "missing-file": Cause(3, "a file of the input isn't there"),
    "damaged-patch": Cause(3, "a patch of `megaconv delta` is damaged"),
    "truncated-file": Cause(3, "a file of the input ends too early"),
    "mixed-iterations": Cause(
        3,
        "files of the input are of different iterations or runs, or not of the iteration that their directory names",
    ),
    "misplaced-rank-file": Cause(3, "a rank file lies in the directory of another rank"),
    "no-fingerprints": Cause(3, "verify finds no megaconv.json to compare with"),
    "not-signed": Cause(3, "verify is given a key, and finds no signature"),
    "corrupt-signature": Cause(3, "a signature is damaged, or of another kind than megaconv knows"),
    "changed-since-written": Cause(3, "an input differs from its own megaconv.json"),
    "unknown-family": Cause(3, "no model family has this architecture"),
    "tensor-mismatch": Cause(3, "tensors contradict the model, or each other"),
    "misshapen-tensor": Cause(3, "a tensor's shape differs from the model's"),
    "missing-tensor": Cause(3, "a tensor that the model has isn't in the input"),
    "unknown-tensor": Cause(3, "the input has a tensor that the model has not"),
    "wrong-base": Cause(4, "a patch is applied to another checkpoint than it was made from"),
    "wrong-signature": Cause(4, "a signature was not made by the given key or identity"),
    "changed-since-signed": Cause(4, "files were changed, added or removed since they were signed"),
    "models-differ": Cause(4, "the output reads back with other values than were written"),
    "not-enough-space": Cause(5, "the disk can't hold the output"),
    "unsafe-content": Cause(
        6, "the input asks for code to be run, or reaches outside its directory"
    ),
    "interrupted": Cause(130, "Ctrl-C or SIGTERM"),
}
"""Codes are stable: a script may rely on them, even if messages change. docs/errors.md has the same table."""
