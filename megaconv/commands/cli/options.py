"""Options of the commands, with their help texts and with the spellings of Megatron-LM's own converter."""

from pathlib import Path
from typing import Annotated

import typer

from megaconv.errors import UsageError
from megaconv.terminal import hide_download_bars

CONVERT_EXAMPLES = """\b
Examples:
  megaconv convert --load-dir Llama-2-7b --saver core --save-dir ckpt --tp 2 --pp 2
  megaconv convert --load-dir ckpt --saver core --save-dir tp4 --tp 4 --pp 1
  megaconv convert ckpt Llama-back --saver hf"""


Input = Annotated[str, typer.Argument(help="A checkpoint, or a Hub id such as hf://org/name@revision.", metavar="PATH")]
CheckSource = Annotated[
    bool,
    typer.Option(
        "--check-source/--no-check-source",
        help="Whether an input that has a megaconv.json has to be what that says (exit status 3 otherwise).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Hugging Face directory with what the source can't say: config.json, tokenizer."),
]
TrueVocab = Annotated[
    int | None,
    typer.Option("--true-vocab-size", help="Vocabulary size without padding, where the source doesn't give it."),
]
Source = Annotated[str | None, typer.Argument(metavar="[SRC]", help="The input, as --load-dir has it.")]
Target = Annotated[str | None, typer.Argument(metavar="[DST]", help="The output directory, as --save-dir has it.")]


def _quiet_downloads(quiet: bool) -> bool:
    hide_download_bars(quiet=quiet)
    return quiet


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        callback=_quiet_downloads,
        help="Print neither progress nor a summary; warnings and errors alone.",
    ),
]
NoProgress = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_quiet_downloads, help="Show no progress; the result is printed.")
]
LoadDir = Annotated[
    str | None,
    typer.Option(
        "--load-dir",
        "--load",
        help="Input: a directory of any known format, or a Hub id (org/name or hf://org/name@revision).",
    ),
]
_SAVE_DIR = typer.Option(
    "--save-dir", "--save", metavar="PATH", help="Output directory; must not exist yet, or be empty."
)
SaveDir = Annotated[str, _SAVE_DIR]  # a text, which may be empty, as a path may not
OptionalSaveDir = Annotated[str | None, _SAVE_DIR]
Saver = Annotated[
    str,
    typer.Option(
        "--saver",
        help="What to write: core, legacy, dcp, hf, llama_mistral, gguf or peft (`megaconv formats` describes them).",
    ),
]
Loader = Annotated[str | None, typer.Option("--loader", help="What to read; detected from the files by default.")]
LoaderA = Annotated[str | None, typer.Option("--loader-a", help="What to read A with, where it isn't --loader.")]
LoaderB = Annotated[str | None, typer.Option("--loader-b", help="What to read B with, where it isn't --loader.")]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the loader's or the saver's own, as `megaconv formats` lists them; may be repeated.",
    ),
]

Tp = Annotated[
    int | None,
    typer.Option("--tp", "--target-tensor-parallel-size", min=1, help="Tensor parallel size."),
]
Pp = Annotated[
    int | None,
    typer.Option("--pp", "--target-pipeline-parallel-size", min=1, help="Pipeline parallel size."),
]
Vpp = Annotated[
    int | None,
    typer.Option("--vpp", "--target-virtual-pipeline-parallel-size", min=1, help="Virtual stages per pipeline rank."),
]
Ep = Annotated[
    int | None,
    typer.Option("--ep", "--target-expert-parallel-size", min=1, help="Expert parallel size."),
]
Etp = Annotated[
    int | None,
    typer.Option("--etp", "--target-expert-tensor-parallel-size", min=1, help="Expert tensor parallel size."),
]
Split = Annotated[str | None, typer.Option("--layer-split", help="Layers of each pipeline stage: 3,5,5,3.")]
FirstLayers = Annotated[
    int | None,
    typer.Option("--decoder-first-pipeline-num-layers", min=0, help="Layers of the first stage."),
]
LastLayers = Annotated[
    int | None,
    typer.Option("--decoder-last-pipeline-num-layers", min=0, help="Layers of the last stage."),
]
AccountEmbedding = Annotated[
    bool,
    typer.Option(
        "--account-for-embedding-in-pipeline-split", help="Count the embedding as a layer of the first stage."
    ),
]
AccountLoss = Annotated[
    bool,
    typer.Option("--account-for-loss-in-pipeline-split", help="Count the head as a layer of the last stage."),
]
LayoutString = Annotated[
    str | None,
    typer.Option("--pipeline-model-parallel-layout", help="Megatron's layout string: 'Et*3|(tt|)*2,tL'."),
]
SplitRank = Annotated[
    int | None,
    typer.Option(
        "--pipeline-model-parallel-split-rank",
        min=1,
        help="Of a T5: the first of the --pp stages that is the decoder's; those before are its encoder's.",
    ),
]
EncoderPp = Annotated[
    int | None,
    typer.Option(
        "--encoder-pipeline-model-parallel-size",
        min=1,
        help="Of a T5: stages of its encoder, before those of its decoder, which --pp then counts (1 by default).",
    ),
]

