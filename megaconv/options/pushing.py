"""The options of a push to the Hugging Face Hub."""

from dataclasses import dataclass
from pathlib import Path

from megaconv.options.option import normalize, option
from megaconv.options.shared import CONFIG


@dataclass(frozen=True)
class PushOptions:
    """Options of a push."""

    as_is: bool = option(
        False,
        "--as-is",
        commands=("push",),
        help="Push Megatron's own files instead of converting them to hf.",
    )
    """Push a directory as it is, instead of converting it to a Hugging Face directory first."""
    config: Path | None = option(None, "--config", commands=("push",), **CONFIG)
    """A Hugging Face directory, as for a conversion."""
    revision: str | None = option(
        None,
        "--revision",
        commands=("push",),
        help="A branch to push to; created if it isn't there.",
    )
    """The branch, which is created if it doesn't exist; None: the default branch."""
    private: bool = option(
        False,
        "--private",
        commands=("push",),
        help="Make a repository that is created a private one.",
    )
    """Create the repository as a private one, if it doesn't exist."""
    create_pr: bool = option(
        False,
        "--create-pr",
        commands=("push",),
        help="Open a pull request instead of changing the branch.",
    )
    replace_weights: bool = option(
        False,
        "--replace-weights",
        commands=("push",),
        help="Remove weight files of an earlier model that the push doesn't replace.",
    )
    """Remove weight files that the branch holds and the push doesn't, in the same commit."""
    message: str | None = option(
        None, "--message", metavar="TEXT", commands=("push",), help="The commit's first line."
    )
    card: bool = option(
        True,
        "--card/--no-card",
        commands=("push",),
        help="Write a model card (README.md) where neither side has one.",
    )
    """Write a model card if neither the directory nor the repository has one."""
    include: tuple[str, ...] = option(
        (),
        "--include",
        commands=("push",),
        words=list[str] | None,
        read=tuple,
        metavar="PATTERN",
        help="Push only these paths; may be repeated.",
    )
    """Patterns of paths to push; empty: all."""
    exclude: tuple[str, ...] = option(
        (),
        "--exclude",
        commands=("push",),
        words=list[str] | None,
        read=tuple,
        metavar="PATTERN",
        help="Don't push these paths; may be repeated.",
    )

    def __post_init__(self) -> None:
        normalize(self)
