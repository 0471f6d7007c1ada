"""Files of texts and keys: byte order marks, UTF-16, and line ends. And keys of other characters than ASCII."""

import asyncio
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaconv.errors import UsageError
from megatron_lite.inference.evaluation import toxicity, zeroshot
from megatron_lite.inference.questions import read_prompts
from megatron_lite.inference.retrieved import Retrieved, read_retrieved
from megatron_lite.inference.server.command import _key

MARK = "\ufeff"


def given(file: Path) -> Namespace:
    return Namespace(api_key_file=str(file), api_key=None)


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{MARK}secret\n", encoding="utf-8")
    assert _key(given(file)) == "secret"


def test_a_key_in_another_encoding_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n", encoding="utf-16")
    with pytest.raises(UsageError, match=r"key: can't be read: 'utf-8' codec can't decode"):
        _key(given(file))


def test_a_byte_order_mark_is_no_part_of_texts_and_records(tmp_path: Path) -> None:
    file, wiki = tmp_path / "file.jsonl", tmp_path / "wiki.txt"
    file.write_text(f"{MARK}{json.dumps({'prompt': 'a', 'neighbors': ['b']})}\n", encoding="utf-8")
    wiki.write_text(f"{MARK}a b c", encoding="utf-8")
    assert read_retrieved(str(file)) == [Retrieved("a", ("b",))]
    assert toxicity._records(file) == [{"prompt": "a", "neighbors": ["b"]}]
    assert zeroshot._read(wiki) == "a b c"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_other_line_ends_within_a_prompt_end_no_line(end: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    prompts = ["one\u2028two", "three\x0cfour\x85five"]
    file.write_bytes(f"{prompts[0]}{end}{end}{prompts[1]}{end}".encode())
    assert list(read_prompts(str(file))) == prompts


@pytest.mark.parametrize(("sent", "status"), [("schlüssel", 200), ("schlussel", 401)])
def test_a_key_may_have_other_characters_than_ascii(sent: str, status: int) -> None:
    """Clients such as curl send it in UTF-8."""
    pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")
    from megatron_lite.inference.server.app import Limits, Server

    worker: Any = SimpleNamespace()
    opened: Any = SimpleNamespace(adapters=(), model=SimpleNamespace(length=8))
    server = Server(opened, worker, "tiny", Limits(100, 1.0), key="schlüssel")
    server.__dict__["_card"] = {}  # the facts about the model, which this one doesn't have
    scope = {
        "type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models", "query_string": b"",
        "headers": [(b"authorization", f"Bearer {sent}".encode())],
    }  # fmt: skip
    found: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        found.append(message.get("status", 0))

    asyncio.run(server.app()(scope, receive, send))
    assert found[0] == status
