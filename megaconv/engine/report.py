"""The report of a conversion: its files, its fingerprint, and notices for the user."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.stores.waiting import Waiting
from formats.wording import counted
from megaconv.engine.changes import Changes
from megaconv.engine.completeness import completeness_notices
from megaconv.engine.fingerprints import Fingerprint
from megaconv.engine.lineage import Lineage
from megaconv.engine.plan import OutputPlan
from megaconv.engine.record import RECORD_NAME
from megaconv.engine.source_check import SourceCheck
from megaconv.model.ir import Header
from megaconv.values.code_tensors import Rounding

LEFT_OUT = "optimizer state was left out: only weights are converted"
BESIDE = (
    "--text-only: these tensors were not converted: {}; --saver hf --base ORIGINAL puts them back"
)
CODE_LEFT_OUT = "code is never copied: {}; if you need and trust it, copy it to the output yourself"
MODULES_LEFT_OUT = (
    "modules beside the model are not converted: {}; copy them to the output yourself"
)
SPOOLED = "parts that wait to be sent take up to {:,} bytes on the disk (--spool, --max-spool)"


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a conversion; for a planned conversion, the expected result."""

    header: Header
    plan: OutputPlan
    target: Path | str
    """The place of the output: a path, or a URI of a store."""
    memory: int
    record_bytes: int
    """Size of megaconv.json. No plan contains this file, because its fingerprints are known last."""
    parameters: int
    """Number of parameters of the model. `header` describes the stored tensors, which may be blocks of bytes."""
    seconds: float = 0.0
    fingerprint: Fingerprint | None = None
    verified: bool = False
    code: tuple[str, ...] = ()
    """Python files in the source's directory."""
    modules: tuple[str, ...] = ()
    """Files with weights of further modules, which are neither converted nor copied."""
    tokenizer: tuple[str, ...] = ()
    """Notices about a tokenizer that doesn't fit the model."""
    missing: tuple[str, ...] = ()
    """Parts that a transformers output lacks (`engine/completeness.py`).

    Any of `tokenizer`, `generation_config.json`, `eos_token_id`.
    """
    check: SourceCheck = field(default_factory=SourceCheck, repr=False)
    """The comparison with the source's own record."""
    adapters: tuple[Mapping[str, Any], ...] = ()
    """Adapters in the weights, merged by this conversion or an earlier one, as in megaconv.json."""
    merging: tuple[str, ...] = ()
    """Lines for people about the adapters that this conversion merges."""
    changes: Changes = field(default_factory=Changes, repr=False)
    """The parts of the model that the conversion changes: its layers, its experts, its vocabulary."""
    lineage: Lineage = field(default_factory=lambda: Lineage({}), repr=False)
    """The inputs that the output is made from."""
    rounding: Rounding | None = None
    """The rounding error of quantized weights, if there are any. A resumed run counts only the weights that it read; None
    for several processes, each of which reads a part."""

    waiting: Waiting | None = None
    """The places of the parts that wait to be sent, for an output in a store."""

    def __repr__(self) -> str:
        size = f"{self.parameters:,} parameters, {self.nbytes:,} bytes in {len(self.files)} files"
        done = "planned" if self.fingerprint is None else f"fingerprint {self.fingerprint.weights}"
        return f"<Report: {self.target}, {self.header.config.family}, {size}, {done}>"

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user about the output."""
        header = self.header
        found: list[str] = []
        if header.beside:
            parts = [
                f"{name} ({counted(count, 'tensor')})" for name, count in header.beside.items()
            ]
            found.append(BESIDE.format(", ".join(parts)))
        found += completeness_notices(header, self.missing)
        found += self.tokenizer
        found += self.merging
        if header.has_optimizer and not header.carries_optimizer:
            found.append(LEFT_OUT)
        found += self.check.notices
        found += self.lineage.notices
        if self.code:
            found.append(CODE_LEFT_OUT.format(", ".join(self.code)))
        if self.modules:
            found.append(MODULES_LEFT_OUT.format(", ".join(self.modules)))
        found += self.plan.notices
        if self.waiting is not None and self.waiting.is_spooled:
            found.append(SPOOLED.format(self.waiting.spool_bytes))
        return tuple(found)

    @property
    def files(self) -> dict[str, int]:
        """Size of every file of the output, by path below the target."""
        return {name: layout.size for name, layout in sorted(self.plan.files.items())} | {
            RECORD_NAME: self.record_bytes
        }

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "target": str(self.target),
            "family": self.header.config.family,
            "parameters": self.parameters,
            "tensors": len(self.header.manifest),
            "files": self.files,
            "from_base": list(self.plan.from_base),
            "adapters": list(self.adapters),
            "changes": self.changes.to_json(),
            "bytes": self.nbytes,
            "memory_bytes": self.memory + (self.waiting.memory_bytes if self.waiting else 0),
            "spool_bytes": self.waiting.spool_bytes if self.waiting else 0,
            "seconds": round(self.seconds, 3),
            "fingerprint": self.fingerprint.weights if self.fingerprint else None,
            "optimizer_fingerprint": self.fingerprint.optimizer if self.fingerprint else None,
            "notices": list(self.notices),
            "missing": list(self.missing),
            "verified": self.verified,
            "quantized": None if self.rounding is None else self.rounding.to_json(),
        }
