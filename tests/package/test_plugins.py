"""Families, loaders and savers of other packages: the example of examples/plugin, and such as are broken."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv import registry
from megaconv.errors import PluginError, UnknownFamily, UsageError
from megaconv.loader import Loader
from megaconv.model.ir import Header
from megaconv.saver import Saver
from tests.models import write_llama
from tests.package.test_architecture import ROOT
from tests.runs import assert_refused, run, start, unchanged

EXAMPLE = ROOT / "examples" / "plugin"
PACKAGE = "megaconv_pebble"


def install(
    site: Path, name: str, modules: dict[str, str], entry_points: dict[str, dict[str, str]]
) -> None:
    """Write the files that pip leaves. modules: file -> text; entry_points: kind -> name -> module."""
    information = site / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "\n".join(
            f"[megaconv.{kind}]\n"
            + "".join(f"{word} = {module}\n" for word, module in entries.items())
            for kind, entries in entry_points.items()
        )
    )
    for file, text in modules.items():
        (site / file).write_text(text)


def entry_points_of_the_example() -> dict[str, dict[str, str]]:
    text = (EXAMPLE / "pyproject.toml").read_text()
    found = re.findall(
        r'^\[project\.entry-points\."megaconv\.(\w+)"\]\n(\w+) = "([\w.]+)"$', text, re.MULTILINE
    )
    return {kind: {name: module} for kind, name, module in found}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of installed packages that Python looks into, without any yet."""
    place = tmp_path / "site-packages"
    place.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(place)
    yield place
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(place)):
            del sys.modules[name]


@pytest.fixture
def pebble(site: Path) -> Path:
    """The example, installed."""
    shutil.copytree(EXAMPLE / PACKAGE, site / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    install(site, "megaconv-pebble", {}, entry_points_of_the_example())
    return site


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama", layers=2)


def write_pebble_model(path: Path) -> Path:
    """A Hugging Face directory of the example's family."""
    write_llama(
        path,
        layers=2,
        extra_config={"architectures": ["PebbleForCausalLM"], "model_type": "pebble"},
    )
    names = {
        "model.embed_tokens": "body.embed",
        "model.layers": "body.blocks",
        "model.norm": "body.last_norm",
    }
    tensors = load_file(path / "model.safetensors")
    for llama, own in names.items():
        tensors = {name.replace(llama, own): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def convert(source: object, target: Path, *options: object) -> None:
    outcome = run("convert", "--load-dir", source, "--save-dir", target, *options)
    assert outcome.status == 0, outcome.err


def fingerprint(place: object, *options: object) -> str:
    outcome = run("fingerprint", place, *options)
    assert outcome.status == 0, outcome.err
    return outcome.out


# The example.


def test_the_example_offers_one_of_each_kind() -> None:
    assert entry_points_of_the_example() == {
        kind: {"pebble": f"{PACKAGE}.{module}"}
        for kind, module in {"families": "family", "loaders": "loader", "savers": "saver"}.items()
    }


@pytest.mark.usefixtures("pebble")
def test_formats_lists_the_plugins_of_a_package() -> None:
    listed, document = run("formats"), json.loads(run("formats", "--json").out)
    assert (listed.status, listed.err) == (0, "")
    assert "  pebble        Pebble: a model in one *.pebble file" in listed.out
    assert "                --option alignment=...: bytes" in listed.out
    [line] = [line for line in listed.out.splitlines() if line.endswith(" PebbleForCausalLM")]
    ways = ["read,", "write"]
    assert line.split() == ["pebble", *ways, *ways, "-", "-", "-", "PebbleForCausalLM"]
    assert document["families"]["pebble"] == ["PebbleForCausalLM"]
    assert document["options"]["loaders"]["pebble"].keys() == {"store"}


@pytest.mark.usefixtures("pebble")
def test_a_family_of_another_package_goes_to_megatron_and_back(tmp_path: Path) -> None:
    model = write_pebble_model(tmp_path / "model")
    convert(model, tmp_path / "core", "--saver", "core", "--tp", 2, "--pp", 2)
    convert(
        tmp_path / "core",
        tmp_path / "dist",
        "--saver",
        "core",
        "--ckpt-format",
        "torch_dist",
        "--tp",
        4,
        "--pp",
        1,
    )
    convert(tmp_path / "dist", tmp_path / "back", "--saver", "hf")
    assert json.loads(run("inspect", tmp_path / "core", "--json").out)["family"] == "pebble"
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "back", model))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.usefixtures("pebble")
def test_a_familys_refusals_are_its_own(tmp_path: Path) -> None:
    model = write_pebble_model(tmp_path / "model")
    outcome = run(
        "convert", "--load-dir", model, "--saver", "legacy", "--save-dir", tmp_path / "out"
    )
    assert_refused(outcome, 2, "legacy")


