"""The vocabulary of an output that has more or fewer tokens than the input."""

from dataclasses import dataclass

from megaconv.errors import UsageError
from megaconv.model.ceilings import VOCABULARY
from megaconv.options.option import INPUT_AND_OUTPUT, VALUES, Range, normalize, option
from megaconv.options.shared import tokenizer_place

NEW_ROWS = MEAN, PIECES, ZERO = ("mean", "pieces", "zero")
"""The accepted values of `new_rows`."""


@dataclass(frozen=True)
class VocabularyChoice:
    """The vocabulary of the output."""

    size: int | None = option(
        None,
        "--vocab-size",
        heading=VALUES,
        commands=("convert",),
        range=Range(1, VOCABULARY),
        help="Tokens of the output: adds rows to embedding and head, or takes the last ones away.",
    )
    """None: as many as the input has, or as `tokenizer` needs."""
    multiple: int | None = option(
        None,
        "--pad-to-multiple-of",
        heading=VALUES,
        commands=("convert",),
        range=Range(1, VOCABULARY),
        help="Add rows to embedding and head up to a multiple of this number, such as 64. config.json counts them.",
    )
    """None: no more tokens than the output needs."""
    tokenizer: str | None = option(
        None,
        "--tokenizer",
        heading=INPUT_AND_OUTPUT,
        commands=("convert",),
        read=tokenizer_place,
        metavar="DIR",
        help="The directory of the output's tokenizer, a Megatron run with hf/, or a Hub id. For its new tokens the model gets new rows.",
    )
    """A directory, a Megatron run or an iteration of one, or a Hub id; None: the input's."""
    new_rows: str | None = option(
        None,
        "--new-rows",
        heading=VALUES,
        commands=("convert",),
        help="New rows of embedding and head: mean (of all rows; by default), pieces (of the tokens that a new token's text had before) or "
        "zero. Given, it also fills rows of new tokens that the model has already.",
    )
    """None: the mean, and rows that the model has already stay as they are."""

    def __post_init__(self) -> None:
        normalize(self)
        if self.new_rows not in (None, *NEW_ROWS):
            raise UsageError(f"--new-rows {self.new_rows}: expected one of {', '.join(NEW_ROWS)}")
        if self.new_rows is not None and not self.is_given:
            raise UsageError(
                f"--new-rows {self.new_rows}: has no effect without --vocab-size, --pad-to-multiple-of or --tokenizer; leave it out"
            )
        if self.new_rows == PIECES and self.tokenizer is None:
            raise UsageError(
                "--new-rows pieces needs --tokenizer, the tokenizer that has the new tokens"
            )

    @property
    def is_given(self) -> bool:
        """True if the output's vocabulary or tokenizer may differ from the input's."""
        return bool(self.asked)

    @property
    def asked(self) -> str:
        """The given options, for messages."""
        given = {
            "--vocab-size": self.size,
            "--pad-to-multiple-of": self.multiple,
            "--tokenizer": self.tokenizer,
        }
        return ", ".join(name for name, value in given.items() if value is not None)

    def padded(self, size: int) -> int:
        """A number of tokens, rounded up to the multiple. Raises UsageError for more than a model can have."""
        multiple = self.multiple or 1
        found = -(-size // multiple) * multiple
        if found > VOCABULARY:
            raise UsageError(
                f"--pad-to-multiple-of {multiple}: {size:,} tokens become {found:,}; expected {VOCABULARY:,} or less"
            )
        return found
