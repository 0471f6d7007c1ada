"""A served file's bytes are those that a conversion writes, whichever range is read."""

from functools import cache
from pathlib import Path
from random import Random

import pytest

from megaconv.options import ConvertOptions
from megaconv.serving.repository import MAIN, open_repositories
from tests.models import write_llama
from tests.runs import run

FIXTURES = Path(__file__).parents[1] / "fixtures"
SOURCES = (
    "core-llama-tp2pp2",
    "core-gpt2-tp2pp2",
    "core-te-mixtral-grouped-tp2ep2",
    "dist-llama-tp2pp2",
    "dist-gpt2-tp2pp2",
    "legacy-llama-tp2pp2",
    "gguf-llama-spm",
    "fsdp-verl-dp3",
)
RECORD = "megaconv.json"


@cache
def checkpoint(name: str) -> Path:
    inner = FIXTURES / name / "checkpoint"
    return inner if inner.is_dir() else FIXTURES / name


def require_same(source: Path, converted: Path, options: ConvertOptions, ranges: int) -> None:
    """Every file is compared as a whole, and in random ranges."""
    served = open_repositories([str(source)], [], options).popitem()[1].revision(MAIN)
    assert served is not None
    files = {
        str(path.relative_to(converted)): path for path in converted.rglob("*") if path.is_file()
    }
    assert set(served.files) == set(files) - {RECORD}
    random = Random(str(source))
    for name, file in served.files.items():
        content = files[name].read_bytes()
        assert file.size == len(content)
        assert file.read(0, len(content)) == content
        for _ in range(ranges):
            start = random.randrange(len(content) + 1)
            stop = min(len(content), start + random.choice([0, 1, 2, 13, 200, 4096, len(content)]))
            assert file.read(start, stop) == content[start:stop], (name, start, stop)


@pytest.mark.parametrize("name", SOURCES)
def test_every_range_is_that_of_a_conversion(name: str, tmp_path: Path) -> None:
    source = checkpoint(name)
    if not source.exists():
        pytest.skip(f"{name} is no fixture of these tests")
    outcome = run("convert", source, tmp_path / "hf", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    require_same(source, tmp_path / "hf", ConvertOptions(), ranges=100)


def test_a_cast_and_several_files_are_served_too(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", shards=3)
    run("convert", source, tmp_path / "core", "--saver", "core", "--tp", "2")
    outcome = run("convert", tmp_path / "core", tmp_path / "hf", "--saver", "hf", "--dtype", "fp32")
    assert outcome.status == 0, outcome.err
    require_same(tmp_path / "core", tmp_path / "hf", ConvertOptions(dtype="fp32"), ranges=100)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss",
        "nemotron_h",
        "qwen3_next",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gemma3_text",
                "deepseek_v3",
                "phi3",
                "qwen3_5_moe",
                "llama4",
                "glm4_moe",
                "mamba2",
            )
        ),
    ],
)
def test_every_order_of_elements_is_that_of_a_conversion(name: str, tmp_path: Path) -> None:
    from tests.transformers_oracle import MIXTURES, VARIANTS, create

    create((VARIANTS | MIXTURES)[name], tmp_path / "source")
    source = tmp_path / "core"
    outcome = run("convert", tmp_path / "source", source, "--saver", "core")
    assert outcome.status == 0, outcome.err
    outcome = run("convert", source, tmp_path / "hf", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    require_same(source, tmp_path / "hf", ConvertOptions(), ranges=60)
