"""`inspect --html`: one page that needs nothing else, opened in a real browser where there is one."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.browsers import PHONE, Page, fits, opened, shown
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

MIXTURE = FIXTURES / "core-mixtral-seq-tp2pp2ep2" / "checkpoint"


def written(path: Path, target: Path, *options: str) -> str:
    outcome = run("inspect", path, "--html", target, *options)
    assert (outcome.status, outcome.err) == (0, "")
    return target.read_text()


def test_a_report_holds_everything_and_names_no_other_address(tmp_path: Path) -> None:
    text = written(MIXTURE, tmp_path / "report.html", "--stats")
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["layout"]["experts_of_ep_rank"] == [[0, 1], [2, 3]]
    assert all(row["stats"]["elements"] == row["parameters"] for row in data["tensors"])
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe|script src|object)", text)


def test_a_page_replaces_a_page_and_no_other_file(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    weights = model / "model.safetensors"
    before = weights.read_bytes()
    for command in (("inspect", model), ("diff", model, model), ("plan", model, "--gpus", 1)):
        outcome = run(*command, "--html", weights)
        assert_refused(outcome, 2, "model.safetensors: exists and is no HTML page")
        assert weights.read_bytes() == before
    for _ in range(2):
        written(model, tmp_path / "page.html")


def test_names_in_a_report_are_text_alone(tmp_path: Path) -> None:
    weights = load_file(
        FIXTURES / "peft-llama-all-linear" / "adapter" / "adapter_model.safetensors"
    )
    name = "</script><script>document.title='taken'</script>"
    save_file({name: next(iter(weights.values()))}, tmp_path / "x.safetensors")
    text = written(tmp_path / "x.safetensors", tmp_path / "report.html")
    assert name not in text
    assert text.count("</script>") == 2


def test_a_browser_shows_treemap_layout_plots_and_table_without_requests(
    tmp_path: Path, browser: Page
) -> None:
    target = tmp_path / "report.html"
    written(MIXTURE, target, "--stats")
    listed = len(json.loads(run("inspect", MIXTURE, "--json").out)["tensors"])
    with opened(target, browser) as tab:
        assert tab.run("document.querySelectorAll('#map rect').length") > 10
        tips = tab.run(
            "[...document.querySelectorAll('#layout title')].map(tip => tip.textContent)"
        )
        assert sum(tip.startswith("layer 0: pp 0") for tip in tips) == 1
        assert sum(tip.startswith("layer 1: pp 1") for tip in tips) == 1
        sizes = tab.run("document.getElementById('layout').textContent")
        assert "5,824 parameters, 11.38 KiB" in sizes
        legend = tab.run("document.getElementById('layout-legend').textContent")
        assert legend == "embeddinga layer with expertshead"
        assert tab.run("document.querySelectorAll('#plot polyline').length") == 1
        assert tab.run("document.querySelectorAll('#rows tr').length") == listed


def test_histograms_show_the_counts_of_each_layer_on_one_axis(
    tmp_path: Path, browser: Page
) -> None:
    model = write_llama(tmp_path / "model", layers=3, dtype="float32")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = torch.linspace(0, 1, weights[name].numel()).reshape(weights[name].shape)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    target = tmp_path / "report.html"
    written(model, target, "--stats")
    with opened(target, browser) as tab:
        tab.run(
            "document.getElementById('kind').value = 'layers.*.mlp.up.weight'; document.getElementById('kind').onchange()"
        )
        labels = tab.run(
            "[...document.querySelectorAll('#histograms svg')].map(svg => svg.getAttribute('aria-label'))"
        )
        assert len(labels) == 3
        assert labels[1] == "histogram of layer 1, from 0 to 1, mean 0.5, deviation 0.2888"
        # The values of layer 1 are even: all of its bins are full, from its zero to the right edge.
        path = tab.run("document.querySelectorAll('#histograms path')[1].getAttribute('d')")
        heights = [float(tall) for tall in re.findall(r"h\S+v(\S+)z", path)]
        assert len(heights) == 32
        assert min(heights) > 0.9 * max(heights)
        assert tab.run("document.querySelectorAll('#rows .tiny').length") == len(weights)
        assert "layer 1" in tab.run("document.getElementById('histograms').textContent")


def test_a_phone_and_a_dark_screen_show_a_report_too(tmp_path: Path, browser: Page) -> None:
    target = tmp_path / "report.html"
    written(MIXTURE, target, "--stats")
    with opened(target, browser) as tab:
        tab.resize(*PHONE)
        tab.prefer("dark")
        assert fits(tab)
        for part in ("#title", "#map", "#layout", "#plot", "#histograms svg", "#search"):
            assert shown(tab, part), part
        dark = "getComputedStyle(document.body).backgroundColor"
        assert tab.run(dark) == "rgb(20, 23, 27)"
        tab.run("document.getElementById('theme').click()")
        assert tab.run(dark) == "rgb(255, 255, 255)"


def test_a_browser_shows_hostile_names_as_text(tmp_path: Path, browser: Page) -> None:
    name = "</script><script>window.taken=1</script><img src=x onerror=window.taken=1>.1.weight"
    save_file({name: torch.ones(4, 4)}, tmp_path / "x.safetensors")
    target = tmp_path / "report.html"
    written(tmp_path / "x.safetensors", target, "--stats")
    with opened(target, browser) as tab:
        assert tab.run("window.taken === undefined")
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert name in tab.run("document.getElementById('rows').textContent")


def test_a_browser_shows_an_unknown_model_too(tmp_path: Path, browser: Page) -> None:
    tensor = torch.zeros(4, 4, dtype=torch.uint8)
    save_file({"tower.3.strange.weight": tensor}, tmp_path / "x.safetensors")
    target = tmp_path / "report.html"
    written(tmp_path / "x.safetensors", target)
    with opened(target, browser) as tab:
        rows = tab.run("document.getElementById('rows').textContent")
        assert "tower.3.strange.weight" in rows
        assert "uint8" in rows


@pytest.fixture
def tuned(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and what it became: layer 1 has moved by half."""
    model = write_llama(tmp_path / "model", layers=3, dtype="float32")
    weights = load_file(model / "model.safetensors")
    other = shutil.copytree(model, tmp_path / "tuned")
    moved = {name: tensor * 1.5 if ".1." in name else tensor for name, tensor in weights.items()}
    save_file(moved, other / "model.safetensors", {"format": "pt"})
    return model, other


