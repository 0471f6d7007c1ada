"""Flags of `megatron-lite evaluate`."""

from megaconv.errors import CheckpointError
from megaconv.local_paths import local_path, local_word
from megatron_lite.inference.flags import Parser, command, make_parser
from megatron_lite.processes.failure import refuse

MODULE = "megatron_lite.inference.evaluation.command"
EXAMPLES = """  megatron-lite evaluate gpt2 --task WIKITEXT103 --valid-data wiki.test.tokens --overlapping-eval 32
  megatron-lite evaluate gpt2 --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada --output lambada.json
  megatron-lite evaluate ckpt --corpus 'held-out/*.jsonl.gz' --seq-length 1024 --output perplexity.json
  megatron-lite evaluate --toxicity scored.jsonl --prompts prompts.jsonl
  torchrun --nproc-per-node 2 -m megatron_lite evaluate ckpt --tp 2 --lm-eval arc_easy hellaswag --limit 100"""


def parser(*, needs_model: bool = True) -> Parser:
    """Return the parser of the command."""
    made = make_parser(
        "evaluate",
        "Measure a model on Megatron's zero-shot tasks, on a corpus, or on any task of lm-eval.",
        EXAMPLES,
        needs_model=needs_model,
    )
    add = made.add_argument_group("Megatron's tasks").add_argument
    add(
        "--task",
        choices=("WIKITEXT103", "LAMBADA"),
        help="perplexity by word, or the last words of texts",
    )
    add(
        "--valid-data",
        nargs="+",
        type=local_word,
        metavar="FILE",
        help="wiki.test.tokens, or JSON lines of {text}",
    )
    add("--overlapping-eval", type=int, metavar="N", help="stride of windows (a window)")
    add("--seq-length", type=int, metavar="N", help="tokens of a window (--max-length)")
    add(
        "--strict-lambada",
        action="store_true",
        help="all tokens of the last word count, not the last one alone",
    )
    add = made.add_argument_group("perplexity of a corpus").add_argument
    add(
        "--corpus",
        nargs="+",
        default=[],
        type=local_word,
        metavar="FILE",
        help="JSON lines, parquet, plain text, also .gz, .zst; directories, patterns, prefixes of indexed datasets",
    )
    add("--json-key", default="text", metavar="KEY", help="field with the text (text)")
    add("--limit-tokens", type=int, metavar="N", help="end with the document that has token N")
    add("--skip-bad-lines", action="store_true", help="leave out, and report, unreadable lines")
    add(
        "--webtext-eval",
        action="store_true",
        help="random windows, as Megatron-LM measured in 2019, in place of all tokens",
    )
    add("--eval-iters", type=int, metavar="N", help="with it: N times --slots windows (100)")
    add = made.add_argument_group("toxicity of scored continuations (needs no --load)").add_argument
    add(
        "--toxicity",
        type=local_path,
        metavar="FILE",
        help="continuations with scores, from `generate --samples-per-prompt` and `data score`",
    )
    add("--prompts", type=local_path, metavar="FILE", help="their prompts: RealToxicityPrompts")
    add("--by", default="score.toxicity", metavar="FIELD", help="the score (score.toxicity)")
    add = made.add_argument_group(
        "loss of a Retro: with, without and with random neighbors"
    ).add_argument
    add(
        "--retro-project-dir",
        type=local_word,
        metavar="DIRECTORY",
        help="project with validation samples",
    )
    add(
        "--retro-megatron-neighbors",
        action="store_true",
        help="neighbors as Megatron: a continuation goes on in the next document",
    )
    add = made.add_argument_group("tasks of lm-eval (extra `evaluate`)").add_argument
    add("--lm-eval", nargs="+", default=[], metavar="TASK", help="names of tasks")
    add("--include-path", type=local_word, metavar="DIRECTORY", help="with tasks of your own")
    add("--num-fewshot", type=int, metavar="N", help="examples in each prompt (the task's)")
    add(
        "--limit",
        type=float,
        metavar="X",
        help="so many examples of each task, or this part of them",
    )
    add("--apply-chat-template", action="store_true", help="prompts as messages of a user")
    made.add_argument(
        "--output",
        type=local_word,
        metavar="FILE",
        help="results as JSON; - for standard output, without the table",
    )
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    words = with_todays_task(words)
    flags = {word.partition("=")[0] for word in words}
    if "--toxicity" in flags and not {"--load", "-h", "--help"} & flags:
        return _without_model(words)
    return command(parser(), words, MODULE, of_training=True)


def with_todays_task(words: list[str]) -> list[str]:
    """Return a command line of run_gpt2_eval.py (2019) with today's task. Other command lines stay as they are.

    That tool has one flag for all data, --data-path. Without another flag it measures perplexity by word, in windows
    that begin 32 tokens after each other.
    """
    if "--model-path" not in words:
        return words
    has_task = "--cloze-eval" in words or "--webtext-eval" in words
    data = "--corpus" if "--webtext-eval" in words else "--valid-data"
    task = [] if has_task else ["--task", "WIKITEXT103", "--overlapping-eval", "32"]
    return task + [data if word == "--data-path" else word for word in words]


def _without_model(words: list[str]) -> int:
    from megatron_lite.inference.evaluation.tables import evaluate_toxicity, report

    try:
        given = parser(needs_model=False).parse_args(words)
        report(evaluate_toxicity(given), None, given.output)
    except CheckpointError as error:
        return refuse(str(error), error.exit_status)
    return 0
