"""`megatron-lite evaluate`: opens the model and runs the asked measurements."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.terminal import show
from megatron_lite.data.recipes.documents import Reader
from megatron_lite.inference.evaluation import corpus, retro, zeroshot
from megatron_lite.inference.evaluation.random_windows import sampled_perplexity
from megatron_lite.inference.evaluation.tables import check_output, evaluate_toxicity, report
from megatron_lite.inference.opening import Opened, run

BATCHES = 100
"""Batches of --webtext-eval, Megatron's default of --eval-iters."""


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    _check(given)
    check_output(given.output)
    given.sources = corpus.find_sources(given.corpus)
    run(given, lambda opened: _use(opened, given))


def _check(given: argparse.Namespace) -> None:
    measures = (given.task, given.lm_eval, given.corpus, given.retro_project_dir)
    if not any(measures):
        raise UsageError(
            "give --task, --corpus, --retro-project-dir, or --lm-eval; --toxicity alone needs no --load"
        )
    if given.task is not None and not given.valid_data:
        raise UsageError(f"--task {given.task} needs --valid-data")
    if given.task == "LAMBADA" and given.overlapping_eval is not None:
        raise UsageError("--overlapping-eval requires --task WIKITEXT103 or --corpus")
    if given.limit_tokens is not None and given.limit_tokens < 1:
        raise UsageError(f"--limit-tokens {given.limit_tokens} must be 1 or more")
    if given.webtext_eval:
        _check_random_windows(given)
    _show_without_effect(given)


def _show_without_effect(given: argparse.Namespace) -> None:
    """Print a line for each flag of a measurement that isn't asked for."""
    owners: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("--task", given.task, ("valid_data",)),
        ("--task LAMBADA", given.task == "LAMBADA", ("strict_lambada",)),
        ("--corpus", given.corpus, ("limit_tokens", "skip_bad_lines")),
        ("--webtext-eval", given.webtext_eval, ("eval_iters",)),
        ("--toxicity", given.toxicity, ("prompts",)),
        (
            "--lm-eval",
            given.lm_eval,
            ("include_path", "num_fewshot", "limit", "apply_chat_template"),
        ),
    )
    for owner, is_asked, names in owners:
        for name in names:
            value = getattr(given, name)
            is_given = value is not None and value is not False
            if is_given and not is_asked:
                flag = f"--{name.replace('_', '-')}"
                show(f"without effect here: {flag}, which belongs to {owner}", sys.stderr)


def _check_random_windows(given: argparse.Namespace) -> None:
    others = {"--overlapping-eval": given.overlapping_eval, "--limit-tokens": given.limit_tokens}
    excluded = [name for name, value in others.items() if value is not None]
    if not given.corpus:
        raise UsageError("--webtext-eval needs --corpus with the files")
    if excluded:
        raise UsageError(f"--webtext-eval draws windows, so it excludes {' and '.join(excluded)}")
    if given.eval_iters is not None and given.eval_iters < 1:
        raise UsageError(f"--eval-iters {given.eval_iters} must be 1 or more")


def _use(opened: Opened, given: argparse.Namespace) -> None:
    results: dict[str, dict[str, Any]] = {}
    if given.toxicity is not None:
        results |= evaluate_toxicity(given)
    for path in map(Path, given.valid_data or ()) if given.task else ():
        results[f"{given.task} {path.name}"] = _zeroshot(opened, given, path)
    if given.sources:
        results["corpus"] = _corpus(opened, given)
    if given.retro_project_dir:
        results |= retro.measure(opened, given)
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
    report(results, opened.path, given.output)


def _zeroshot(opened: Opened, given: argparse.Namespace, path: Path) -> dict[str, Any]:
    if given.task == "LAMBADA":
        return dict(
            zeroshot.lambada(opened.model, opened.tokenizer, path, strict=given.strict_lambada)
        )
    length = _window_length(opened, given)
    return dict(
        zeroshot.wikitext(opened.model, opened.tokenizer, path, length, given.overlapping_eval)
    )


def _corpus(opened: Opened, given: argparse.Namespace) -> dict[str, Any]:
    length = _window_length(opened, given)
    reader = Reader(given.json_key, given.skip_bad_lines, _warn, key_flag="--json-key")
    entries = corpus.entries_of(given.sources, reader, opened.tokenizer)
    if given.webtext_eval:
        return _random_windows(opened, given, entries, length)
    return corpus.perplexity(
        opened.model, opened.tokenizer, entries, length, given.overlapping_eval, given.limit_tokens
    )


def _window_length(opened: Opened, given: argparse.Namespace) -> int:
    """The tokens of a window. Warns of a length for which the model wasn't made. Raises UsageError."""
    length: int = opened.model.length if given.seq_length is None else given.seq_length
    corpus.require_window(length)
    kind, most = opened.config.positions.kind, opened.config.max_positions
    if kind == "learned" and length > most:
        raise UsageError(
            f"--seq-length {length}: the model has only {most} positions; take {most} or less"
        )
    if kind == "rope" and length > most and given.seq_length is not None:
        show(
            f"megatron-lite: warning: windows of {length} tokens exceed the model's {most} positions: "
            "the positions beyond are extrapolated",
            sys.stderr,
        )
    return length


def _random_windows(
    opened: Opened, given: argparse.Namespace, entries: Iterable[corpus.Entry], length: int
) -> dict[str, Any]:
    eod = corpus.end_of_document(opened.tokenizer)
    count = (given.eval_iters or BATCHES) * opened.model.slots
    return sampled_perplexity(opened.model, entries, eod, length, count)


def _warn(message: str) -> None:
    show(f"megatron-lite: warning: {message}: left out", sys.stderr)
