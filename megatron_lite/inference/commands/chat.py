"""Flags of `megatron-lite chat`."""

from megatron_lite.inference.flags import (
    Parser,
    add_drafting,
    add_images,
    add_sampling,
    command,
    make_parser,
)

EXAMPLES = """  megatron-lite chat Llama-3.2-1B-Instruct --temperature 0.7
  megatron-lite chat gpt2 --raw --temperature 1 --top-k 40
  printf '/image cat.png\\nWhat is it?\\n' | megatron-lite chat Qwen2.5-VL-3B-Instruct
  echo "What is a torus?" | megatron-lite chat tuned --system "Answer in one sentence." """

HELP = (
    "A line is a message; /image FILE shows an image with the next one, /new begins another conversation, Ctrl-C ends an answer, "
    "/quit or the end of the input the program."
)
RAW_HELP = "The model continues each line. An empty line is a text without a prompt; /quit or the end of the input ends the program."


def parser() -> Parser:
    """Return the parser of the command."""
    made = make_parser("chat", f"Talk with a model. {HELP}", EXAMPLES, has_rows=False)
    made.set_defaults(slots=1)
    made.add_argument(
        "--system", metavar="TEXT", help="a message of the system in front of all others"
    )
    made.add_argument(
        "--raw",
        action="store_true",
        help="continue each line as a text, without a chat template; an empty line is a text without a prompt",
    )
    add_sampling(made, max_new_tokens=512)
    add_images(made)
    add_drafting(made)
    return made


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    return command(parser(), words, "megatron_lite.inference.chatting")
