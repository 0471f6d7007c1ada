"""Patches: `apply` makes the newer checkpoint again, bit for bit, and refuses another base and damaged patches."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.patches import patch as patches
from tests.conftest import FIXTURES
from tests.memory import growth
from tests.models import write_llama
from tests.runs import assert_refused, run, snapshot, unchanged

OPTIMIZER = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"


def trained(source: Path, target: Path, *, seed: int = 1, share: float = 1.0) -> Path:
    """A copy of a model with small steps: in every element of two layers, or in a share of their elements."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if "layers.1." in name or "layers.2." in name:
            step = torch.randn(tensor.shape, generator=generator) * 1e-3
            step *= torch.rand(tensor.shape, generator=generator) < share
            tensors[name] = (tensor.float() + step).to(tensor.dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def require_equal(made: Path, new: Path) -> None:
    """Compare two models of one file each, read by safetensors itself."""
    ours, theirs = load_file(made / "model.safetensors"), load_file(new / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def differing(old: Path, new: Path) -> int:
    """Number of tensors that differ."""
    ours, theirs = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    return sum(not torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def make(old: Path, new: Path, target: Path, *words: object) -> dict[str, Any]:
    outcome = run("delta", old, new, "--save-dir", target, "--json", *words)
    assert outcome.status == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def applied(old: Path, *patches_and_words: object, target: Path) -> Path:
    outcome = run("apply", old, *patches_and_words, "--save-dir", target)
    assert outcome.status == 0, outcome.err
    return target


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "old", vocab=128)


@pytest.mark.parametrize("share", [1.0, 0.02])
def test_a_patch_makes_the_newer_checkpoint_again(old: Path, tmp_path: Path, share: float) -> None:
    new = trained(old, tmp_path / "new", share=share)
    report = make(old, new, tmp_path / "patch")
    made = applied(old, tmp_path / "patch", target=tmp_path / "made")
    require_equal(made, new)
    assert run("diff", made, new, "--config-too").status == 0
    assert report["new"]["weights"] == megaconv.fingerprint(made).weights
    assert (report["tensors"], report["changed"], report["removed"]) == (
        39,
        differing(old, new),
        [],
    )
    assert report["bytes"] == (tmp_path / "patch" / "blocks.bin").stat().st_size
    assert report["bytes"] < report["full_bytes"] * (0.5 if share == 1 else 0.1)


def test_both_sides_may_have_any_format_and_layout(old: Path, tmp_path: Path) -> None:
    new = trained(old, tmp_path / "new")
    run(
        "convert",
        old,
        tmp_path / "core",
        "--saver",
        "core",
        "--tp",
        2,
        "--pp",
        2,
        "--ckpt-format",
        "torch_dist",
    )
    run("convert", new, tmp_path / "legacy", "--saver", "legacy", "--tp", 2)
    make(tmp_path / "core", tmp_path / "legacy", tmp_path / "patch")
    # Without a saver: the format and the layout of the base.
    made = applied(tmp_path / "core", tmp_path / "patch", target=tmp_path / "made")
    assert run("diff", made, new).status == 0
    inspected = json.loads(run("inspect", made, "--json").out)
    assert (inspected["layout"]["tp"], inspected["layout"]["pp"]) == (2, 2)
    assert list(made.rglob("*.distcp"))
    hf = applied(old, tmp_path / "patch", "--saver", "core", "--tp", 4, target=tmp_path / "tp4")
    assert run("diff", hf, new).status == 0


def test_optimizer_state_and_training_state_are_in_a_patch(tmp_path: Path) -> None:
    new = tmp_path / "new"
    shutil.copytree(OPTIMIZER, new)
    (iteration,) = new.glob("iter_*")
    for file in new.rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False, map_location="cpu")
        state["args"].consumed_train_samples += 8
        for each in state["optimizer"]["optimizer"]["state"].values():
            each["exp_avg"] *= 1.5
        torch.save(state, file)
    report = make(OPTIMIZER, new, tmp_path / "patch")
    assert report["base"]["optimizer"] != report["new"]["optimizer"]
    assert report["base"]["weights"] == report["new"]["weights"]
    made = applied(OPTIMIZER, tmp_path / "patch", target=tmp_path / "made")
    assert (made / iteration.name).is_dir()
    assert run("diff", made, new, "--config-too").status == 0
    ours, theirs = (
        torch.load(next(root.rglob("model_optim_rng.pt")), weights_only=False, map_location="cpu")
        for root in (made, new)
    )
    assert ours["args"].consumed_train_samples == theirs["args"].consumed_train_samples
    assert ours["opt_param_scheduler"] == theirs["opt_param_scheduler"]
    assert "rng_state" in ours


def test_optimizer_state_in_a_patch_is_left_out_where_it_is_not_wanted(tmp_path: Path) -> None:
    """A format that can't hold it gets the weights, as in a conversion of the newer checkpoint itself."""
    patch, of_old = tmp_path / "patch", ("--option", f"base={OPTIMIZER}")
    make(OPTIMIZER, OPTIMIZER, patch)
    outcome = run("apply", OPTIMIZER, patch, "--saver", "hf", "--save-dir", tmp_path / "hf")
    assert outcome.status == 0, outcome.err
    assert "optimizer state was left out" in outcome.err
    assert run("diff", tmp_path / "hf", OPTIMIZER, "--no-optimizer").status == 0
    made = applied(OPTIMIZER, patch, "--no-optimizer", target=tmp_path / "weights")
    assert "optimizer" not in torch.load(
        next(made.rglob("model_optim_rng.pt")), weights_only=False, map_location="cpu"
    )
    assert run("convert", patch, tmp_path / "dcp", "--saver", "hf", *of_old).status == 0
    whole = run("fingerprint", patch, *of_old).out.splitlines()
    assert len(whole) == 2
    assert run("fingerprint", patch, *of_old, "--no-optimizer").out.splitlines() == whole[:1]
    assert run("verify", patch, *of_old).status == 0
    described = json.loads(run("inspect", patch, "--json").out)
    assert described["optimizer"]["bytes"] > described["bytes"]


def test_optimizer_state_of_the_newer_checkpoint_alone_is_in_a_patch(tmp_path: Path) -> None:
    assert run("convert", OPTIMIZER, tmp_path / "old", "--saver", "hf").status == 0
    make(tmp_path / "old", OPTIMIZER, tmp_path / "patch")
    made = applied(tmp_path / "old", tmp_path / "patch", target=tmp_path / "hf")
    assert run("diff", made, OPTIMIZER, "--no-optimizer").status == 0
    words = (tmp_path / "patch", "--saver", "core", "--tp", 2)
    made = applied(tmp_path / "old", *words, target=tmp_path / "core")
    assert run("diff", made, OPTIMIZER).status == 0


@pytest.mark.parametrize(("layers", "stages"), [(6, [3, 3]), (3, [3])])
def test_the_newer_model_of_a_pipelined_base_may_have_another_number_of_layers(
    old: Path, tmp_path: Path, layers: int, stages: list[int]
) -> None:
    base, new = tmp_path / "base", write_llama(tmp_path / "new", layers=layers, seed=3)
    assert run("convert", old, base, "--saver", "core", "--pp", 2).status == 0
    make(base, new, tmp_path / "patch")
    made = applied(base, tmp_path / "patch", target=tmp_path / "made")
    assert run("diff", made, new).status == 0
    layout = json.loads(run("inspect", made, "--json").out)["layout"]
    assert layout["stage_layers"] == stages


def test_tensors_of_another_shape_or_dtype_are_stored_whole_and_removed_ones_are_listed(
    old: Path, tmp_path: Path
) -> None:
    new = write_llama(tmp_path / "new", vocab=160, layers=3, dtype="float32")
    report = make(old, new, tmp_path / "patch")
    assert report["changed"] == report["tensors"] == 30
    assert {name.split(".attn")[0].split(".mlp")[0] for name in report["removed"]} >= {"layers.3"}
    made = applied(old, tmp_path / "patch", target=tmp_path / "made")
    require_equal(made, new)
    assert json.loads((made / "config.json").read_text())["vocab_size"] == 160


def test_patches_form_a_chain_that_can_be_squashed(old: Path, tmp_path: Path) -> None:
    first = trained(old, tmp_path / "first", seed=1)
    second = trained(first, tmp_path / "second", seed=2)
    make(old, first, tmp_path / "p1")
    make(first, second, tmp_path / "p2")
    made = applied(old, tmp_path / "p1", tmp_path / "p2", target=tmp_path / "made")
    assert run("diff", made, second).status == 0
    of_second = ("--option", f"base={old}", "--option", f"earlier={tmp_path / 'p1'}")
    make(old, tmp_path / "p2", tmp_path / "squashed", *of_second)
    again = applied(old, tmp_path / "squashed", target=tmp_path / "again")
    assert run("diff", again, second).status == 0
    outcome = run("apply", old, tmp_path / "p2", tmp_path / "p1", "--save-dir", tmp_path / "wrong")
    assert_refused(outcome, 4, "give the patches in their order")


def test_another_base_is_refused_before_anything_is_written(old: Path, tmp_path: Path) -> None:
    new = trained(old, tmp_path / "new")
    make(old, new, tmp_path / "patch")
    other = write_llama(tmp_path / "other", vocab=128, seed=5)
    outcome = run("apply", other, tmp_path / "patch", "--save-dir", tmp_path / "made")
    assert_refused(outcome, 4, "is not the base of", "fingerprint of weights")
    smaller = write_llama(tmp_path / "smaller", vocab=128, layers=2)
    outcome = run(
        "convert",
        tmp_path / "patch",
        tmp_path / "made",
        "--saver",
        "hf",
        "--option",
        f"base={smaller}",
    )
    assert_refused(outcome, 4, "has no such")
    assert not (tmp_path / "made").exists()


def test_a_patch_is_an_input_of_every_command(old: Path, tmp_path: Path) -> None:
    new = trained(old, tmp_path / "new")
    make(old, new, tmp_path / "patch")
    base = ("--option", f"base={old}")
    assert run("verify", tmp_path / "patch", *base).status == 0
    assert run("diff", tmp_path / "patch", new, *base).status == 0
    assert_refused(run("fingerprint", tmp_path / "patch"), 2, "--option base=OLD")


def test_the_target_in_the_report_is_as_it_was_given(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = trained(old, tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    assert make(old, new, Path("patch"))["target"] == "patch"
    assert make(old, new, Path("update"), "--sparse", "vllm")["target"] == "update"


def test_scan_finds_no_fault_in_a_patch(old: Path, tmp_path: Path) -> None:
    make(old, trained(old, tmp_path / "new"), tmp_path / "patch")
    outcome = run("scan", tmp_path / "patch")
    assert (outcome.status, outcome.out.splitlines()[-1].endswith("no faults")) == (0, True)


def test_inspect_describes_a_patch_without_its_base(old: Path, tmp_path: Path) -> None:
    report = make(old, trained(old, tmp_path / "new"), tmp_path / "patch")
    shown = run("inspect", tmp_path / "patch")
    assert shown.status == 0, shown.err
    fingerprint = report["base"]["weights"]
    assert f"patch of hf, safetensors, for the base with the fingerprint {fingerprint}" in shown.out
    assert "record      names and shapes match megaconv.json" in shown.out
    assert_refused(run("inspect", tmp_path / "patch", "--stats"), 2, "--option base=OLD")


def test_a_patch_is_not_read_on_another_base_than_its_own(old: Path, tmp_path: Path) -> None:
    """Without the earlier patch, the second one would make wrong weights of the first checkpoint."""
    second, third = (
        trained(old, tmp_path / "second"),
        trained(old, tmp_path / "third", seed=2),
    )
    make(old, second, tmp_path / "p1")
    make(second, third, tmp_path / "p2")
    made = ("--save-dir", tmp_path / "made")
    forgotten = ("--option", f"base={old}")
    outcome = run("delta", old, tmp_path / "p2", *forgotten, *made)
    assert_refused(outcome, 4, "another base", "--option base")
    outcome = run("convert", tmp_path / "p2", tmp_path / "made", "--saver", "hf", *forgotten)
    assert_refused(outcome, 4, "another base", "--option base")
    outcome = run("fingerprint", tmp_path / "p2", *forgotten)
    assert_refused(outcome, 4, "another base", "--option base")
    whole = (*forgotten, "--option", f"earlier={tmp_path / 'p1'}")
    for words in ((), ("--no-optimizer",)):
        assert run("fingerprint", tmp_path / "p2", *whole, *words).status == 0
    outcome = run(
        "fingerprint", tmp_path / "p2", *forgotten, "--option", f"earlier={tmp_path / 'p2'}"
    )
    assert_refused(outcome, 4, "in their order")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--saver", "hf", "--dtype", "fp32"),
        ("--saver", "gguf", "--option", "tokenizer=none", "--option", "gguf_type=q8_0"),
        ("--saver", "hf", "--average", "OLD"),
        ("--saver", "hf", "--layers", "0,3"),
        ("--saver", "hf", "--vocab-size", "100"),
    ],
    ids=lambda words: words[-2],
)
def test_no_conversion_that_changes_all_values_accepts_another_base(
    words: tuple[str, ...], old: Path, tmp_path: Path
) -> None:
    """The record of the patch has no fingerprints of these values."""
    make(old, trained(old, tmp_path / "new", share=0.1), tmp_path / "patch")
    command = ["convert", tmp_path / "patch", tmp_path / "out"]
    command += [old if word == "OLD" else word for word in words]
    other = trained(old, tmp_path / "other", seed=2)
    outcome = run(*command, "--option", f"base={other}")
    assert_refused(outcome, 4, "another base", "--option base")
    assert not (tmp_path / "out").exists()
    assert run(*command, "--option", f"base={old}").status == 0


def test_a_base_with_a_record_is_compared_before_anything_is_read(
    old: Path, tmp_path: Path
) -> None:
    second = trained(old, tmp_path / "second")
    make(old, second, tmp_path / "patch")
    megaconv.convert(old, tmp_path / "core", saver="core", tp=2)
    megaconv.convert(second, tmp_path / "other", saver="core")
    read = ("fingerprint", tmp_path / "patch", "--option")
    assert run(*read, f"base={tmp_path / 'core'}").status == 0
    assert_refused(run(*read, f"base={tmp_path / 'other'}"), 4, "is not the base of")


def test_no_patch_is_made_of_a_damaged_checkpoint(old: Path, tmp_path: Path) -> None:
    new = trained(old, tmp_path / "new")
    megaconv.convert(old, tmp_path / "written", saver="hf")
    damaged = trained(tmp_path / "written", tmp_path / "damaged", seed=3)
    for sides in ((damaged, new), (new, damaged)):
        outcome = run("delta", *sides, "--save-dir", tmp_path / "patch")
        assert_refused(outcome, 3, "other values than were written")
        outcome = run("delta", *sides, "--save-dir", tmp_path / "patch", "--sparse", "vllm")
        assert_refused(outcome, 3, "other values than were written")
    assert not (tmp_path / "patch").exists()
    make(damaged, new, tmp_path / "patch", "--no-check-source")


def test_something_else_than_a_patch_is_refused_by_name(old: Path, tmp_path: Path) -> None:
    outcome = run("apply", old, old, "--save-dir", tmp_path / "made")
    assert_refused(outcome, 3, f"{old}: is no patch", "delta.json")


def test_a_checkpoint_without_a_configuration_is_compared_with_config(tmp_path: Path) -> None:
    """MaxText's checkpoint has no configuration of its own."""
    base = FIXTURES / "peft-llama-all-linear" / "base"
    maxtext = FIXTURES / "orbax-maxtext-scan-bf16" / "checkpoint"
    words = ("--config", base, "--option", "maxtext_rope=split")
    make(base, maxtext, tmp_path / "patch", *words)
    made = applied(base, tmp_path / "patch", target=tmp_path / "made")
    assert run("diff", made, maxtext, *words).status == 0


def damage(path: Path, random: Random) -> str:
    """Change a file of a patch. Returns what was done."""
    content = bytearray(path.read_bytes())
    place = random.randrange(len(content))
    if random.random() < 0.3:
        path.write_bytes(content[:place])
        return f"{path.name} cut at {place}"
    content[place] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    return f"{path.name}, bit of byte {place}"


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 300))]
)
def test_a_damaged_patch_makes_nothing_wrong(old: Path, tmp_path: Path, seed: int) -> None:
    """Either one line of an error and no output, or the right output."""
    random = Random(seed)
    new = trained(old, tmp_path / "new", share=0.02)
    make(old, new, tmp_path / "patch")
    name = random.choice(["blocks.bin", "delta.json", "header.pt", "megaconv.json"])
    done = damage(tmp_path / "patch" / name, random)
    outcome = run("apply", old, tmp_path / "patch", "--save-dir", tmp_path / "made")
    if outcome.status:
        assert outcome.status in (2, 3, 4, 6), (done, outcome.err)
        *notices, error = outcome.err.splitlines()
        assert error.startswith("megaconv: error: "), (done, outcome.err)
        assert all("not carried on" in each for each in notices), (done, outcome.err)
        assert not (tmp_path / "made").exists()
    else:
        assert run("diff", tmp_path / "made", new).status == 0, done


