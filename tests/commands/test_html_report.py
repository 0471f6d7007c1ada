"""`inspect --html`: one page that needs nothing else, opened in a real browser where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.browsers import browser
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

MIXTURE = FIXTURES / "core-mixtral-seq-tp2pp2ep2" / "checkpoint"


def written(path: Path, target: Path, *options: str) -> str:
    outcome = run("inspect", path, "--html", target, *options)
    assert (outcome.status, outcome.err) == (0, "")
    return target.read_text()


def opened(page: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """(the document after its scripts have run, the addresses that the browser asked for)."""
    log = tmp_path / "net.json"
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--disable-background-networking", "--disable-component-update", f"--log-net-log={log}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, re.findall(r'"url":"([^"]*)"', log.read_text())


def test_a_report_holds_everything_and_names_no_other_address(tmp_path: Path) -> None:
    page = written(MIXTURE, tmp_path / "report.html", "--stats")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["layout"]["experts_of_ep_rank"] == [[0, 1], [2, 3]]
    assert all(row["stats"]["elements"] == row["parameters"] for row in data["tensors"])
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|img|iframe|script src|object)", page)


def test_names_in_a_report_are_text_alone(tmp_path: Path) -> None:
    weights = load_file(
        FIXTURES / "peft-llama-all-linear" / "adapter" / "adapter_model.safetensors"
    )
    name = "</script><script>document.title='taken'</script>"
    save_file({name: next(iter(weights.values()))}, tmp_path / "x.safetensors")
    page = written(tmp_path / "x.safetensors", tmp_path / "report.html")
    assert name not in page
    assert page.count("</script>") == 2


def test_a_browser_shows_treemap_layout_plots_and_table_and_asks_nobody(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    written(MIXTURE, page, "--stats")
    document, addresses = opened(page, tmp_path)
    map_part, rest = document.split('id="layout-part"')
    layout_part, plot_part = rest.split('id="plot-part"')
    assert map_part.count("<rect") > 10
    assert layout_part.count("layer 0: pp 0") == layout_part.count("layer 1: pp 1") == 1
    assert "<polyline" in plot_part
    rows = plot_part.split('<tbody id="rows">')[1].split("</tbody>")[0]
    assert rows.count("<tr>") == len(json.loads(run("inspect", MIXTURE, "--json").out)["tensors"])
    assert not [address for address in addresses if address.startswith("http")]


def test_a_browser_shows_an_unknown_model_too(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    written(FIXTURES / "gguf-qwen2-bpe" / "qwen2-bpe-q8_0.gguf", page)
    document, _ = opened(page, tmp_path)
    assert "token_embd" in document
    assert "<td>q8_0</td>" in document


@pytest.fixture
def tuned(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and what it became: layer 1 has moved by half."""
    model = write_llama(tmp_path / "model", layers=3, dtype="float32")
    weights = load_file(model / "model.safetensors")
    other = shutil.copytree(model, tmp_path / "tuned")
    moved = {name: tensor * 1.5 if ".1." in name else tensor for name, tensor in weights.items()}
    save_file(moved, other / "model.safetensors", {"format": "pt"})
    return model, other


def test_how_far_a_model_has_moved_is_a_page_too(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    outcome = run("diff", *tuned, "--html", tmp_path / "diff.html")
    assert (outcome.status, outcome.err, "|A-B|" in outcome.out, "diff.html: " in outcome.out) == (
        4,
        "",
        False,
        True,
    )
    page = (tmp_path / "diff.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    layers = {layer["name"]: layer["stats"]["relative"] for layer in data["layers"]}
    assert layers["layers.1"] == pytest.approx(0.5)
    assert layers["layers.0"] == layers["layers.2"] == 0
    assert all(row["stats"]["elements"] == row["parameters"] for row in data["tensors"])
    assert_refused(
        run("diff", *tuned, "--html", tmp_path / "no" / "diff.html"), 2, "no such directory"
    )
    assert_refused(
        run("diff", *tuned, "--html", tmp_path / "diff.html", "--metadata"),
        2,
        "--metadata",
        "--html",
    )


def test_a_browser_plots_how_far_layers_have_moved(
    tuned: tuple[Path, Path], tmp_path: Path
) -> None:
    run("diff", *tuned, "--html", tmp_path / "diff.html")
    document, addresses = opened(tmp_path / "diff.html", tmp_path)
    plot = document.split('id="plot-part"')[1]
    assert "How far it has moved" in plot
    assert "<polyline" in plot
    assert "layer 1: 0.5" in plot
    assert not [address for address in addresses if address.startswith("http")]
