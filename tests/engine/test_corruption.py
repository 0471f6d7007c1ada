"""Random damage to whole checkpoints: whatever happens to the bytes, the outcome is the same model or a clear error."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.errors import CheckpointError
from megaconv.input import find_input
from tests.models import write_llama
from tests.runs import run

KINDS = ["hf", "sharded", "bin", "legacy_bin", "core"]

WORDS = [
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "partial_rotary_factor",
    "sliding_window",
    "dtype",
    "model_type",
]
"""Keys of config.json that the models here do not have."""

STRANGE = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**10) | st.floats() | st.text(max_size=5)
    | st.sampled_from([[], {}, [[1]], {"rope_type": "linear"}, {"rope_type": "llama3", "factor": []}, {"a": 1}])
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("intact")
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 8,
        "heads": 2,
        "kv_heads": 1,
        "ffn": 8,
        "vocab": 11,
    }
    made = {
        "hf": write_llama(root / "hf", **sizes),
        "sharded": write_llama(root / "sharded", shards=2, **sizes),
        "bin": write_llama(root / "bin", format="bin", **sizes),
        "legacy_bin": write_llama(root / "legacy_bin", format="legacy_bin", shards=2, **sizes),
        "core": root / "core",
    }
    assert (
        run(
            "convert",
            "--load-dir",
            made["hf"],
            "--saver",
            "core",
            "--save-dir",
            made["core"],
            "--pp",
            2,
        ).status
        == 0
    )
    return made


def read_everything(checkpoint: Path) -> str:
    """The error that the damage leads to, "" where it does no harm. Anything else that is raised is a bug."""
    try:
        fingerprint_source(open_source(find_input(checkpoint)), 1)
    except CheckpointError as error:
        return str(error)
    return ""


@st.composite
def damages(draw: st.DrawFn) -> tuple[float, str, list[tuple[float, int]], float]:
    """(which file, what happens, bytes and where to put them, how much remains); places as fractions of a size."""
    place = st.floats(0, 1, exclude_max=True)
    kind = draw(
        st.sampled_from(["change", "change", "change", "truncate", "extend", "empty", "remove"])
    )
    return (
        draw(place),
        kind,
        draw(st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=5)),
        draw(place),
    )


def damage(
    content: bytes, kind: str, changes: list[tuple[float, int]], remaining: float
) -> bytes | None:
    if kind == "remove":
        return None
    if kind == "truncate":
        return content[: int(len(content) * remaining)]
    if kind == "extend":
        return content + bytes(value for _, value in changes)
    if kind == "empty":
        return b""
    changed = bytearray(content)
    for place, value in changes:
        if changed:
            changed[int(place * len(changed))] = value
    return bytes(changed)


@pytest.fixture
def copy(checkpoints: dict[str, Path], kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints[kind], tmp_path / "copy"))


@contextmanager
def restored(file: Path) -> Iterator[bytes]:
    """A file's content; afterwards it is there again."""
    content = file.read_bytes()
    yield content
    file.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damages())
def test_damage_to_any_file_of_a_checkpoint_is_noticed_or_harmless(
    copy: Path, drawn: tuple[float, str, list[tuple[float, int]], float]
) -> None:
    which, action, changes, remaining = drawn
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    file = files[int(which * len(files))]
    with restored(file) as content:
        damaged = damage(content, action, changes, remaining)
        if damaged is None:
            file.unlink()
        else:
            file.write_bytes(damaged)
        assert "\n" not in read_everything(copy)


@pytest.mark.parametrize("kind", ["hf", "sharded"])
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_value_at_any_place_of_a_json_file_is_refused_or_harmless(
    copy: Path, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from(sorted(copy.glob("*.json"))))
    with restored(file) as text:
        content = json.loads(text)
        content[data.draw(st.sampled_from(sorted({*content, *WORDS})))] = data.draw(STRANGE)
        file.write_text(json.dumps(content))
        assert "\n" not in read_everything(copy)