def test_diff_of_a_tuned_model_writes_an_html_page(
    tuned: tuple[Path, Path], tmp_path: Path
) -> None:
    outcome = run("diff", *tuned, "--html", tmp_path / "diff.html")
    assert (outcome.status, outcome.err, "|A-B|" in outcome.out, "diff.html: " in outcome.out) == (
        4,
        "",
        False,
        True,
    )
    text = (tmp_path / "diff.html").read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    layers = {layer["name"]: layer["stats"]["relative"] for layer in data["layers"]}
    assert layers["layers.1"] == pytest.approx(0.5)
    assert layers["layers.0"] == layers["layers.2"] == 0
    assert all(row["stats"]["elements"] == row["parameters"] for row in data["tensors"])
    (heat,) = data["maps"]
    assert heat["layers"] == [0, 1, 2]
    assert [row["name"] for row in heat["rows"] if row["module"] == "attn"] == ["q", "k", "v", "o"]
    for row in heat["rows"]:
        assert [cell["relative"] for cell in row["cells"]] == pytest.approx([0, 0.5, 0])
    modules = {each["name"]: each for each in data["modules"]}
    assert list(modules)[:3] == ["embed", "layers.*.input_norm", "layers.*.attn"]
    assert list(modules)[3:] == ["layers.*.mlp_norm", "layers.*.mlp", "final_norm", "head"]
    assert (modules["layers.*.attn"]["tensors"], modules["layers.*.attn"]["different"]) == (12, 4)
    assert modules["embed"]["different"] == 0
    assert_refused(
        run("diff", *tuned, "--html", tmp_path / "no" / "diff.html"), 2, "no such directory"
    )
    assert_refused(
        run("diff", *tuned, "--html", tmp_path / "diff.html", "--metadata"),
        2,
        "--metadata",
        "--html",
    )


def test_a_browser_maps_how_far_layers_have_moved(
    tuned: tuple[Path, Path], tmp_path: Path, browser: Page
) -> None:
    run("diff", *tuned, "--html", tmp_path / "diff.html")
    with opened(tmp_path / "diff.html", browser) as tab:
        assert "How far it has moved" in tab.run("document.getElementById('plot-part').textContent")
        assert tab.run("document.querySelectorAll('#plot polyline').length") == 1
        assert "layer 1: 0.5" in tab.run("document.getElementById('plot').textContent")
        cells = tab.run(
            "[...document.querySelectorAll('#heat tr')].filter(row => row.querySelector('td'))"
            ".map(row => [...row.children].map(cell => cell.className + cell.textContent))"
        )
        assert len(cells) == 9
        assert all(row[1:] == ["equalequal", "h80.5", "equalequal"] for row in cells), cells
        assert tab.run("document.querySelectorAll('#modules tbody').length") == 7
        assert not tab.run(
            "[...document.querySelectorAll('#modules td')].some(cell => cell.textContent.includes('attn.q') && cell.offsetHeight)"
        )
        tab.run("[...document.querySelectorAll('#modules button')][2].click()")
        assert tab.run(
            "[...document.querySelectorAll('#modules td')].some(cell => cell.textContent.includes('attn.q') && cell.offsetHeight)"
        )
        tab.resize(*PHONE)
        assert fits(tab)
        assert shown(tab, "#heat")


def test_tensors_of_one_side_alone_are_counted_in_their_module(
    tmp_path: Path, browser: Page
) -> None:
    plain = write_llama(tmp_path / "plain", layers=2, dtype="float32")
    biased = write_llama(tmp_path / "biased", layers=2, dtype="float32", extra_config={"attention_bias": True})  # fmt: skip
    run("diff", plain, biased, "--html", tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    (attention,) = [each for each in data["modules"] if each["name"] == "layers.*.attn"]
    assert (attention["only_a"], attention["only_b"], attention["tensors"]) == (0, 8, 16)
    (bias,) = [each for each in attention["kinds"] if each["name"] == "layers.*.attn.q.bias"]
    assert bias["notes"][0].startswith("layers.0.attn.q.bias: only in B")
    with opened(tmp_path / "diff.html", browser):
        pass
