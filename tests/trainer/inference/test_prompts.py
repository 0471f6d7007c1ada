"""Files that come with a model are not trusted: neither their size, nor what they say, nor that their templates end."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from megatron_lite.data.templates import bounded
from megatron_lite.data.tokenizer import HuggingFaceTokenizer

WORDS = Path(__file__).parents[2] / "fixtures" / "gguf-qwen2-bpe" / "hf"


def test_a_template_that_does_not_end_is_stopped() -> None:
    sandbox = pytest.importorskip("jinja2.sandbox", reason="jinja2 is not installed")
    template = sandbox.ImmutableSandboxedEnvironment().from_string(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(TimeoutError, match=r"not done after 0\.2 seconds"):
        bounded(template.render, 0.2)
    time.sleep(0.3)  # nothing comes behind
    assert bounded(sandbox.ImmutableSandboxedEnvironment().from_string("{{ 1 + 1 }}").render) == "2"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizers_file_that_is_too_large_or_none_is_not_read(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    too_large = SIDECAR_BYTES + 1
    os.truncate(os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY), too_large)
    with pytest.raises(CorruptCheckpoint, match=rf"{name}: has {too_large:,} bytes"):
        HuggingFaceTokenizer(str(tmp_path))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CorruptCheckpoint, match=f"{name}: is a"):
        HuggingFaceTokenizer(str(tmp_path))


def test_a_tokenizer_that_fails_at_its_first_text_is_named(tmp_path: Path) -> None:
    """transformers compares lengths of texts with model_max_length, which has to be a number."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    directory = shutil.copytree(WORDS, tmp_path / "hf")
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": "512"}))
    with pytest.raises(
        CorruptCheckpoint, match=f"{directory}: transformers can't read a tokenizer"
    ):
        HuggingFaceTokenizer(str(directory))
