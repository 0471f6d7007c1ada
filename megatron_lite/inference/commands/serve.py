"""Flags of `megatron-lite serve`."""

from megaconv.local_paths import local_word
from megatron_lite.inference.flags import Parser, add_drafting, add_images, command, make_parser
from megatron_lite.inference.server import thinking_forms
from megatron_lite.inference.server.calls.table import BY_TEMPLATE, NAMES

EXAMPLES = """  megatron-lite serve Llama-3.2-1B-Instruct --port 8000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'
  torchrun --nproc-per-node 4 -m megatron_lite serve ckpt --tp 2 --pp 2 --slots 32 --api-key-file key.txt --host 0.0.0.0"""

KEY = "MEGATRON_LITE_API_KEY"


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser(
        "serve",
        "A model behind OpenAI's and Anthropic's routes and Megatron's PUT /api (extra `serve`).",
        EXAMPLES,
    )
    add = made.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="who can reach it (127.0.0.1: this machine alone, no other site's pages)",
    )
    add("--port", type=int, default=8000, metavar="N", help="0: any that is free (8000)")
    add(
        "--served-model-name",
        metavar="NAME",
        help="the model's name for clients (the checkpoint's last part)",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"that clients have to have; seen by everyone on this machine: better ${KEY} or the next",
    )
    add("--api-key-file", type=local_word, metavar="FILE", help="its first line is the key")
    add(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="requests that wait for a slot; more are refused with 429 (256)",
    )
    add("--max-body-bytes", type=int, default=4 << 20, metavar="N", help="of a request (4 MiB)")
    add(
        "--separate-reasoning",
        action="store_true",
        help="chats have the thinking as reasoning_content, in the form of the chat template: the same as --reasoning auto",
    )
    add(
        "--reasoning",
        choices=thinking_forms.NAMES,
        metavar="FORM",
        help=f"--separate-reasoning, with thinking of this form: {', '.join(thinking_forms.NAMES)}",
    )
    add(
        "--tool-calls",
        choices=NAMES,
        default=BY_TEMPLATE,
        metavar="FORM",
        help=f"form of the model's calls of tools: {', '.join(NAMES)} (auto: as its chat template writes them)",
    )
    add(
        "--sampling-defaults",
        choices=("model", "openai"),
        default="model",
        help="sampling of requests that state none: that of generation_config.json, or temperature 1 as OpenAI (model)",
    )
    add(
        "--access-log",
        action="store_true",
        help="one line on stderr for each request: time, client, method, path, status, seconds",
    )
    add(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="until an answer must be ready (600)",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="that answers have to end in after SIGTERM or Ctrl-C (30)",
    )
    add_images(made)
    add_drafting(made)
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    module = "megatron_lite.inference.server.command"
    return command(parser(), words, module, "train,data,serve", of_training=True)
