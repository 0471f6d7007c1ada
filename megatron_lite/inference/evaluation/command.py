"""`megatron-lite evaluate`: prints a table, and writes JSON to a file."""

import argparse
import json
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.terminal import show
from megatron_lite.inference.evaluation import zeroshot
from megatron_lite.inference.generating import open_output
from megatron_lite.inference.opening import Opened, run


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    if given.task is None and not given.lm_eval:
        raise UsageError("give --task, or --lm-eval")
    if given.task is not None and not given.valid_data:
        raise UsageError(f"--task {given.task} needs --valid-data")
    if given.task == "LAMBADA" and given.overlapping_eval is not None:
        raise UsageError("--overlapping-eval requires --task WIKITEXT103")
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    results: dict[str, dict[str, Any]] = {}
    for path in map(Path, given.valid_data or ()) if given.task else ():
        results[f"{given.task} {path.name}"] = _zeroshot(opened, given, path)
    if given.lm_eval:
        from megatron_lite.inference.evaluation.harness import evaluate

        results |= evaluate(
            opened,
            given.lm_eval,
            given.include_path,
            given.num_fewshot,
            given.limit,
            chat=given.apply_chat_template,
        )
    if given.output:
        with open_output(given.output) as file:
            print(
                json.dumps({"model": opened.path, "results": results}, indent=1, default=str),
                file=file,
            )
    for line in table(results):
        show(line)


def _zeroshot(opened: Opened, given: argparse.Namespace, path: Path) -> dict[str, Any]:
    if given.task == "LAMBADA":
        return dict(
            zeroshot.lambada(opened.model, opened.tokenizer, path, strict=given.strict_lambada)
        )
    length = given.seq_length or opened.model.length
    return dict(
        zeroshot.wikitext(opened.model, opened.tokenizer, path, length, given.overlapping_eval)
    )


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each measure."""
    rows = [
        (
            task,
            name.removesuffix(",none"),
            f"{value:.6g}" if isinstance(value, float) else str(value),
        )
        for task, measures in results.items()
        for name, value in measures.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [
        f"{task:<{widths[0]}}  {name:<{widths[1]}}  {value:>{widths[2]}}"
        for task, name, value in rows
    ]
