"""Flags of `megatron-lite calibrate`."""

from megaconv.local_paths import local_word
from megatron_lite.inference.flags import Parser, add_samples, command, make_parser

EXAMPLES = """  megatron-lite calibrate Llama-2-7b --data chats.jsonl --output amax.safetensors
  megatron-lite calibrate ckpt --data corpus_text_document --samples 256 --seq-length 2048 --awq --output amax.safetensors
  megaconv convert Llama-2-7b out --saver hf --quantize fp8 --calibration amax.safetensors
  megatron-lite calibrate Llama-2-7b --adapter my-adapter --data chats.jsonl --output amax.safetensors
  megaconv merge Llama-2-7b my-adapter --save-dir out --quantize fp8 --calibration amax.safetensors"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser(
        "calibrate",
        "Measure how large the inputs of each matrix are. `megaconv convert --calibration` takes its scales from the file.",
        EXAMPLES,
        quantizes=False,
        adapts=False,
        has_length=False,
    )
    group = made.add_argument_group("calibration")
    add_samples(group, samples=512)
    add = group.add_argument
    add(
        "--adapter",
        action="append",
        default=[],
        dest="merged",
        metavar="DIR[:WEIGHT]",
        help="adapter to merge into the weights first, as `megaconv merge` does; may be repeated",
    )
    add(
        "--output",
        required=True,
        type=local_word,
        metavar="FILE",
        help="the statistics, as safetensors",
    )
    add(
        "--awq",
        action="store_true",
        help="also search AWQ's factors, which --quantize int4-awq and w4a8-awq need; at --tp 1",
    )
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.calibration.command", of_training=True)
