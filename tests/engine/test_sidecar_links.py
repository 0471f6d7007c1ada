"""Small files of a model that are links: what lies outside of its directory is nobody's to pass on, but for the Hub's cache."""

from pathlib import Path

import pytest

from tests.models import write_llama
from tests.runs import Outcome, assert_refused, run, unchanged

SAVERS = {"hf": "tokenizer.json", "core": "hf/tokenizer.json", "legacy": "hf/tokenizer.json", "dcp": "tokenizer.json",
          "llama_mistral": "tokenizer.json"}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=1)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "secret"
    path.write_text("secret")
    return path


def convert(model: Path, saver: str, target: Path, *options: object) -> Outcome:
    return run("convert", "--load-dir", model, "--saver", saver, "--save-dir", target, *options)


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("relative", [True, False])
def test_a_link_out_of_the_model_is_not_copied(
    model: Path, tmp_path: Path, secret: Path, saver: str, relative: bool
) -> None:
    link = model / "tokenizer.json"
    link.symlink_to("../home/secret" if relative else secret)
    with unchanged(tmp_path):
        assert_refused(convert(model, saver, tmp_path / "out"), 6, str(link), str(secret))
    assert run("inspect", model).status == 0


def test_a_link_out_of_an_original_is_not_copied(model: Path, tmp_path: Path, secret: Path) -> None:
    original = write_llama(tmp_path / "original", layers=1)
    (original / "notes.txt").symlink_to(secret)
    with unchanged(tmp_path):
        outcome = convert(model, "hf", tmp_path / "out", "--base", original)
        assert_refused(outcome, 6, str(original / "notes.txt"))


@pytest.mark.parametrize("saver", SAVERS)
def test_a_link_within_the_model_is_copied(model: Path, tmp_path: Path, saver: str) -> None:
    (model / "files").mkdir()
    (model / "files" / "real").write_text("{}")
    (model / "tokenizer.json").symlink_to("files/real")
    (tmp_path / "link").symlink_to("model")
    assert convert(tmp_path / "link", saver, tmp_path / "out").status == 0
    copy = tmp_path / "out" / SAVERS[saver]
    assert (copy.read_text(), copy.is_symlink()) == ("{}", False)


@pytest.mark.parametrize("place", ["models--org--name/snapshots/abc", "elsewhere/llama"])
def test_a_link_into_the_cache_of_the_hub_is_copied(
    model: Path, tmp_path: Path, place: str
) -> None:
    """Snapshots have such links. Older versions of the client also put them into a directory of the user's choice."""
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").write_text("{}")
    snapshot = tmp_path / place
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    (snapshot / "tokenizer.json").symlink_to(blobs / "0123")
    assert convert(snapshot, "hf", tmp_path / "out").status == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
