"""Waits for a server, asks it one question, prints and keeps the answer.

python ask.py SERVER.log ANSWER.json QUESTION
"""

import json
import re
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

PATIENCE_S = 300


def address(log: Path) -> str:
    """As the server's first line says it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found = re.search(r"serving .* at (http://\S+?),", log.read_text(encoding="utf-8"))
        if found:
            return found[1]
        time.sleep(0.2)
    sys.exit(f"{log}: no server came up in {PATIENCE_S} s")


def main(log: Path, target: Path, question: str) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
    request = Request(
        f"{address(log)}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=PATIENCE_S) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    target.write_text(json.dumps({"question": question, "answer": answer}), encoding="utf-8")
    print(f"question: {question}\nanswer:   {answer}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
