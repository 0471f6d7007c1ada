"""The report: every failure with the command that repeats it, and a table of counts."""

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

from tests.trust.attacks import ATTACKS
from tests.trust.judging import PROMISES
from tests.trust.workers import Result


@dataclass
class Report:
    seed: int
    started: float = field(default_factory=time.monotonic)
    cases: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    failures: list[Result] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def skip(self, attack: str, reason: str) -> None:
        self.skipped[attack] = reason
        print(f"{attack}: skipped: {reason}", file=sys.stderr)

    def add(self, result: Result) -> None:
        self.cases[result.attack] += ATTACKS[result.attack].batch
        self.seconds[result.attack] += result.seconds  # type: ignore[assignment]
        self.peak_bytes[result.attack] = max(
            self.peak_bytes.get(result.attack, 0), result.peak_bytes
        )
        if result.promise:
            self.failures.append(result)
            print(
                f"{result.promise}: {result.text}\n  {self._again(result)}",
                file=sys.stderr,
                flush=True,
            )

    def _again(self, result: Result) -> str:
        return f"again: python -m tests.trust --seed {self.seed} --repeat {result.attack}:{result.number} --keep"

    def markdown(self) -> str:
        """A table with a row for each attack, a column for each promise: how often it was broken."""
        broken = Counter((failure.attack, failure.promise) for failure in self.failures)
        columns = [
            *PROMISES,
            *(
                ["harness"]
                if any(failure.promise == "harness" for failure in self.failures)
                else []
            ),
        ]
        lines = [
            f"| attack | cases | {' | '.join(columns)} | largest process | minutes |",
            f"|---|---|{'---|' * len(columns)}---|---|",
        ]
        for attack, count in self.cases.items():
            cells = " | ".join(str(broken[attack, column]) for column in columns)
            size = f"{self.peak_bytes[attack] >> 20} MB" if self.peak_bytes[attack] else "-"
            lines.append(
                f"| {attack} | {count:,} | {cells} | {size} | {self.seconds[attack] / 60:.1f} |"
            )
        lines += [f"| {attack} | skipped: {reason} |" for attack, reason in self.skipped.items()]
        return "\n".join(
            [
                *lines,
                "",
                f"seed {self.seed}, {(time.monotonic() - self.started) / 60:.1f} minutes in all",
            ]
        )

    def json(self) -> str:
        document = {
            "seed": self.seed,
            "cases": self.cases,
            "seconds": {attack: round(seconds, 1) for attack, seconds in self.seconds.items()},
            "peak_bytes": self.peak_bytes,
            "skipped": self.skipped,
            "failures": [asdict(failure) for failure in self.failures],
        }
        return json.dumps(document, indent=1) + "\n"
