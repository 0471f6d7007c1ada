"""`megatron-lite evaluate`: a table on the terminal, and JSON in a file."""

import argparse
import json
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.terminal import show
from megatron_lite.inference.evaluation import zeroshot
from megatron_lite.inference.generating import open_output
from megatron_lite.inference.opening import Opened, Parser, command, make_parser, run

EXAMPLES = """  megatron-lite evaluate --load gpt2 --task WIKITEXT103 --valid-data wiki.test.tokens --overlapping-eval 32
  megatron-lite evaluate --load gpt2 --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada --output lambada.json
  torchrun --nproc-per-node 2 -m megatron_lite evaluate --load ckpt --tp 2 --lm-eval arc_easy hellaswag --limit 100"""


def parser() -> Parser:
    made = make_parser("evaluate", "Measure a model on Megatron's zero-shot tasks, or on any of lm-eval's.", EXAMPLES)
    add = made.add_argument_group("Megatron's tasks").add_argument
    add("--task", choices=("WIKITEXT103", "LAMBADA"), help="perplexity by word, or the last words of texts")
    add("--valid-data", nargs="+", metavar="FILE", help="wiki.test.tokens, or JSON lines of {text}")
    add("--overlapping-eval", type=int, metavar="N", help="stride of windows (a window)")
    add("--seq-length", type=int, metavar="N", help="tokens of a window (--max-length)")
    add("--strict-lambada", action="store_true", help="all tokens of the last word count, not the last one alone")
    add = made.add_argument_group("tasks of lm-eval (extra `evaluate`)").add_argument
    add("--lm-eval", nargs="+", default=[], metavar="TASK", help="names of tasks")
    add("--include-path", metavar="DIRECTORY", help="with tasks of your own")
    add("--num-fewshot", type=int, metavar="N", help="examples in each prompt (the task's)")
    add("--limit", type=float, metavar="X", help="so many examples of each task, or this part of them")
    add("--apply-chat-template", action="store_true", help="prompts as messages of a user")
    made.add_argument("--output", metavar="FILE", help="results as JSON")
    return made


def main(words: list[str]) -> int:
    return command(parser(), words, _main)


def _main(given: argparse.Namespace) -> None:
    if given.task is None and not given.lm_eval:
        raise UsageError("give --task, or --lm-eval")
    if given.task is not None and not given.valid_data:
        raise UsageError(f"--task {given.task} needs --valid-data")
    if given.task == "LAMBADA" and given.overlapping_eval is not None:
        raise UsageError("--overlapping-eval goes with WIKITEXT103 alone")
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    results: dict[str, dict[str, Any]] = {}
    for path in map(Path, given.valid_data or ()) if given.task else ():
        results[f"{given.task} {path.name}"] = _zeroshot(opened, given, path)
    if given.lm_eval:
        from megatron_lite.inference.evaluation.harness import evaluate

        results |= evaluate(
            opened, given.lm_eval, given.include_path, given.num_fewshot, given.limit, chat=given.apply_chat_template
        )
    if given.output:
        with open_output(given.output) as file:
            print(json.dumps({"model": opened.path, "results": results}, indent=1, default=str), file=file)
    for line in table(results):
        show(line)


def _zeroshot(opened: Opened, given: argparse.Namespace, path: Path) -> dict[str, Any]:
    if given.task == "LAMBADA":
        return dict(zeroshot.lambada(opened.model, opened.tokenizer, path, strict=given.strict_lambada))
    length = given.seq_length or opened.model.length
    return dict(zeroshot.wikitext(opened.model, opened.tokenizer, path, length, given.overlapping_eval))


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each measure."""
    rows = [
        (task, name.removesuffix(",none"), f"{value:.6g}" if isinstance(value, float) else str(value))
        for task, measures in results.items()
        for name, value in measures.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [f"{task:<{widths[0]}}  {name:<{widths[1]}}  {value:>{widths[2]}}" for task, name, value in rows]
