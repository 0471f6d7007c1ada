"""The short form of `finetune`: `megatron-lite finetune MODEL DATA --save OUT`, with defaults for all other settings.

MODEL   any checkpoint that megaconv reads, or a Hub id       --load MODEL
DATA    a file or a directory of examples                     --finetune-data DATA
        the prefix of an indexed corpus (PREFIX.bin, .idx),
        also as the URI of a store                            --data-path PREFIX
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.stores.addresses import is_store
from megaconv.errors import UsageError
from megaconv.local_paths import local_word

EPOCHS = 3
WARMUP = 0.03
"""Share of the steps in which the learning rate rises."""

LENGTHS = {"epochs", "train_iters", "train_samples"}
WARMUPS = {"lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"}
PRECISIONS = {"bf16", "fp16", "fp32"}
ALTERNATIVES = (LENGTHS, WARMUPS, PRECISIONS)
"""Settings of which a run has one of each group."""
SHARDINGS = {"use_distributed_optimizer", "data_parallel_sharding_strategy"}


@dataclass(frozen=True)
class ShortForm:
    """MODEL and DATA of the command line."""

    model: str
    data: str
    ranks: int = 1
    """Number of processes."""
    bf16: bool = False
    """True if the device computes in bf16 at full speed."""

    def settings(self, given: Collection[str]) -> dict[str, Any]:
        """Return the settings that follow from MODEL and DATA, and defaults for those that are not given.

        given: names of the settings that flags, a YAML file or a recipe set. Raises UsageError.
        """
        for name in ("load", "finetune_data", "data_path"):
            if name in given:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is already set by MODEL DATA; give one of them")
        return {"load": self.model, **self._data(), **self._defaults(given)}

    def _data(self) -> dict[str, Any]:
        if is_store(self.data) or Path(f"{self.data}.idx").is_file():
            return {"data_path": [self.data], "split": "1,0,0"}
        if not Path(local_word(self.data)).exists():
            raise UsageError(
                f"{self.data}: there is no such file or directory, and no indexed corpus {self.data}.idx; "
                "give a file with JSON lines or text, a directory of such files, or the prefix of a corpus"
            )
        prefix = self.data.removesuffix(".bin").removesuffix(".idx")
        if prefix != self.data and Path(f"{prefix}.idx").is_file():
            raise UsageError(
                f"{self.data}: is a file of an indexed corpus; give its prefix {prefix}"
            )
        return {"finetune_data": [self.data]}

    def _defaults(self, given: Collection[str]) -> dict[str, Any]:
        names = set(given)
        found: dict[str, Any] = {"guide": True, "lr_decay_style": "cosine"}
        if not names & LENGTHS:
            found["epochs"] = EPOCHS
        if not names & WARMUPS:
            found["lr_warmup_fraction"] = WARMUP
        if "valid_finetune_data" not in names:
            found["eval_iters"] = 0
        if "save" in names:
            found["resume"] = True
        if self.ranks > 1 and not names & SHARDINGS:
            found["use_distributed_optimizer"] = True
        if self.bf16 and not names & PRECISIONS:
            found["bf16"] = True
        return found


def positionals(words: Sequence[str]) -> list[str]:
    """Return the words before the first flag. Raises UsageError unless there are two or none."""
    found: list[str] = []
    for word in words:
        if word.startswith("-"):
            break
        found.append(word)
    if len(found) == 1:
        raise UsageError(
            "DATA is missing: examples, texts or the prefix of a corpus; write: megatron-lite finetune "
            f"{found[0]} DATA --save DIRECTORY"
        )
    if len(found) not in (0, 2):
        raise UsageError(
            f"finetune takes MODEL and DATA first, then flags; found {' '.join(found)!r} before the flags"
        )
    return found
