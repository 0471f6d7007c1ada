"""The Python interface, and loaders and savers that another package brings."""

import gc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv import registry
from megaconv.errors import CheckpointError, TargetExists, UsageError
from megaconv.model.fields import fields_of
from megaconv.model.layout import LayerSplit
from megaconv.options import AdapterChoice, ConvertOptions, LoadOptions, SaveOptions
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run

OPEN_FILES = Path("/proc/self/fd")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "hf", dtype="float32")


@pytest.fixture(scope="module")
def core(hf: Path) -> Path:
    megaconv.convert(hf, hf.parent / "core", saver="core", tp=2, pp=2)
    return hf.parent / "core"


# What the package's own docstring shows.


def test_convert_reports_what_it_did(hf: Path, tmp_path: Path) -> None:
    report = megaconv.convert(
        str(hf), str(tmp_path / "ckpt"), saver="core", tp=2, pp=2, verify=True
    )
    assert report.fingerprint is not None
    assert (report.target, report.verified, report.fingerprint) == (
        tmp_path / "ckpt",
        True,
        megaconv.fingerprint(hf),
    )
    assert report.header.parameters == sum(
        tensor.numel() for tensor in load_file(hf / "model.safetensors").values()
    )
    assert report.to_json()["files"].keys() == {
        str(path.relative_to(tmp_path / "ckpt"))
        for path in (tmp_path / "ckpt").rglob("*")
        if path.is_file()
    }


def test_a_dry_run_reports_what_the_command_prints_and_writes_nothing(
    hf: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ckpt"
    told: list[tuple[int, int]] = []
    planned = megaconv.convert(
        hf,
        out,
        saver="core",
        tp=2,
        dry_run=True,
        verify=True,
        progress=lambda *how_far: told.append(how_far),
    )
    printed = run("convert", hf, out, "--saver", "core", "--tp", 2, "--dry-run", "--json")
    assert planned.to_json() == json.loads(printed.out)
    assert (planned.fingerprint, told, list(tmp_path.iterdir())) == (None, [], [])
    assert megaconv.convert(hf, out, saver="core", tp=2).files == planned.files
    with pytest.raises(TargetExists):
        megaconv.convert(hf, out, saver="core", tp=2, dry_run=True)
    with pytest.raises(CheckpointError, match="8"):
        megaconv.convert(hf, tmp_path / "other", saver="core", tp=3, dry_run=True)


def test_open_gives_configuration_layout_and_whole_tensors(hf: Path, core: Path) -> None:
    checkpoint, wanted = megaconv.open(core), load_file(hf / "model.safetensors")
    assert (checkpoint.layout.tp, checkpoint.layout.pp, checkpoint.config.attention.kv_heads) == (
        2,
        2,
        4,
    )
    assert len(checkpoint.tensors) == len(wanted)
    assert checkpoint.tensors["layers.3.mlp.down.weight"].shape == (32, 56)
    for ours, theirs in {
        "embed.weight": "model.embed_tokens.weight",
        "layers.0.attn.q.weight": "model.layers.0.self_attn.q_proj.weight",
        "layers.2.attn.v.weight": "model.layers.2.self_attn.v_proj.weight",
        "layers.3.mlp.up.weight": "model.layers.3.mlp.up_proj.weight",
        "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }.items():
        assert torch.equal(checkpoint.load(ours), wanted[theirs]), ours


def test_open_says_that_hugging_face_is_not_sharded(hf: Path) -> None:
    checkpoint = megaconv.open(hf)
    assert checkpoint.header.layout is None
    assert (checkpoint.layout.tp, checkpoint.layout.pp, checkpoint.layout.stage_layers) == (
        1,
        1,
        (4,),
    )


def test_a_tensor_that_the_model_has_not_is_a_key_error(hf: Path) -> None:
    with pytest.raises(KeyError, match=r"layers\.9\.attn\.q\.weight"):
        megaconv.open(hf).load("layers.9.attn.q.weight")
    with pytest.raises(KeyError, match=r"did you mean layers\.0\.attn\.q\.weight\?"):
        megaconv.open(hf).load("layers.0.attn.qq.weight")


def test_every_dtype_is_loaded_as_torch_has_it(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        model = write_llama(tmp_path / dtype, layers=1, dtype=dtype)
        loaded = megaconv.open(model).load("head.weight")
        assert loaded.dtype == getattr(torch, dtype)
        assert torch.equal(loaded, load_file(model / "model.safetensors")["lm_head.weight"])


def test_diff_compares_formats_and_tells_tensors(hf: Path, core: Path, tmp_path: Path) -> None:
    assert megaconv.diff(hf, core).same
    other = write_llama(tmp_path / "other", dtype="float32", seed=1)
    found = megaconv.diff(core, other)
    assert not found.same
    assert {item.kind for item in found.differences} == {"values"}
    assert len(found.differences) == found.tensors == 39


def test_fingerprints_are_of_the_model_and_not_of_its_files(
    hf: Path, core: Path, tmp_path: Path
) -> None:
    found = megaconv.fingerprint(str(core))
    assert found == megaconv.fingerprint(hf)
    assert found.optimizer is None
    assert (
        found.weights
        != megaconv.fingerprint(write_llama(tmp_path / "other", dtype="float32", seed=1)).weights
    )


def test_inspect_reads_metadata(core: Path) -> None:
    found = megaconv.inspect(core)
    assert (found.loader, found.header.config.family) == ("core", "llama")
    assert found.to_json()["layout"] == {
        "tp": 2,
        "pp": 2,
        "vpp": 1,
        "ep": 1,
        "etp": 1,
        "stage_layers": [2, 2],
    }


def test_the_version_is_a_string() -> None:
    assert megaconv.__version__[0].isdecimal()


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'megaconv' has no attribute 'nonsense'"):
        _ = megaconv.nonsense


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys, megaconv; print(sorted({'numpy', 'torch', 'typer', 'blake3'} & set(sys.modules)))"
    root = str(Path(__file__).parents[2])
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True
    )
    assert found.stdout == "[]\n"


def test_detecting_a_megatron_run_imports_no_other_loader_and_no_adapters() -> None:
    unused = "{'loaders.hf', 'megaconv.values.quantized', 'megaconv.megatron.distributed.adapter_source'}"
    run = FIXTURES / "dist-llama-tp2pp2"
    program = "import sys; from megaconv.registry import detect; from pathlib import Path; "
    program += f"detect(Path({str(run)!r})); print({unused} & set(sys.modules))"
    root = str(Path(__file__).parents[2])
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True
    )
    assert found.stdout == "set()\n"


def test_detecting_a_format_imports_no_arithmetic_of_other_formats(hf: Path) -> None:
    """The modules that quantize and merge took a tenth of the time of a short command."""
    unused = "{'megaconv.values.quantizing', 'megaconv.adapters.merging'}"
    program = "import sys; from megaconv.registry import detect; from pathlib import Path; "
    program += f"detect(Path({str(hf)!r})); print({unused} & set(sys.modules))"
    root = str(Path(__file__).parents[2])
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True
    )
    assert found.stdout == "set()\n"