def test_a_failed_run_leaves_nothing_and_keeps_what_was_there(old: Path, tmp_path: Path) -> None:
    new = trained(old, tmp_path / "new")
    target = tmp_path / "patch"
    make(old, new, target)
    with unchanged(tmp_path):
        assert_refused(run("delta", old, new, "--save-dir", target), 2, "already exists")
        assert_refused(
            run("delta", old, tmp_path / "nothing", "--save-dir", target, "--overwrite"),
            2,
            "nothing",
        )
    before = snapshot(target)
    make(old, new, target, "--overwrite")
    assert snapshot(target) == before


def test_a_gigantic_shape_is_refused_at_once(old: Path, tmp_path: Path) -> None:
    make(old, trained(old, tmp_path / "new"), tmp_path / "patch")
    index = json.loads((tmp_path / "patch" / "delta.json").read_text())
    index["tensors"][3][3] = [1 << 40, 1 << 40]
    (tmp_path / "patch" / "delta.json").write_text(json.dumps(index))
    outcome = run("apply", old, tmp_path / "patch", "--save-dir", tmp_path / "made")
    assert_refused(outcome, 3, "1 blocks, expected more")


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 12])
def test_the_memory_does_not_grow_with_the_model(tmp_path: Path, layers: int) -> None:
    sizes = {"layers": layers, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048}
    old, new = (write_llama(tmp_path / str(n), seed=n, **sizes) for n in (0, 1))
    with growth() as of_delta:
        make(old, new, tmp_path / "patch")
    with growth() as of_apply:
        applied(old, tmp_path / "patch", target=tmp_path / "made")
    assert max(of_delta.most, of_apply.most) < 64 << 20, (of_delta, of_apply)


