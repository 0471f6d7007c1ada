"""YAML of strangers: values as PyYAML's safe loader has them, tags that do nothing, bounds that hold."""

import time
from pathlib import Path

import pytest
import yaml

from formats import ceilings
from formats.errors import CorruptCheckpoint
from formats.yaml_file import Tagged, read_yaml

PLAIN = """
model: &m
  _target_: a.b.C
  numbers: [1, -2, 0x10, 1.0e-05, .inf, 1_000]
  words: [null, ~, yes, off, "yes", 'no', 2024-01-01x, 1e-5, ""]
  empty:
  text: |
    two
    lines
again: *m
? plain
: {a: [], b: {}}
"""


def read(path: Path, text: str) -> object:
    (path / "x.yaml").write_text(text)
    return read_yaml(path / "x.yaml")


@pytest.fixture(params=["libyaml", "python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    elif not hasattr(yaml, "CSafeLoader"):
        pytest.skip("PyYAML was built without libyaml")


@pytest.mark.usefixtures("parser")
def test_plain_values_are_those_of_the_safe_loader(tmp_path: Path) -> None:
    assert read(tmp_path, PLAIN) == yaml.safe_load(PLAIN)
    assert read(tmp_path, "") is None


def test_a_tag_does_nothing(tmp_path: Path) -> None:
    text = f"a: !!python/object/apply:os.system ['touch {tmp_path}/done']\nb: !!python/tuple [1, 2]\nc: !mine 7\n"
    apply = "tag:yaml.org,2002:python/object/apply:os.system"
    assert read(tmp_path, text) == {
        "a": Tagged(apply, [f"touch {tmp_path}/done"]),
        "b": [1, 2],
        "c": Tagged("!mine", "7"),
    }
    assert not (tmp_path / "done").exists()


BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("text", "word"),
    [
        (BOMB, "aliases counted out"),
        (
            "[" * 100_000,
            "levels deep|nesting depth",
        ),  # newer releases of libyaml have a limit of their own
        ("".join(f"{' ' * n}a:\n" for n in range(200)), "levels deep"),
        ("- a\n" * 30_000, "more than 20,000 values"),
        ("a: &a [*a]", "alias a"),
        ("a: *b", "b"),
        ("a: 1\na: 2", "'a' twice"),
        ("[1]: 2", "no word"),
        ("a: 1\n---\nb: 2", "several documents"),
        ("a: !!int word", "word"),
        ("a: !!int ''", "no !!int"),
        ("a: !!bool x", "no !!bool"),
        ("a: !!float .", "no !!float"),
        ("a: 1" + ":1" * 100_000, "a number of 200,001 characters"),
        ("a: 1" + ":1" * 200 + ".5", "a number of 403 characters"),
        ("a: 0x" + "f" * 10_000, "a number of 10,002 characters"),
        ("a: [", "not a readable YAML file"),
        ("a: \x00", "not a readable YAML file"),
    ],
)
def test_yaml_that_is_not_plain_is_refused_at_once(text: str, word: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(CorruptCheckpoint, match=word):
        read(tmp_path, text)
    assert time.monotonic() - started < 5


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="no file of this kind has more"):
        read(tmp_path, "#" * (ceilings.YAML_BYTES + 1))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(CorruptCheckpoint, match="not a readable YAML file"):
        read_yaml(tmp_path / "x.yaml")
