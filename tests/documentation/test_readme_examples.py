"""The terminal sessions in the README show real output, for models of the stated sizes with sparse files."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.very_large import Model, make_hugging_face, make_megatron
from megaconv.engine.opening import open_source
from megaconv.input import find_input
from tests.runs import run

README = (Path(__file__).parents[2] / "README.md").read_text()
LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 32000,
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Source: config.json of meta-llama/Llama-2-7b-hf."""


def shown() -> list[tuple[list[str], str]]:
    """(arguments, what follows) of each command in a console block."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [
        (command.split(), output.strip("\n"))
        for block in blocks
        for command, output in re.findall(
            r"^\$ megaconv (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE
        )
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with Llama-2-7b, and with what `convert --tp 2 --pp 4 --vpp 2` makes of it."""
    root = tmp_path_factory.mktemp("readme")
    make_hugging_face(root / "Llama-2-7b", Model(LLAMA_2_7B, 5_000_000_000, (), (), {}))
    source = open_source(find_input(root / "Llama-2-7b"))
    make_megatron(root / "ckpt", source.header, tp=2, pp=4, vpp=2)
    return root


def test_the_readme_shows_commands() -> None:
    assert {arguments[0] for arguments, _ in shown()} >= {"inspect", "plan", "diff"}


@pytest.mark.parametrize("number", range(len(shown())))
def test_a_command_prints_what_the_readme_shows(
    number: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    # The README shows the output of a terminal with block characters.
    monkeypatch.setattr("megaconv.commands.cli.inspect.has_blocks", lambda: True)
    arguments, output = shown()[number]
    outcome = run(*arguments)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.strip("\n") == output


@pytest.mark.slow
def test_the_readmes_python_is_typed_as_the_package_is(tmp_path: Path) -> None:
    """A user who copies the code gets these types from a checker that follows `py.typed`."""
    from mypy import api

    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    example = tmp_path / "example.py"
    example.write_text("\n".join(blocks))
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\nfollow_imports = silent\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
    )
    out, err, status = api.run(
        ["--config-file", str(settings), "--cache-dir", str(tmp_path / "cache"), str(example)]
    )
    assert (status, err) == (0, ""), out