CkptFormat = Annotated[
    str | None,
    typer.Option("--ckpt-format", help="Format of a Megatron core output: torch (by default), torch_dist or zarr."),
]
TransformerImpl = Annotated[
    str | None,
    typer.Option(
        "--transformer-impl",
        "--saver-transformer-impl",
        help="Names of a core output: transformer_engine (by default) or local.",
    ),
]
Grouped = Annotated[
    bool,
    typer.Option(
        "--moe-grouped-gemm", help="Store experts as Transformer Engine's grouped layer does, not each as a module."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Cast weights to bf16, fp16 or fp32; by default every bit stays."),
]
Optimizer = Annotated[
    bool | None,
    typer.Option(
        "--optimizer/--no-optimizer",
        help="Convert optimizer state too; by default wherever source and output can both hold it.",
    ),
]
ReadOptimizer = Annotated[
    bool, typer.Option("--optimizer/--no-optimizer", help="Read optimizer state too, where there is any.")
]
DistributedOptimizer = Annotated[
    bool | None,
    typer.Option(
        "--use-distributed-optimizer/--no-use-distributed-optimizer",
        help="Write optimizer state for runs with Megatron's option of this name; by default in torch_dist only.",
    ),
]
VocabDivisor = Annotated[
    int | None,
    typer.Option(
        "--make-vocab-size-divisible-by",
        min=1,
        help="Pad the vocabulary to a multiple of this times tp; 128 unless the source says.",
    ),
]
VocabPadding = Annotated[
    str | None,
    typer.Option("--vocab-padding", help="Fill padding rows by `repeat` (the last row again; by default) or `zero`."),
]
CheckpointType = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-type",
        help="What llama_mistral writes, meta or mistral, or else reads: hf, meta or mistral; detected by default.",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="How an hf output stores weights of attention, MLP and experts: fp8-block (FP8, a scale for each 128 by 128) or nvfp4 "
        "(4 bits, a scale for each 16, as ModelOpt has them). Lossy.",
    ),
]
MaxShardSize = Annotated[
    str | None, typer.Option("--max-shard-size", help="Largest safetensors file of an hf output; 5GB by default.")
]
DistFiles = Annotated[
    int | None,
    typer.Option(
        "--dist-files",
        min=1,
        max=1 << 16,
        help="Files to share a torch_dist or dcp output out over; as many as --workers by default.",
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        "--base",
        help="The original's Hugging Face directory: an hf output gets from it the tensors and files that the source doesn't hold.",
    ),
]
TextOnly = Annotated[
    bool,
    typer.Option(
        "--text-only",
        help="Of a model that sees or hears: the language model in it alone (convert --base ORIGINAL is the way back).",
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="DIR[:WEIGHT]",
        help="A LoRA adapter (a directory of peft's, or a Hub id) to merge into the weights; may be repeated.",
    ),
]
Push = Annotated[
    str | None,
    typer.Option("--push", metavar="ORG/NAME", help="Put the output on the Hugging Face Hub too; see `megaconv push`."),
]
Release = Annotated[
    bool,
    typer.Option("--release", help="Write a `release` checkpoint instead of an iteration."),
]
AllowLossy = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-lossy",
        help="Leave out what the output can't express: rope_scaling, activation, overflow (of values beyond --dtype's range), out_norm.",
    ),
]

MaxMemory = Annotated[str, typer.Option("--max-memory", help="Most memory that buffers may take.")]
Workers = Annotated[
    int,
    typer.Option(
        "--workers", min=0, max=1024, help="Threads that move tensors; 0: as many as processors and one more, up to 8."
    ),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Read the output back and compare fingerprints before it appears."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print every output file with its size and the memory needed; write nothing."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on where a killed run of the same command stopped; keep what is done on Ctrl-C."),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace what is at --save-dir, in one step, once the output is complete."),
]

# Megatron-LM's converter has these too; a checkpoint gives most of them itself.
Bf16 = Annotated[bool, typer.Option("--bf16", hidden=True)]
Fp16 = Annotated[bool, typer.Option("--fp16", hidden=True)]
ModelType = Annotated[str | None, typer.Option("--model-type", hidden=True)]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--megatron-path", "--tokenizer-model", "--vocab-file", "--model-size", "--max-queue-size",
        "--position-embedding-type", "--loader-transformer-impl", hidden=True,
    ),
]  # fmt: skip
IgnoredFlag = Annotated[bool, typer.Option("--no-checking", hidden=True)]


def extra(words: list[str] | None) -> dict[str, str]:
    """key=value, key=value -> a mapping. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not key or not equals or key in found:
            raise UsageError(f"--option {word}: write key=value, each key once")
        found[key] = value
    return found


def all_stages(pp: int | None, split_rank: int | None, encoder_pp: int | None) -> tuple[int | None, int | None]:
    """(pp with the encoder's stages, split rank). Raises UsageError where both ways to say it are used."""
    if encoder_pp is None:
        return pp, split_rank
    if split_rank is not None:
        raise UsageError(
            "--pipeline-model-parallel-split-rank counts the encoder's stages in --pp, --encoder-pipeline-model-parallel-size "
            "doesn't; give one of them"
        )
    return encoder_pp + (pp or 1), encoder_pp


def one_place(argument: str | None, option: str | None, what: str, name: str) -> str:
    """The place that is given, as an argument or by its option. Raises UsageError for none, or both."""
    given = [word for word in (argument, option) if word is not None]
    if len(given) != 1:
        found = "is missing" if not given else f"is given twice, as {argument} and by {name} {option}"
        raise UsageError(f"the {what} {found}; write: megaconv convert SRC DST --saver NAME, or {name} PATH")
    return given[0]


def one_dtype(dtype: str | None, bf16: bool, fp16: bool) -> str | None:
    """The one dtype asked for. Raises UsageError for several."""
    asked = [word for word, given in ((dtype, dtype), ("bf16", bf16), ("fp16", fp16)) if given]
    if len(asked) > 1:
        raise UsageError(f"--dtype {asked[0]} and --{asked[1]} contradict each other; give one")
    return asked[0] if asked else None


def check_model_type(model_type: str | None) -> None:
    """Raises UsageError for what can't be read."""
    if model_type not in (None, "GPT"):
        raise UsageError(f"--model-type {model_type}: only GPT (decoder-only) models are supported")
