#!/usr/bin/env python3
"""A client of `megatron-lite serve`, and of Megatron's text generation server: asks for prompts and prints what follows.

python examples/text_generation_cli.py localhost:5000
"""

import json
import sys
import urllib.error
import urllib.request


def generated(address: str, prompt: str, tokens: int) -> str:
    """Return the prompt with its continuation. Raises OSError if the server can't be reached or refuses the request."""
    request = urllib.request.Request(
        f"http://{address}/api",
        data=json.dumps({"prompts": [prompt], "tokens_to_generate": tokens}).encode(),
        headers={"Content-Type": "application/json; charset=UTF-8"},
        method="PUT",
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["text"][0])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: text_generation_cli.py HOST:PORT")
    while True:
        try:
            prompt = input("Enter prompt: ")
            tokens = int(input("Enter number of tokens to generate: "))
            print(f"Megatron Response:\n{generated(sys.argv[1], prompt, tokens)}")
        except EOFError:
            return
        except ValueError:
            print("The number of tokens must be an integer.", file=sys.stderr)
        except urllib.error.HTTPError as error:
            print(f"Error {error.code}: {error.read().decode()}", file=sys.stderr)
        except OSError as error:
            sys.exit(f"{sys.argv[1]}: can't be reached: {error}")


if __name__ == "__main__":
    main()