def test_overwrite_replaces_neither_an_input_nor_other_files(old: Path, tmp_path: Path) -> None:
    new = trained(old, tmp_path / "new")
    letters = tmp_path / "letters"
    letters.mkdir()
    (letters / "dear.txt").write_text("dear")
    patch, second = tmp_path / "patch", tmp_path / "second"
    make(old, new, patch)
    make(new, trained(new, tmp_path / "newer", seed=2), second)
    earlier = ("--option", f"base={old}", "--option", f"earlier={patch}")
    with unchanged(old), unchanged(tmp_path):
        for words in ((), ("--sparse", "vllm")):
            outcome = run("delta", old, new, "--save-dir", new, "--overwrite", *words)
            assert_refused(outcome, 2, "is the source", "which it would replace")
            outcome = run("delta", old, new, "--save-dir", letters, "--overwrite", *words)
            assert_refused(outcome, 2, "--overwrite replaces checkpoints")
        for words in (
            ("apply", old, patch, "--save-dir", old),
            ("apply", old, patch, second, "--save-dir", old),
            ("apply", old, patch, second, "--save-dir", patch),
            ("apply", old, patch, second, "--save-dir", second),
            ("convert", patch, old, "--saver", "hf", "--option", f"base={old}"),
            ("delta", patch, new, "--save-dir", old, "--option", f"base={old}"),
            ("delta", second, new, "--save-dir", patch, *earlier),
        ):
            outcome = run(*words, "--overwrite")
            assert_refused(outcome, 2, "is the source", "which it would replace")
        outcome = run("delta", old, new, "--save-dir", tmp_path / "other", "--take-over")
        assert_refused(outcome, 2, "--take-over: is for an output in an object store")


def test_names_of_small_files_stay_below_the_patch() -> None:
    with pytest.raises(ValueError, match="names the file"):
        patches._below("../../etc/passwd")