def test_dir_lists_the_public_names() -> None:
    assert dir(megaconv) == sorted(megaconv.__all__)
    assert {"convert", "merge", "open", "plan", "push", "scan", "errors"} <= set(dir(megaconv))
    assert (Path(megaconv.__file__).parent / "py.typed").is_file()


def test_every_package_that_plugins_import_has_its_types_read() -> None:
    """Otherwise mypy takes Objective and LazyTensor for Any."""
    root = Path(megaconv.__file__).parents[1]
    for package in ("formats", "loaders", "savers", "megaconv", "megatron_lite"):
        assert (root / package / "py.typed").is_file(), package


def test_a_checkpoint_shows_itself(core: Path) -> None:
    checkpoint = megaconv.open(core)
    assert re.fullmatch(
        r"<Checkpoint: llama, [\d,]+ parameters in 39 tensors, .* KiB, core, .*, TP 2, PP 2>",
        repr(checkpoint),
    )
    shown = checkpoint._repr_html_()
    assert shown.startswith("<table><tr><th>format</th>")
    assert "<script" not in shown


def test_progress_is_reported_in_bytes(hf: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    megaconv.convert(
        hf, tmp_path / "out", saver="core", progress=lambda done, total: told.append((done, total))
    )
    total = megaconv.open(hf).header.nbytes
    assert told == sorted(told)
    assert told[-1] == (total, total)


# Options.


def test_options_are_spelled_as_on_the_command_line(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(
        hf,
        tmp_path / "core",
        saver="core",
        pp=2,
        layer_split="1,3",
        make_vocab_size_divisible_by=8,
        max_memory="1MiB",
    )
    checkpoint = megaconv.open(tmp_path / "core")
    assert (checkpoint.layout.stage_layers, checkpoint.header.padded_vocab) == ((1, 3), 136)
    megaconv.convert(hf, tmp_path / "hf", saver="hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    with pytest.raises(UsageError, match="is not a size"):
        megaconv.convert(hf, tmp_path / "more", saver="hf", max_memory="plenty")


def test_layer_split_dtype_and_further_options_reach_the_output(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(
        hf, tmp_path / "core", saver="mcore", loader="llama_mistral", pp=2, vpp=2, layer_split=(1, 0, 2, 1),
        dtype="bf16", transformer_impl="local", make_vocab_size_divisible_by=8, release=True, max_memory=1 << 20, workers=1,
    )  # fmt: skip
    checkpoint = megaconv.open(tmp_path / "core")
    assert checkpoint.layout.stage_layers == (1, 0, 2, 1)
    assert (checkpoint.config.dtype, checkpoint.header.padded_vocab) == ("bfloat16", 136)
    assert checkpoint.header.training.release
    assert "local names" in checkpoint.header.source


def test_shards_have_the_size_asked_for(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(hf, tmp_path / "out", saver="hf", max_shard_size=30_000)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 35_000 for path in shards)


def test_a_configuration_completes_a_source_that_has_none(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", extra_config={"eos_token_id": [2, 7]})
    (hf / "tokenizer.json").write_text("{}")
    megaconv.convert(hf, tmp_path / "core", saver="core", tp=2)
    shutil.rmtree(tmp_path / "core" / "hf")
    megaconv.convert(tmp_path / "core", tmp_path / "poor", saver="hf")
    megaconv.convert(tmp_path / "core", tmp_path / "rich", saver="hf", config=hf)
    assert not (tmp_path / "poor" / "tokenizer.json").exists()
    assert (tmp_path / "rich" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "rich" / "config.json").read_text()) == json.loads(
        (hf / "config.json").read_text()
    )


def test_an_existing_output_is_replaced_only_on_demand(hf: Path, tmp_path: Path) -> None:
    out = write_llama(tmp_path / "out", dtype="float32", seed=1)
    with pytest.raises(TargetExists, match="already exists"):
        megaconv.convert(hf, out, saver="hf")
    megaconv.convert(hf, out, saver="hf", overwrite=True)
    assert megaconv.diff(hf, out).same


def test_an_unknown_option_is_a_type_error(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        megaconv.convert(hf, tmp_path / "out", saver="hf", nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"convert\(\) has no option 'tpp'; did you mean 'tp'\?"):
        megaconv.convert(hf, tmp_path / "out", saver="core", tpp=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"plan\(\) has no option 'gpu'; did you mean 'gpus'\?"):
        megaconv.plan(hf, gpu=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: megaconv.open(None), r"open\(path=None\): expected str \| Path, found NoneType"),
        (
            lambda: megaconv.convert("a", "b", saver="core", tp="2"),
            r"tp='2'\): expected int \| None, found str",
        ),
        (
            lambda: megaconv.convert("a", "b", saver="core", moe_grouped_gemm="x"),
            r"expected bool, found str",
        ),
        (
            lambda: megaconv.convert("a", "b", saver="hf", adapters="lora"),
            r"expected Sequence\[str \| Path\], found str",
        ),
        (
            lambda: megaconv.convert("a", "b", saver="hf", adapters=[2]),
            r"expected Sequence\[str \| Path\], found list",
        ),
        (
            lambda: megaconv.push("a", "b/c", include=["*.json", 2]),
            r"expected Sequence\[str\], found list",
        ),
        (
            lambda: megaconv.convert("a", "b"),
            r"convert\(\): missing a required (keyword-only )?argument: 'saver'",
        ),
        (lambda: megaconv.diff("a", "b", tolerance=True), r"expected float, found bool"),
        (
            lambda: megaconv.convert("a", "b", saver="mlx", options={"bits": 4}),
            r"expected Mapping\[str, str\] \| None, found dict",
        ),
        (
            lambda: megaconv.convert("a", "b", saver="core", pp=2, layer_split=[1, 2.5]),
            r"layer_split holds 2\.5: expected int, found float",
        ),
    ],
)
def test_an_argument_of_another_type_is_named_with_what_was_expected(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_numbers_of_numpy_are_numbers(hf: Path, core: Path) -> None:
    assert megaconv.diff(hf, core, tolerance=np.float32(0.5)).same
    assert megaconv.plan(hf, gpus=np.int64(2)).possible


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (
            {"tp": np.int64(2), "pp": np.int32(2), "make_vocab_size_divisible_by": np.int64(8)},
            (2, 2, (2, 2)),
        ),
        ({"pp": np.uint8(2), "layer_split": np.array([1, 3])}, (1, 2, (1, 3))),
        (
            {
                "make_vocab_size_divisible_by": np.int64(4),
                "workers": np.int64(1),
                "max_memory": np.int64(1 << 20),
            },
            (1, 1, (4,)),
        ),
    ],
)
def test_sizes_of_numpy_are_written_as_numbers(
    hf: Path, tmp_path: Path, options: dict[str, Any], sizes: tuple[Any, ...]
) -> None:
    megaconv.convert(hf, tmp_path / "out", saver="core", **options)
    layout = megaconv.open(tmp_path / "out").layout
    assert layout is not None
    assert (layout.tp, layout.pp, layout.stage_layers) == sizes


OUT_OF_RANGE = [
    *(({name: value}, rf"--{name} {value}: expected 1 or more") for name in ("tp", "pp", "vpp", "ep", "etp") for value in (0, -1)),
    ({"make_vocab_size_divisible_by": -128}, "--make-vocab-size-divisible-by -128: expected 1 to 268,435,456"),
    ({"make_vocab_size_divisible_by": 0}, "--make-vocab-size-divisible-by 0: expected 1 to 268,435,456"),
    ({"make_vocab_size_divisible_by": 1 << 62}, "expected 1 to 268,435,456"),
    ({"ckpt_format": "torch_dist", "dist_files": -1}, "--dist-files -1: expected 1 to 65,536"),
    ({"ckpt_format": "torch_dist", "dist_files": 0}, "--dist-files 0: expected 1 to 65,536"),
    ({"workers": -1}, "--workers -1: expected 0 to 1,024"),
    ({"workers": 1025}, "--workers 1025: expected 0 to 1,024"),
    ({"max_memory": -5}, "--max-memory -5: expected 1 byte or more"),
    ({"max_shard_size": 0}, "--max-shard-size 0: expected 1 byte or more"),
    ({"true_vocab_size": 0}, "--true-vocab-size 0: expected 1 or more"),
    ({"pp": 2, "split_rank": 0}, "--pipeline-model-parallel-split-rank 0: expected 1 or more"),
    ({"pp": 2, "decoder_last_pipeline_num_layers": -1}, "--decoder-last-pipeline-num-layers -1: expected 0 or more"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"), OUT_OF_RANGE, ids=[words for _, words in OUT_OF_RANGE]
)
def test_a_number_that_no_option_can_be_is_refused(
    hf: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        megaconv.convert(hf, tmp_path / "out", saver="core", **options)
    assert not list(tmp_path.iterdir())


def test_nothing_to_merge_or_to_apply_is_refused(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected one adapter or more"):
        megaconv.merge(hf, [], tmp_path / "out")
    with pytest.raises(UsageError, match="expected one patch or more"):
        megaconv.apply(hf, [], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_patch_may_be_a_path(hf: Path, tmp_path: Path) -> None:
    megaconv.delta(hf, hf, tmp_path / "patch")
    for number, patches in enumerate([tmp_path / "patch", [tmp_path / "patch"]]):
        report = megaconv.apply(hf, patches, tmp_path / str(number))
        assert report.fingerprint == megaconv.fingerprint(hf)
    with pytest.raises(CheckpointError, match="no such file or directory") as caught:
        megaconv.apply(hf, tmp_path / "nothing", tmp_path / "out")
    assert caught.value.code == "no-such-input"


def test_a_plan_of_a_count_out_of_range_is_refused(hf: Path) -> None:
    for count in (0, 10**10):
        with pytest.raises(UsageError, match=f"seq_length={count}: expected 1 to 1,000,000,000"):
            megaconv.plan_training(hf, gpus=8, seq_length=count)


@pytest.mark.parametrize("value", [-1, 1025])
def test_threads_that_there_can_not_be_are_refused_everywhere(
    hf: Path, core: Path, value: int
) -> None:
    for call in (
        lambda: megaconv.fingerprint(hf, workers=value),
        lambda: megaconv.verify(core, workers=value),
        lambda: megaconv.diff(hf, core, workers=value),
        lambda: ConvertOptions(workers=value),
    ):
        with pytest.raises(UsageError, match=f"--workers {value}: expected 0 to 1,024"):
            call()


def test_ranges_hold_for_options_that_are_made_by_hand() -> None:
    for make in (
        lambda: SaveOptions(tp=0),
        lambda: SaveOptions(split=LayerSplit(first=-2)),
        lambda: SaveOptions(files=1 << 17),
        lambda: LoadOptions(true_vocab_size=-3),
    ):
        with pytest.raises(UsageError, match="expected"):
            make()


def test_numpy_and_words_become_plain_values_in_options_that_are_made_by_hand() -> None:
    split = LayerSplit(layers=np.array([1, 3]), first=np.int64(1))  # type: ignore[arg-type]
    save = SaveOptions(tp=np.int64(2), max_shard_bytes="30KB", split=split)  # type: ignore[arg-type]
    assert (type(save.tp), save.max_shard_bytes) == (int, 30_000)
    assert (save.split.layers, type(save.split.first)) == ((1, 3), int)
    asked = ConvertOptions(max_memory="1MiB", adapters=("lora:0.5",), extra=("a=b",))  # type: ignore[arg-type]
    assert (asked.max_memory, asked.adapters, asked.extra) == (
        1 << 20,
        (AdapterChoice("lora", 0.5),),
        {"a": "b"},
    )


def test_megatrons_rules_for_uneven_stages_are_parameters(hf: Path, tmp_path: Path) -> None:
    megaconv.convert(hf, tmp_path / "out", saver="core", pp=2, decoder_first_pipeline_num_layers=1)
    layout = megaconv.open(tmp_path / "out").layout
    assert layout is not None
    assert layout.stage_layers == (1, 3)


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("files", "dist_files"),
        ("vocab_divisor", "make_vocab_size_divisible_by"),
        ("grouped_experts", "moe_grouped_gemm"),
    ],
)
def test_a_field_that_is_no_option_is_refused_with_the_options_name(
    field: str, option: str
) -> None:
    with pytest.raises(
        TypeError, match=rf"convert\(\) has no option {field!r}; did you mean {option!r}\?"
    ):
        megaconv.convert("a", "b", saver="core", **{field: 2})


def test_results_show_themselves_in_one_line(hf: Path, core: Path, tmp_path: Path) -> None:
    report = megaconv.convert(hf, tmp_path / "out", saver="core")
    for result in (report, megaconv.inspect(core), megaconv.plan(hf), megaconv.verify(core), megaconv.diff(hf, core),
                   megaconv.scan(core), megaconv.push(hf, "org/name", dry_run=True), megaconv.fingerprint(hf)):  # fmt: skip
        assert re.fullmatch(r"[^\n]{20,400}", repr(result)), repr(result)


def test_errors_have_one_class_in_common(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        megaconv.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is an empty directory"):
        megaconv.inspect(tmp_path)


@pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="needs Linux's list of open files")
def test_files_are_closed_after_their_last_use(hf: Path, core: Path, tmp_path: Path) -> None:
    gc.collect()
    before = len(list(OPEN_FILES.iterdir()))
    for number in range(5):
        megaconv.convert(core, tmp_path / f"out-{number}", saver="core", tp=4)
        megaconv.fingerprint(core)
        megaconv.open(hf).load("embed.weight")
        assert megaconv.diff(hf, core).same
    gc.collect()
    assert len(list(OPEN_FILES.iterdir())) <= before


# Loaders and savers of another package.

PLUGIN = '''
"""A loader that hands over plain arrays and tensors, and a saver that writes canonical names."""

import json

import numpy as np
import torch

from formats.safetensors import SafetensorsLayout
from formats.tensor import Box, matrix_shape
from megaconv.model.fields import from_fields
from megaconv.model.ir import Header, Key, TensorInfo
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.loader import Loader
from megaconv.model.natives import Region
from megaconv.saver import Saver


def detect(path):
    return path.suffix == ".npz"


def open(path, options):
    return Source(path)


class Source:
    def __init__(self, path):
        self.arrays = dict(np.load(path))
        config = from_fields(**json.loads(str(self.arrays.pop("config"))))
        manifest = {Key(name): TensorInfo(array.shape, str(array.dtype)) for name, array in self.arrays.items()}
        self.header = Header(config, manifest, source="npz")

    def tensors(self):
        for index, (name, array) in enumerate(self.arrays.items()):
            if name == FAIL_AT:
                raise OSError("the plugin fails")
            yield Key(name), torch.from_numpy(array) if index % 2 else array


FAIL_AT = None


def plan(header, options):
    layout = SafetensorsLayout({key.name: tuple(info) for key, info in header.manifest.items()})
    places = {}
    for key, info in header.manifest.items():
        rows, cols = matrix_shape(info.shape)
        region = Region(Box(0, rows, 0, cols), 0)
        places[key] = [Placement("canonical.safetensors", key.name, layout.records[key.name].nbytes // rows, [region])]
    return OutputPlan({"canonical.safetensors": layout}, places)


LOADER = Loader(name="npz", description="all tensors in one npz file", detect=detect, open=open)
SAVER = Saver(name="canonical", description="canonical names in one safetensors file", plan=plan)
'''


@pytest.fixture
def npz(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model in the plugin's format; the plugin is installed as pip would do it."""
    site = tmp_path / "site-packages"
    information = site / "npz_plugin-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "npz_plugin.py").write_text(PLUGIN)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: npz-plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[megaconv.loaders]\nnpz = npz_plugin\n\n[megaconv.savers]\ncanonical = npz_plugin\n"
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "npz_plugin", raising=False)
    checkpoint = megaconv.open(hf)
    config = {"family": checkpoint.config.family, "values": fields_of(checkpoint.config)}
    arrays: dict[str, Any] = {name: checkpoint.load(name).numpy() for name in checkpoint.tensors}
    np.savez(tmp_path / "model.npz", **arrays, config=np.array(json.dumps(config)))
    return tmp_path / "model.npz"


def test_plugins_are_listed_after_our_own(npz: Path) -> None:
    assert list(registry.all_loaders()) == [*registry.LOADERS, "npz"]
    assert list(registry.all_savers()) == [*registry.SAVERS, "canonical"]
    assert "npz           all tensors in one npz file" in run("formats").out
    with pytest.raises(UsageError, match=r"no loader is called 'zip'; known: .*, npz"):
        registry.loader("zip")


def test_a_plugins_plain_tensors_are_converted(npz: Path, hf: Path, tmp_path: Path) -> None:
    report = megaconv.convert(
        npz,
        tmp_path / "core",
        saver="core",
        tp=2,
        pp=2,
        max_memory=16 << 10,
        workers=2,
        verify=True,
    )
    assert report.fingerprint == megaconv.fingerprint(hf)
    megaconv.convert(npz, tmp_path / "again", saver="hf", loader="npz")
    assert megaconv.diff(tmp_path / "again", hf).same


def test_a_plugins_plain_tensors_have_fingerprints(npz: Path, hf: Path) -> None:
    assert megaconv.fingerprint(npz) == megaconv.fingerprint(hf)


def test_a_plugins_plain_tensors_are_compared(npz: Path, hf: Path) -> None:
    assert megaconv.diff(npz, hf).same
    assert megaconv.diff(hf, npz).same


def test_a_plugins_plain_tensors_are_opened(npz: Path, hf: Path) -> None:
    ours, theirs = megaconv.open(npz), megaconv.open(hf)
    assert list(ours.tensors) == list(theirs.tensors)
    for name in ours.tensors:
        assert torch.equal(ours.load(name), theirs.load(name)), name


def test_a_plugins_plain_tensors_are_cast(npz: Path, hf: Path, tmp_path: Path) -> None:
    megaconv.convert(npz, tmp_path / "ours", saver="hf", dtype="bf16")
    megaconv.convert(hf, tmp_path / "theirs", saver="hf", dtype="bf16")
    assert megaconv.diff(tmp_path / "ours", tmp_path / "theirs").same


def test_a_plugins_checkpoint_is_inspected(npz: Path) -> None:
    found = megaconv.inspect(npz)
    assert (found.loader, found.header.source) == ("npz", "npz")


def test_a_plugins_saver_writes_its_own_format(npz: Path, core: Path, tmp_path: Path) -> None:
    megaconv.convert(core, tmp_path / "out", saver="canonical")
    written, wanted = load_file(tmp_path / "out" / "canonical.safetensors"), megaconv.open(core)
    assert written.keys() == wanted.tensors.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, wanted.load(name)), name


def test_a_plugin_that_fails_leaves_no_output_and_its_own_error(npz: Path, tmp_path: Path) -> None:
    registry.loader("npz")
    sys.modules["npz_plugin"].FAIL_AT = "layers.2.attn.q.weight"  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="the plugin fails"):
        megaconv.convert(npz, tmp_path / "out", saver="core")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.npz", "site-packages"]


def test_real_checkpoints_are_still_found_with_plugins_around(npz: Path) -> None:
    assert megaconv.inspect(FIXTURES / "core-llama-tp2pp2" / "checkpoint").loader == "core"