def test_a_checkpoint_that_fits_a_family_of_ours_is_not_another_packages(
    site: Path, llama: Path, tmp_path: Path
) -> None:
    """Even where that is recognized by the same."""
    text = "from dataclasses import replace\nfrom megaconv.families.llama import FAMILY as LLAMA\n"
    module = {
        "twin_family.py": text
        + "FAMILY = replace(LLAMA, name='twin', architectures=('TwinForCausalLM',))\n"
    }
    install(site, "twin", module, {"families": {"twin": "twin_family"}})
    convert(llama, tmp_path / "core", "--saver", "core")
    shutil.rmtree(tmp_path / "core" / "hf")
    assert "TwinForCausalLM" in run("formats").out
    assert megaconv.inspect(tmp_path / "core").header.config.family == "llama"


def test_without_the_package_its_family_is_unknown(tmp_path: Path) -> None:
    model = write_pebble_model(tmp_path / "model")
    with pytest.raises(UnknownFamily, match="PebbleForCausalLM is not supported"):
        megaconv.inspect(model)


@pytest.mark.usefixtures("pebble")
def test_every_command_reads_what_the_saver_writes(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(llama, out, "--saver", "pebble", "--verify")
    for place in (out, out / "model.pebble"):
        assert json.loads(run("inspect", place, "--json").out)["loader"] == "pebble"
        assert run("inspect", place, "--loader", "pebble").status == 0
        assert fingerprint(place) == fingerprint(place, "--loader", "pebble") == fingerprint(llama)
        assert run("verify", place).status == run("verify", place, "--loader", "pebble").status == 0
        assert run("diff", place, llama).status == 0
        assert run("diff", place, llama, "--loader-a", "pebble", "--loader-b", "hf").status == 0
        assert run("diff", place, out, "--loader", "pebble").status == 0
    convert(out / "model.pebble", tmp_path / "core", "--saver", "core", "--tp", 2)
    sharded = ("convert", llama, tmp_path / "x", "--saver", "pebble", "--tp", 2)
    assert_refused(run(*sharded), 2, "--tp 2: has no effect with --saver pebble")
    assert fingerprint(tmp_path / "core") == fingerprint(llama)
    with (out / "model.pebble").open("r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"changed")
    assert run("verify", out).status == run("diff", out, llama, "--no-check-source").status == 4
    assert_refused(run("diff", out, llama), 3, "--no-check-source")


@pytest.mark.usefixtures("pebble")
def test_a_loader_that_is_named_is_the_one_that_reads(llama: Path, tmp_path: Path) -> None:
    for command in (
        ["inspect", llama],
        ["fingerprint", llama],
        ["verify", llama],
        ["diff", llama, llama],
    ):
        outcome = run(*command, "--loader", "pebble")
        if command[0] == "verify":
            assert_refused(outcome, 3, "megaconv.json")
        else:
            assert_refused(outcome, 3, "expected one .pebble file, found 0")
    assert_refused(
        run("diff", llama, llama, "--loader-b", "pebble"), 3, "expected one .pebble file"
    )
    assert_refused(run("diff", llama, llama, "--loader-a", "zip"), 2, "no loader is called 'zip'")


@pytest.mark.usefixtures("pebble")
def test_the_file_is_laid_out_as_its_documentation_says(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", "--saver", "pebble", "--option", "alignment=4096")
    data = (tmp_path / "out" / "model.pebble").read_bytes()
    length = int.from_bytes(data[8:16], "little")
    header, start_of_tensors = json.loads(data[16 : 16 + length]), 16 + length
    assert data[:8] == b"PEBBLE01"
    assert start_of_tensors % 4096 == 0
    wanted = load_file(llama / "model.safetensors")
    assert header["tensors"].keys() == wanted.keys()
    for name, tensor in wanted.items():
        entry = header["tensors"][name]
        begin = start_of_tensors + entry["offset"]
        assert begin % 4096 == 0
        assert (entry["shape"], entry["dtype"]) == (list(tensor.shape), "bfloat16")
        assert (
            data[begin : begin + 2 * tensor.numel()]
            == tensor.view(dtype=torch.uint8).numpy().tobytes()
        )


# Detection.


@pytest.mark.usefixtures("pebble")
def test_a_plugins_files_are_recognised_beside_a_config_json(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", "--saver", "pebble")
    shutil.copy(tmp_path / "out" / "model.pebble", llama)
    assert megaconv.inspect(llama).loader == "pebble"
    assert megaconv.inspect(llama, loader="hf").loader == "hf"
    (llama / "model.safetensors").unlink()
    assert megaconv.inspect(llama).loader == "pebble"
    (llama / "model.pebble").unlink()
    assert megaconv.inspect(llama).loader == "config"
    assert_refused(
        run("fingerprint", llama),
        3,
        "has a config.json but no weights; expected one of model.safetensors",
    )


# Options.


@pytest.mark.usefixtures("pebble")
def test_options_are_checked_by_name_and_by_their_owner(llama: Path, tmp_path: Path) -> None:
    command = ["convert", "--load-dir", llama, "--save-dir", tmp_path / "out"]
    with unchanged(llama):
        unknown = run(*command, "--saver", "pebble", "--option", "colour=red")
        assert_refused(
            unknown, 2, "--option colour", "loader hf takes none; saver pebble takes alignment"
        )
        assert_refused(
            run(*command, "--saver", "pebble", "--option", "alignment=0"), 2, "alignment=0"
        )
        assert_refused(run(*command, "--saver", "pebble", "--option", "alignment"), 2, "key=value")
        assert_refused(
            run(*command, "--saver", "core", "--option", "alignment=8"), 2, "saver core takes"
        )
        assert_refused(run("inspect", llama, "--option", "store=x"), 2, "loader hf takes none")
        assert_refused(
            run("diff", llama, llama, "--option", "store=x"), 2, "loader hf of A takes none"
        )


@pytest.mark.usefixtures("pebble")
def test_options_from_python(llama: Path, tmp_path: Path) -> None:
    megaconv.convert(llama, tmp_path / "out", saver="pebble", options={"alignment": "8"})
    megaconv.convert(
        "pebble://out/model", tmp_path / "core", saver="core", options={"store": str(tmp_path)}
    )
    assert megaconv.diff(
        "pebble://out/model", tmp_path / "core", options={"store": str(tmp_path)}
    ).same
    with pytest.raises(UsageError, match="--option colour: is not known"):
        megaconv.convert(llama, tmp_path / "again", saver="pebble", options={"colour": "red"})


# URIs.


@pytest.fixture
def store(pebble: Path, llama: Path, tmp_path: Path) -> Path:
    convert(llama, tmp_path / "store" / "team", "--saver", "pebble")
    return tmp_path / "store"


def test_every_command_takes_a_uri(store: Path, llama: Path, tmp_path: Path) -> None:
    uri, option = "pebble://team/model", ("--option", f"store={store}")
    assert json.loads(run("inspect", uri, *option, "--json").out)["path"] == uri
    assert fingerprint(uri, *option) == fingerprint(llama)
    assert run("diff", uri, llama, *option).status == 0
    assert run("diff", llama, uri, "--loader-b", "pebble", *option).status == 0
    convert(uri, tmp_path / "core", "--saver", "core", "--tp", 2, "--resume", "--verify", *option)
    assert json.loads((tmp_path / "core" / "megaconv.json").read_text())["source"]["path"] == uri
    assert_refused(run("verify", uri, *option), 3, "a URI has no record", "megaconv diff")


def test_a_run_of_a_uri_is_resumed_only_while_the_loader_knows_it_unchanged(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = lambda *args, **words: Header(*args, **words | {"revision": None})  # noqa: E731
    monkeypatch.setattr(f"{PACKAGE}.loader.Header", forgetful)
    command = [
        "convert",
        "--load-dir",
        "pebble://team/model",
        "--saver",
        "hf",
        "--option",
        f"store={store}",
    ]
    assert_refused(
        run(*command, "--save-dir", tmp_path / "out", "--resume"),
        2,
        "--resume",
        "can't detect whether",
    )
    assert run(*command, "--save-dir", tmp_path / "out").status == 0


def test_uris_of_an_unknown_scheme_are_refused_with_the_known_schemes(store: Path) -> None:
    assert_refused(
        run("inspect", "bucket://team/model"), 3, "bucket://team/model", "hf://, pebble://"
    )
    assert_refused(run("inspect", "pebble://team/model"), 2, "--option store=DIRECTORY")
    assert_refused(
        run("inspect", "pebble://../out", "--option", f"store={store}"), 2, "leads out of the store"
    )
    assert_refused(
        run("inspect", "pebble://team/other", "--option", f"store={store}"),
        3,
        "other.pebble: no such file",
    )
    assert_refused(
        run("inspect", "pebble://team/model", "--loader", "hf"), 2, "the loader hf takes paths"
    )


# What nobody has installed costs nothing.


def test_no_search_for_plugins_is_imported_without_plugins(llama: Path) -> None:
    process = start(
        "inspect",
        llama,
        before="import atexit, sys; atexit.register(lambda: print('importlib.metadata' in sys.modules))",
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "False"


# Broken plugins.

LOADER = "DESCRIPTION = 'a loader'\ndef detect(path):\n    {detect}\ndef open(path, options):\n    raise OSError('opened')\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('off')", "SystemExit: off"),
        ("nonsense nonsense", "SyntaxError"),
        ("DESCRIPTION = 'half of one'", "broken_plugin has no detect, open"),
        (LOADER.format(detect="return path.no_such_thing"), "AttributeError: "),
    ],
)
def test_a_broken_loader_is_named_and_does_not_disturb_others(
    site: Path, llama: Path, text: str, reason: str
) -> None:
    install(site, "broken", {"broken_plugin.py": text}, {"loaders": {"broken": "broken_plugin"}})
    process = start("inspect", llama, before=f"import sys; sys.path.insert(0, {str(site)!r})")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "llama" in out
    assert len(err.splitlines()) == 1
    assert err.startswith("megaconv: warning: loader 'broken' is left out: ")
    assert reason in err


def test_broken_plugins_of_every_kind_leave_the_list_whole(site: Path, llama: Path) -> None:
    kinds = {
        kind: {f"broken-{kind}": "no_such_module"} for kind in ("loaders", "savers", "families")
    }
    install(site, "broken", {}, kinds)
    process = start("formats", before=f"import sys; sys.path.insert(0, {str(site)!r})")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == run("formats").out
    assert sorted(line.split()[2] for line in err.splitlines()) == ["family", "loader", "saver"]
    named = run("inspect", llama, "--loader", "broken-loaders", "--json")
    assert (named.status, json.loads(named.out)["error"]["code"]) == (1, "plugin-broken")
    assert "of the package broken: can't be loaded from no_such_module" in named.err


RECORD = LOADER.format(detect="return path.suffix == '.mine'") + (
    "from megaconv.loader import Loader\n"
    "LOADER = Loader(name='mine', description=DESCRIPTION, detect=detect, open=open, options={'key': 'a value'})\n"
)


@pytest.mark.parametrize("entry", ["mine_plugin", "mine_plugin:LOADER"])
def test_an_entry_point_names_a_record_or_its_module(site: Path, entry: str) -> None:
    install(site, "mine", {"mine_plugin.py": RECORD}, {"loaders": {"mine": entry}})
    found = registry.loader("mine")
    assert (found.name, found.options, found.detect(Path("a.mine"))) == (
        "mine",
        {"key": "a value"},
        True,
    )


def test_a_record_has_the_name_of_its_entry_point(site: Path) -> None:
    install(site, "mine", {"mine_plugin.py": RECORD}, {"loaders": {"yours": "mine_plugin"}})
    with pytest.raises(
        PluginError, match="its LOADER is called 'mine'; the entry point needs the same name"
    ):
        registry.loader("yours")


def test_a_module_without_a_record_is_read_by_the_names_of_the_fields(site: Path) -> None:
    text = "DESCRIPTION = 'a saver'\nOPTIONS = {'key': 'a value'}\nHOLDS_OPTIMIZER = True\ndef plan(header, options): pass\n"
    install(site, "older", {"older_plugin.py": text}, {"savers": {"older": "older_plugin"}})
    found = registry.saver("older")
    assert (found.name, found.description, found.options) == (
        "older",
        "a saver",
        {"key": "a value"},
    )
    assert found.holds_optimizer
    assert not found.holds_whole


@pytest.mark.parametrize(
    ("record", "heading"), [(Loader, "## Write a loader"), (Saver, "## Write a saver")]
)
def test_the_page_for_plugins_lists_every_field_of_a_record(
    record: type[Loader | Saver], heading: str
) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    section = page[page.index(heading) + 1 :].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| (yes|no) \|", section, re.MULTILINE)
    needed = {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(record)
    }
    assert listed == [(name, "yes" if is_needed else "no") for name, is_needed in needed.items()]


def test_a_plugin_can_not_take_a_name_of_ours(
    site: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = LOADER.format(detect="return True")
    install(site, "hf-again", {"again_plugin.py": text}, {"loaders": {"hf": "again_plugin"}})
    assert megaconv.inspect(llama).loader == "hf"
    assert "loader 'hf' is left out: megaconv has one of this name itself" in caplog.text


def test_a_family_has_the_name_of_its_entry_point(
    site: Path, pebble: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "boulder", {}, {"families": {"boulder": f"{PACKAGE}.family"}})
    document = json.loads(run("formats", "--json").out)
    assert "pebble" in document["families"]
    assert "boulder" not in document["families"]
    assert "family 'boulder'" in caplog.text
    assert "its FAMILY is called 'pebble'" in caplog.text


# The example as a user installs it.


@pytest.mark.slow
def test_the_example_installed_by_pip_is_used_from_the_command_line(
    llama: Path, tmp_path: Path
) -> None:
    """Needs a package index, for the build backend."""
    target = tmp_path / "installed"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        str(EXAMPLE),
    ]
    subprocess.run(pip, check=True, timeout=300)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{target}"}

    def command(*words: object) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "megaconv", *map(str, words)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "PebbleForCausalLM" in command("formats")
    command("convert", "--load-dir", llama, "--saver", "pebble", "--save-dir", "store", "--verify")
    command(
        "convert",
        "--load-dir",
        "pebble://model",
        "--option",
        "store=store",
        "--saver",
        "core",
        "--save-dir",
        "core",
    )
    assert command("fingerprint", "core") == command("fingerprint", llama)
    model = write_pebble_model(tmp_path / "model")
    command("convert", "--load-dir", model, "--saver", "core", "--save-dir", "pebbles", "--tp", 2)
    assert command("diff", "pebbles", model).startswith("the same")
