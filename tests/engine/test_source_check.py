"""A source that has a megaconv.json is compared with it: values where they are hashed anyway, names and shapes everywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch

import megaconv
from megaconv.errors import CorruptCheckpoint
from tests.models import write_llama
from tests.rank_states import edit, rank_paths
from tests.runs import assert_refused, run, unchanged

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("intact")
    source = write_llama(root / "source", layers=2)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "generation_config.json").write_text("{}")
    for name, options in {
        "hf": {"saver": "hf"},
        "core": {"saver": "core", "tp": 2},
        "zarr": {"saver": "core", "ckpt_format": "zarr"},
    }.items():
        megaconv.convert(source, root / name, **options)  # type: ignore[arg-type]
    return {"source": source, **{name: root / name for name in ("hf", "core", "zarr")}}


def copied(intact: dict[str, Path], name: str, tmp_path: Path) -> Path:
    return Path(copytree(intact[name], tmp_path / name))


def flip(file: Path, content: bytes) -> None:
    """One bit of a tensor, by bytes that the file holds once."""
    whole = bytearray(file.read_bytes())
    assert whole.count(content) == 1
    whole[whole.index(content)] ^= 1
    file.write_bytes(whole)


def damage_hf(path: Path) -> None:
    weight = megaconv.open(path).load("layers.1.attn.q.weight")
    flip(path / "model.safetensors", weight.reshape(-1)[:16].view(torch.uint8).numpy().tobytes())


def damage_zarr(path: Path) -> None:
    (array,) = (path / "release").glob("decoder.layers.mlp.linear_fc2.weight")
    file = array / "1.0.0"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


@pytest.mark.parametrize(
    ("name", "damage", "tensor"),
    [
        ("hf", damage_hf, "layers.1.attn.q.weight"),
        ("zarr", damage_zarr, "layers.1.mlp.down.weight"),
    ],
)
def test_a_damaged_source_is_not_converted(
    name: str, damage: Damage, tensor: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, name, tmp_path)
    damage(source)
    for saver in ("hf", "core"):
        with unchanged(tmp_path):
            words = (
                "1 tensor with other values than were written",
                tensor,
                "--no-check-source",
                "megaconv.json",
            )
            assert_refused(
                run(
                    "convert",
                    "--load-dir",
                    source,
                    "--saver",
                    saver,
                    "--save-dir",
                    tmp_path / "out",
                ),
                3,
                *words,
            )
    assert (
        run(
            "convert",
            "--load-dir",
            source,
            "--saver",
            "hf",
            "--save-dir",
            tmp_path / "out",
            "--no-check-source",
        ).status
        == 0
    )
    assert megaconv.fingerprint(tmp_path / "out").weights == megaconv.fingerprint(source).weights


@pytest.mark.parametrize(
    ("name", "damage", "tensor"),
    [
        ("hf", damage_hf, "layers.1.attn.q.weight"),
        ("zarr", damage_zarr, "layers.1.mlp.down.weight"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_damaged_source_is_not_compared(
    name: str, damage: Damage, tensor: str, swapped: bool, intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, name, tmp_path)
    damage(source)
    sides = [source, intact["core"]][:: -1 if swapped else 1]
    assert_refused(run("diff", *sides), 3, f"{source}: 1 tensor with other values", tensor)
    assert run("diff", *sides, "--no-check-source").status == 4
    with pytest.raises(CorruptCheckpoint, match=tensor):
        megaconv.diff(*sides)
    assert not megaconv.diff(*sides, check_source=False).same
    assert_refused(run("diff", source, source), 3, tensor)


@pytest.mark.parametrize("name", ["hf", "core", "zarr"])
def test_an_intact_source_is_converted_without_a_word(
    name: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    outcome = run(
        "convert",
        "--load-dir",
        intact[name],
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--pp",
        2,
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert run("diff", intact[name], intact["source"]).status == 0
    assert json.loads(run("inspect", intact[name], "--json").out)["record"] == {
        "same": True,
        "differences": {},
    }
    assert json.loads(run("inspect", intact["source"], "--json").out)["record"] is None


def test_a_cast_still_compares_unchanged_tensors_with_the_record(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, "hf", tmp_path)
    damage_hf(source)
    arguments = (
        "convert",
        "--load-dir",
        source,
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "out",
        "--dtype",
    )
    assert_refused(run(*arguments, "bf16"), 3, "layers.1.attn.q.weight")
    assert run(*arguments, "fp32").status == 0  # nothing of it is hashed as it was


def record(path: Path, **changes: object) -> None:
    said = json.loads((path / "megaconv.json").read_text())
    for name, value in changes.items():
        said[name] = said[name] | value if isinstance(value, dict) else value
    (path / "megaconv.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"shapes": {"head.weight": "bfloat16[7,32]"}},
            "head.weight bfloat16[131,32], recorded as bfloat16[7,32]",
        ),
        ({"tensors": {"layers.2.attn.q.weight": "0" * 64}}, "layers.2.attn.q.weight missing"),
    ],
)
def test_other_names_and_shapes_are_found_from_metadata_only(
    changes: dict[str, object], word: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, "hf", tmp_path)
    record(source, **changes)
    outcome = run("inspect", source)
    assert outcome.status == 3
    assert f"record      megaconv.json differs: {word}\n" in outcome.out
    assert run("inspect", source, "--no-check-source").status == 0
    assert json.loads(run("inspect", source, "--json").out)["record"]["same"] is False
    for arguments in (
        (
            "convert",
            "--load-dir",
            source,
            "--saver",
            "hf",
            "--save-dir",
            tmp_path / "out",
            "--dry-run",
        ),
        ("diff", source, source),
    ):
        assert_refused(run(*arguments), 3, word, "--no-check-source")
        assert run(*arguments, "--no-check-source").status == 0


def test_a_recorded_shape_that_is_another_does_not_verify(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, "hf", tmp_path)
    record(source, shapes={"head.weight": ""})
    outcome = run("verify", source)
    assert (outcome.status, outcome.out.splitlines()[1:]) == (
        4,
        ["  head.weight  bfloat16[131,32], recorded as "],
    )


def test_a_newer_iteration_beside_the_recorded_one_is_not_compared(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    source, later = copied(intact, "core", tmp_path), tmp_path / "later"
    megaconv.convert(write_llama(tmp_path / "trained", layers=2, seed=1), later, saver="core", tp=2)
    edit(rank_paths(later), iteration=2)
    (later / "release").rename(source / "iter_0000002")
    (source / "latest_checkpointed_iteration.txt").write_text("2")
    assert run("diff", source, tmp_path / "trained").status == 0
    assert "record" not in run("inspect", source).out
    outcome = run(
        "convert", "--load-dir", source, "--saver", "core", "--save-dir", tmp_path / "out"
    )
    assert outcome.status == 0
    assert_refused(run("verify", source), 3, "describes another iteration than the tracker names")
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    assert run("verify", source).status == 0


def test_an_iteration_that_is_given_itself_has_the_record_beside_it(
    intact: dict[str, Path],
) -> None:
    assert run("verify", intact["core"] / "release").status == 0
    assert "names and shapes match megaconv.json" in run("inspect", intact["zarr"] / "release").out


def test_the_vocabulary_size_of_the_user_wins(intact: dict[str, Path], tmp_path: Path) -> None:
    source = copied(intact, "core", tmp_path)
    (source / "hf" / "config.json").unlink()
    arguments = (
        "--load-dir",
        source,
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "out",
        "--true-vocab-size",
        100,
    )
    assert run("convert", *arguments).status == 0


# Configuration, tokenizer and other small files.


@pytest.mark.parametrize("name", ["hf", "core"])
def test_the_record_holds_hashes_of_all_small_files(name: str, intact: dict[str, Path]) -> None:
    said = json.loads((intact[name] / "megaconv.json").read_text())["files"]
    prefix = "" if name == "hf" else "hf/"
    assert set(said) == {
        prefix + file for file in ("config.json", "tokenizer.json", "generation_config.json")
    }


def test_the_training_state_of_another_run_fails_verify_and_is_a_notice_elsewhere(
    tmp_path: Path,
) -> None:
    """A distributed checkpoint has learning rates and counts in a file without tensors."""
    source = write_llama(tmp_path / "hf", layers=2)
    for name, iteration in (("run", 1), ("other", 2)):
        megaconv.convert(
            source, tmp_path / name, saver="core", ckpt_format="torch_dist", iteration=iteration
        )
    common = tmp_path / "run" / "iter_0000001" / "common.pt"
    written = torch.load(tmp_path / "other" / "iter_0000002" / "common.pt", weights_only=False)
    torch.save({**written, "iteration": 1}, common)
    outcome = run("verify", tmp_path / "run")
    named = "iter_0000001/common.pt"
    assert (outcome.status, outcome.out.splitlines()[1:]) == (4, [f"  {named}  changed"])
    converted = run("convert", tmp_path / "run", tmp_path / "out", "--saver", "core")
    assert converted.status == 0
    assert f"{named}: changed since the source was written" in converted.err


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize(("name", "below"), [("hf", ""), ("core", "hf")])
def test_a_changed_small_file_fails_verify_and_is_a_notice_elsewhere(
    name: str, below: str, file: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, name, tmp_path)
    path = source / below / file
    path.write_bytes(path.read_bytes().rstrip() + b" \n\n")
    named = str(path.relative_to(source))
    outcome = run("verify", source)
    assert (outcome.status, outcome.out.splitlines()[1:]) == (4, [f"  {named}  changed"])
    assert json.loads(run("verify", source, "--json").out)["differences"] == {named: "changed"}
    converted = run(
        "convert", "--load-dir", source, "--saver", "hf", "--save-dir", tmp_path / "out"
    )
    assert (converted.status, converted.err) == (
        0,
        f"{named}: changed since the source was written (its megaconv.json says)\n",
    )
    if file != "config.json":
        path.unlink()
        assert run("verify", source).out.splitlines()[1:] == [f"  {named}  missing"]


def test_a_configuration_that_lets_nothing_be_opened_fails_verify_as_changed(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, "hf", tmp_path)
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(said | {"hidden_size": 64}))
    assert_refused(
        run("verify", source), 4, "is not as written: config.json (changed)", "can't be opened"
    )


def test_a_record_that_names_files_elsewhere_is_refused(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, "hf", tmp_path)
    for name in ("../x", "/etc/passwd", "a/../../b"):
        record(source, files={name: "0" * 64})
        assert_refused(run("verify", source), 6, "not below its directory")
        record(source, files={})
        said = json.loads((source / "megaconv.json").read_text())
        del said["files"][name]
        (source / "megaconv.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"fingerprint": "", "tensors": {"a": 1}}',
        '{"fingerprint": "", "tensors": {}, "files": 7}',
    ],
)
def test_a_record_that_is_none_is_refused_by_all_that_look_at_it(
    content: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(intact, "hf", tmp_path)
    (source / "megaconv.json").write_text(content)
    for arguments in (("inspect", source), ("verify", source), ("diff", source, source)):
        assert_refused(run(*arguments), 3, "megaconv.json")
    assert run("inspect", source, "--no-check-source").status == 0
