"""Meta's original files and Mistral's: read, written, and the same model by logits in Meta's own way to compute them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megaconv.engine.conversion import convert, fingerprint
from megaconv.engine.opening import open_source
from megaconv.errors import CheckpointError
from megaconv.families.parts.meta_params import (
    ffn_width,
    read_params,
    require_read,
    write_params,
)
from megaconv.input import find_input
from megaconv.model.fields import changed
from megaconv.options import ConvertOptions, LoadOptions, SaveOptions
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run, unchanged

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Args:
    """Meta's ModelArgs, as far as they matter here."""

    dim: int = 64
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 4
    vocab: int = 136
    ffn: int = 96
    rope_theta: float = 10000.0
    scaled: bool = False
    columns: bool = True
    """True if shards cut the embedding by columns, as in Llama 1 and 2."""
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def params(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "dim": self.dim, "n_layers": self.n_layers, "n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads,
            "multiple_of": 32, "norm_eps": self.norm_eps, "vocab_size": -1,
        }  # fmt: skip
        if not self.columns:
            found |= {
                "vocab_size": self.vocab,
                "rope_theta": self.rope_theta,
                "ffn_dim_multiplier": 0.5,
            }
        return found | ({"use_scaled_rope": True} if self.scaled else {})


LLAMA2 = Args()
LLAMA3 = Args(rope_theta=500000.0, columns=False)
LLAMA31 = Args(rope_theta=500000.0, columns=False, scaled=True)


def whole_model(args: Args, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensors:
    """All weights by Meta's names, uncut."""
    generator = torch.Generator().manual_seed(seed)
    kv = args.n_kv_heads * args.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (args.vocab, args.dim),
        "norm.weight": (args.dim,),
    }
    for layer in range(args.n_layers):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "attention.wq": (args.dim, args.dim), "attention.wk": (kv, args.dim), "attention.wv": (kv, args.dim),
                "attention.wo": (args.dim, args.dim), "feed_forward.w1": (args.ffn, args.dim),
                "feed_forward.w2": (args.dim, args.ffn), "feed_forward.w3": (args.ffn, args.dim),
                "attention_norm": (args.dim,), "ffn_norm": (args.dim,),
            }.items()
        }  # fmt: skip
    shapes["output.weight"] = (args.vocab, args.dim)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2).to(dtype)
        for name, shape in shapes.items()
    }


def cut(name: str, tensor: torch.Tensor, rank: int, count: int, columns: bool) -> torch.Tensor:
    """A rank's part of a tensor, by the class of its layer in Meta's model.py."""
    if "norm" in name:
        return tensor
    by_columns = name.endswith(("wo.weight", "w2.weight")) or (
        columns and name.startswith("tok_embeddings")
    )
    return tensor.chunk(count, dim=int(by_columns))[rank].clone()


def write_meta(
    path: Path, args: Args, *, shards: int = 1, legacy: bool = False, model: Tensors | None = None
) -> Path:
    """legacy: as torch saved before 1.6."""
    model = model or whole_model(args)
    path.mkdir(parents=True)
    (path / "params.json").write_text(json.dumps(args.params()))
    (path / "tokenizer.model").write_bytes(b"a tokenizer")
    for rank in range(shards):
        shard = {
            name: cut(name, tensor, rank, shards, args.columns) for name, tensor in model.items()
        }
        shard["rope.freqs"] = torch.ones(args.head_dim // 2)
        shard["layers.0.attention.inner_attention.rope.freqs"] = torch.ones(args.head_dim // 2)
        torch.save(
            shard, path / f"consolidated.{rank:02d}.pth", _use_new_zipfile_serialization=not legacy
        )
    return path


def read_meta(path: Path) -> list[Tensors]:
    """The shards of a directory as torch loads them when it executes nothing."""
    return [torch.load(file, weights_only=True) for file in sorted(path.glob("consolidated.*.pth"))]


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def to(
    saver: str,
    source: Path,
    target: Path,
    *,
    loader: str | None = None,
    config: Path | None = None,
    **save: Any,
) -> Path:
    options = ConvertOptions(
        loader=loader, load=LoadOptions(config=config), save=SaveOptions(**save), verify=True
    )
    convert(source, target, saver, options)
    return target


# Logits by a straightforward reading of Meta's model.py.


def frequencies(args: Args, length: int) -> torch.Tensor:
    """[length, head_dim / 2] of complex numbers: precompute_freqs_cis, with Llama 3.1's apply_scaling."""
    freqs = 1.0 / args.rope_theta ** (torch.arange(0, args.head_dim, 2).double() / args.head_dim)
    if args.scaled:
        factor, low, high, before = 8, 1, 4, 8192
        scaled = []
        for freq in freqs.tolist():
            wavelength = 2 * torch.pi / freq
            if wavelength < before / high:
                scaled.append(freq)
            elif wavelength > before / low:
                scaled.append(freq / factor)
            else:
                smooth = (before / wavelength - low) / (high - low)
                scaled.append((1 - smooth) * freq / factor + smooth * freq)
        freqs = torch.tensor(scaled, dtype=torch.float64)
    angles = torch.outer(torch.arange(length).double(), freqs).float()
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """apply_rotary_emb for x [length, heads, head_dim]: neighbours are real and imaginary part of one number."""
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * freqs[:, None]).flatten(2)


def meta_logits(args: Args, model: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    weights = {name: tensor.float() for name, tensor in model.items()}
    length = len(tokens)
    freqs, mask = frequencies(args, length), torch.full((length, length), float("-inf")).triu(1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + args.norm_eps) * weights[name]

    h = weights["tok_embeddings.weight"][tokens]
    for layer in range(args.n_layers):
        w = {
            name.split(".", 2)[2]: t
            for name, t in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x = norm(h, f"layers.{layer}.attention_norm.weight")
        q = rotate((x @ w["attention.wq.weight"].T).view(length, args.n_heads, -1), freqs)
        k = rotate((x @ w["attention.wk.weight"].T).view(length, args.n_kv_heads, -1), freqs)
        v = (x @ w["attention.wv.weight"].T).view(length, args.n_kv_heads, -1)
        k, v = (t.repeat_interleave(args.n_heads // args.n_kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / args.head_dim**0.5 + mask
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        h = h + attended @ w["attention.wo.weight"].T
        x = norm(h, f"layers.{layer}.ffn_norm.weight")
        gate = nn.functional.silu(x @ w["feed_forward.w1.weight"].T)
        h = h + (gate * (x @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    return norm(h, "norm.weight") @ weights["output.weight"].T


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("args", "shards"), [(LLAMA2, 2), (LLAMA3, 2), (LLAMA31, 1), (Args(n_kv_heads=8, ffn=192), 4)]
)
def test_transformers_computes_from_our_output_what_metas_code_computes(
    args: Args, shards: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = whole_model(args, torch.float32)
    hf = to("hf", write_meta(tmp_path / "meta", args, shards=shards, model=model), tmp_path / "hf")
    tokens = torch.randint(0, args.vocab, (48,), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        found = theirs(tokens[None]).logits[0]
    expected = meta_logits(args, model, tokens)
    assert expected.std() > 0.1  # otherwise any logits would be close
    assert (found - expected).abs().max() <= 1e-4


# Round trips.


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("args", [LLAMA2, LLAMA3, LLAMA31], ids=["llama 2", "llama 3", "llama 3.1"])
def test_a_round_trip_over_hugging_face_gives_the_same_files(
    args: Args, shards: int, legacy: bool, tmp_path: Path
) -> None:
    meta = write_meta(tmp_path / "meta", args, shards=shards, legacy=legacy)
    hf = to("hf", meta, tmp_path / "hf")
    back = to("llama_mistral", hf, tmp_path / "back", tp=shards)
    assert fingerprint(hf).weights == fingerprint(meta).weights == fingerprint(back).weights
    wanted = read_meta(meta)
    for found, expected in zip(read_meta(back), wanted, strict=True):
        assert_equal(
            found, {name: tensor for name, tensor in expected.items() if "freqs" not in name}
        )
    assert (
        (hf / "tokenizer.model").read_bytes()
        == (back / "tokenizer.model").read_bytes()
        == b"a tokenizer"
    )


@pytest.mark.parametrize("args", [LLAMA2, LLAMA31], ids=["llama 2", "llama 3.1"])
def test_a_round_trip_over_megatron_gives_the_same_files(args: Args, tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", args, shards=2)
    core = to("core", meta, tmp_path / "core", tp=2, pp=2)
    back = to("llama_mistral", core, tmp_path / "back", tp=2)
    assert fingerprint(core).weights == fingerprint(meta).weights == fingerprint(back).weights
    for found, expected in zip(read_meta(back), read_meta(meta), strict=True):
        assert_equal(
            found, {name: tensor for name, tensor in expected.items() if "freqs" not in name}
        )
    before, after = (open_source(find_input(path)).header.config for path in (meta, back))
    assert before == after


def test_blocks_that_split_heads_make_no_difference(tmp_path: Path) -> None:
    args = Args(dim=192, n_heads=4, n_kv_heads=2, vocab=100)
    meta = write_meta(tmp_path / "meta", args, shards=2)
    for name, memory in (("small", 4 * 4096), ("large", 1 << 28)):
        for saver, source, target in (
            ("hf", meta, "hf"),
            ("llama_mistral", tmp_path / f"{name}-hf", "meta"),
        ):
            shards = SaveOptions(tp=2) if saver == "llama_mistral" else SaveOptions()
            options = ConvertOptions(max_memory=memory, workers=1, save=shards)
            convert(source, tmp_path / f"{name}-{target}", saver, options)
    assert_equal(
        load_file(tmp_path / "small-hf/model.safetensors"),
        load_file(tmp_path / "large-hf/model.safetensors"),
    )
    for found, expected in zip(read_meta(tmp_path / "small-meta"), read_meta(meta), strict=True):
        assert_equal(
            found, {name: tensor for name, tensor in expected.items() if "freqs" not in name}
        )


def test_the_rows_of_q_and_k_are_interleaved_and_those_of_v_are_not(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", layers=1)
    theirs = load_file(hf / "model.safetensors")
    (ours,) = read_meta(to("llama_mistral", hf, tmp_path / "meta"))
    prefix, head_dim = "model.layers.0.self_attn.", 4
    for word, heads in (("q", 8), ("k", 4)):
        rows = theirs[f"{prefix}{word}_proj.weight"].view(heads, 2, head_dim // 2, 32)
        assert torch.equal(
            ours[f"layers.0.attention.w{word}.weight"], rows.transpose(1, 2).reshape(-1, 32)
        )
    assert torch.equal(ours["layers.0.attention.wv.weight"], theirs[f"{prefix}v_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_views_into_one_large_storage_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """Meta's shards were saved so: many tensors lie in one storage."""
    model = whole_model(LLAMA2, dtype)
    storage = torch.cat([tensor.flatten() for tensor in model.values()])
    views = dict(
        zip(model, storage.split([tensor.numel() for tensor in model.values()]), strict=True)
    )
    views = {name: view.view(model[name].shape) for name, view in views.items()}
    meta = write_meta(tmp_path / "meta", LLAMA2)
    torch.save(views, meta / "consolidated.00.pth")
    (found,) = read_meta(to("llama_mistral", meta, tmp_path / "out"))
    assert_equal(found, model)


def test_a_tied_head_is_stored_twice_and_known_again(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", tied=True, vocab=132)
    for shards in (1, 2):
        meta = to("llama_mistral", hf, tmp_path / f"meta{shards}", tp=shards)
        glued = torch.cat([shard["output.weight"] for shard in read_meta(meta)])
        embedding = torch.cat([shard["tok_embeddings.weight"] for shard in read_meta(meta)], dim=1)
        assert torch.equal(glued, embedding)
        assert open_source(find_input(meta)).header.config.tie_embeddings
        assert fingerprint(meta).weights == fingerprint(hf).weights


def test_a_head_that_began_as_a_tied_one_and_was_trained_is_its_own(tmp_path: Path) -> None:
    model = whole_model(LLAMA3)
    head = model["tok_embeddings.weight"].clone()
    head[77, 3] += 1
    meta = write_meta(tmp_path / "meta", LLAMA3, shards=2, model=model | {"output.weight": head})
    hf = load_file(to("hf", meta, tmp_path / "hf") / "model.safetensors")
    assert torch.equal(hf["lm_head.weight"], head)
    model["output.weight"] = model["tok_embeddings.weight"]
    tied = write_meta(tmp_path / "tied", LLAMA3, shards=2, model=model)
    assert "lm_head.weight" not in load_file(
        to("hf", tied, tmp_path / "hf tied") / "model.safetensors"
    )


# Mistral's.


def write_mistral(path: Path, files: int = 1) -> tuple[Path, Tensors]:
    args = Args(dim=64, n_heads=4, n_kv_heads=2)
    generator = torch.Generator().manual_seed(3)
    model = whole_model(args)
    for layer in range(args.n_layers):  # heads of 32, so that they don't fill dim
        for name, shape in {
            "wq": (128, 64),
            "wk": (64, 64),
            "wv": (64, 64),
            "wo": (64, 128),
        }.items():
            random = torch.randn(shape, generator=generator).bfloat16()
            model[f"layers.{layer}.attention.{name}.weight"] = random
    params = {
        "dim": 64, "n_layers": 2, "head_dim": 32, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-05,
        "vocab_size": 136, "rope_theta": 10000.0, "sliding_window": 16,
    }  # fmt: skip
    path.mkdir()
    (path / "params.json").write_text(json.dumps(params))
    (path / "tekken.json").write_text("{}")
    if files == 1:
        save_file(model, path / "consolidated.safetensors")
        return path, model
    weight_map = {
        name: f"consolidated-{index % files + 1:05d}.safetensors"
        for index, name in enumerate(model)
    }
    for file in set(weight_map.values()):
        save_file(
            {name: model[name] for name, home in weight_map.items() if home == file}, path / file
        )
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "consolidated.safetensors.index.json").write_text(index)
    return path, model


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("way", ["hf", "core"])
def test_mistrals_files_make_a_round_trip(way: str, files: int, tmp_path: Path) -> None:
    source, model = write_mistral(tmp_path / "mistral", files)
    between = to(way, source, tmp_path / way, **({"tp": 2, "pp": 2} if way == "core" else {}))
    back = to("llama_mistral", between, tmp_path / "back")
    assert_equal(load_file(back / "consolidated.safetensors"), model)
    before, after = (json.loads((path / "params.json").read_text()) for path in (source, back))
    assert after == before | {"max_seq_len": 32768}
    assert (back / "tekken.json").read_text() == "{}"
    config = open_source(find_input(between)).header.config
    assert (config.family, config.attention.head_dim, config.window) == ("mistral", 32, 16)


# What params.json says.


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "ffn"),
    [
        (4096, 256, None, 11008), (5120, 256, None, 13824), (8192, 256, None, 22016), (8192, 4096, 1.3, 28672),
        (4096, 1024, 1.3, 14336), (2048, 256, 1.5, 8192), (3072, 256, None, 8192), (16384, 4096, 1.2, 53248),
    ],
)  # fmt: skip
def test_published_widths_are_spelled_as_meta_spells_them(
    dim: int, multiple_of: int, multiplier: float | None, ffn: int, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", layers=1)
    config = open_source(find_input(hf)).header.config
    words = write_params(
        changed(
            config,
            {
                "hidden": dim,
                "attention.heads": 32,
                "attention.kv_heads": 32,
                "attention.head_dim": dim // 32,
                "mlp.ffn": ffn,
            },
        ),
        "meta",
        allow_lossy=False,
    )
    assert (words["multiple_of"], words.get("ffn_dim_multiplier")) == (multiple_of, multiplier)
    assert ffn_width(dim, multiple_of, multiplier) == ffn


@pytest.mark.parametrize("ffn", [1, 7, 56, 97, 2816, 11007, 100001])
def test_any_width_is_representable(ffn: int, tmp_path: Path) -> None:
    config = open_source(find_input(write_llama(tmp_path / "hf", layers=1))).header.config
    words = write_params(changed(config, {"mlp.ffn": ffn}), "meta", allow_lossy=False)
    assert ffn_width(32, words["multiple_of"], words.get("ffn_dim_multiplier")) == ffn


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"norm_eps": 1e-6, "n_kv_heads": None}, 2048),
        ({"n_kv_heads": None}, 4096),
        ({"rope_theta": 1e6}, 16384),
        ({"rope_theta": 5e5}, 8192),
        ({"rope_theta": 5e5, "use_scaled_rope": True}, 131072),
    ],
)
def test_positions_are_those_of_the_generation(
    changes: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    meta = write_meta(tmp_path / "meta", Args(n_kv_heads=8))
    params = json.loads((meta / "params.json").read_text()) | changes
    (meta / "params.json").write_text(
        json.dumps({name: value for name, value in params.items() if value is not None})
    )
    assert open_source(find_input(meta)).header.config.max_positions == positions


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rms_norm_eps": 1e-6}, "norm.epsilon = 1e-06, the settings in"),
        ({"rope_theta": 500000.0}, "positions.theta = 500000.0, the settings in"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "positions.scaling = "),
        ({}, ""),
    ],
)
def test_values_of_a_hugging_face_directory_that_params_contradict_are_named(
    changed: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = write_llama(tmp_path / "hf")
    meta = to("llama_mistral", hf, tmp_path / "meta")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | changed))
    caplog.clear()
    to("hf", meta, tmp_path / "back", config=hf)
    named = [line for line in caplog.messages if "--config wins" in line]
    assert len(named) == len(changed)
    assert words in caplog.text


def test_a_hugging_face_directory_knows_better(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2)
    hf = to("hf", meta, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 77, "eos_token_id": [5, 6]})
    )
    better = to("hf", meta, tmp_path / "better", config=hf)
    assert json.loads((better / "config.json").read_text())["max_position_embeddings"] == 77
    (hf / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match=r"kv_heads = 2.*another model"):
        to("hf", meta, tmp_path / "no", config=hf)


# What is wrong.


def refused(
    source: Path, target: Path, saver: str, status: int, *words: str, options: str = ""
) -> None:
    with unchanged(source.parent):
        outcome = run(
            "convert",
            "--load-dir",
            source,
            "--saver",
            saver,
            "--save-dir",
            target,
            *options.split(),
        )
    assert_refused(outcome, status, *words)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("00", "consolidated.00.pth"), ("01", "consolidated.01.pth"), ("03", "consolidated.03.pth")],
)
def test_a_missing_shard_is_named(missing: str, words: str, tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2, shards=4)
    (meta / f"consolidated.{missing}.pth").unlink()
    refused(meta, tmp_path / "out", "hf", 3, "1 of 4 shards missing", words)


def test_two_files_of_a_shard_are_named(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2, shards=2)
    shutil.copy(meta / "consolidated.01.pth", meta / "consolidated.1.pth")
    words = "consolidated.01.pth and consolidated.1.pth are both shard 1; remove one of them"
    refused(meta, tmp_path / "out", "hf", 3, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"n_layers": 3},
            ["consolidated.00.pth", "9 tensors are missing", "layers.2.attention_norm.weight"],
        ),
        ({"n_layers": 1}, ["consolidated.00.pth", "9 tensors are unknown", "layers.1."]),
        ({"n_kv_heads": 2}, ["consolidated.00.pth", "wk.weight", "expected [8, 64]"]),
        ({"dim": 128}, ["consolidated.00.pth", "of 4 shards missing"]),
        ({"dim": None}, ["params.json", "dim is missing"]),
        ({"n_heads": 7}, ["params.json", "n_heads = 7"]),
        ({"n_heads": "8"}, ["params.json", "n_heads = '8'"]),
        (
            {"vocab_size": 200},
            ["consolidated.00.pth", "tok_embeddings.weight is [136, 32], expected [200, 32]"],
        ),
    ],
)
def test_params_of_another_model_are_refused(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2, shards=2)
    params = json.loads((meta / "params.json").read_text()) | changes
    (meta / "params.json").write_text(
        json.dumps({name: value for name, value in params.items() if value is not None})
    )
    refused(
        meta,
        tmp_path / "out",
        "hf",
        3,
        *(words if "dim" not in changes or changes["dim"] is None else words[1:]),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("sliding_window", 64), ("qk_norm", True), ("attn_scale", 2.0), ("causal", False), ("softcap", 30)],
)  # fmt: skip
def test_a_key_that_isnt_read_and_may_change_the_model_is_named(
    name: str, value: object, tmp_path: Path
) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2)
    params = json.loads((meta / "params.json").read_text())
    (meta / "params.json").write_text(json.dumps(params | {name: value}))
    expected = [f"params.json: says {name} = {value!r}", "give --config"]
    refused(meta, tmp_path / "out", "hf", 2, *expected)
    harmless = {"causal": True, "max_batch_size": 8, "use_biases": False, "sliding_window": None}
    (meta / "params.json").write_text(json.dumps(params | harmless))
    to("hf", meta, tmp_path / "out")


def test_mistrals_positions_may_have_the_name_that_transformers_has(tmp_path: Path) -> None:
    params = {
        "dim": 64, "n_layers": 2, "n_heads": 8, "hidden_dim": 96, "vocab_size": 136, "max_position_embeddings": 131072,
        "activation": "silu", "model_type": "transformer", "tied_embeddings": False,
    }  # fmt: skip
    require_read(params, "mistral", tmp_path)
    found = {"vocab": 136, "mlp.ffn": 96, "tie_embeddings": False}
    assert read_params(params, "mistral", found, tmp_path).max_positions == 131072


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ("{", 3, "not a readable JSON file"),
        ("[1]", 3, "expected a JSON object, found list"),
        ('{"dim": 64, "quantization_args": {"scheme": "int4"}}', 3, "quantized weights"),
        ('{"dim": 64, "yarn": {"factor": 16}}', 3, "yarn rope scaling"),
        ('{"dim": 64, "moe_args": {"num_experts": 8}}', 3, "experts"),
    ],
)
def test_params_that_are_no_decoders_are_refused(
    content: str, status: int, words: str, tmp_path: Path
) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2)
    (meta / "params.json").write_text(content)
    refused(meta, tmp_path / "out", "hf", status, "params.json", words)


def test_shards_of_different_shapes_are_refused(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2, shards=2)
    shard = torch.load(meta / "consolidated.01.pth")
    shard["layers.1.feed_forward.w1.weight"] = torch.zeros(40, 64, dtype=torch.bfloat16)
    torch.save(shard, meta / "consolidated.01.pth")
    words = [
        "consolidated.01.pth",
        "layers.1.feed_forward.w1.weight is [40, 64], expected [48, 64]",
    ]
    refused(meta, tmp_path / "out", "hf", 3, *words)


def test_copies_of_a_norm_that_differ_are_refused(tmp_path: Path) -> None:
    meta = write_meta(tmp_path / "meta", LLAMA2, shards=2)
    shard = torch.load(meta / "consolidated.01.pth")
    shard["norm.weight"] = shard["norm.weight"] + 1
    torch.save(shard, meta / "consolidated.01.pth")
    refused(meta, tmp_path / "out", "hf", 3, "norm.weight", "contradicts itself")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"attention_bias": True}, "attention.qkv_bias is True"),
        ({"mlp_bias": True}, "mlp.bias is True"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            "attention.qkv_bias is True",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
            "attention.qk_norm is True",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "positions.scaling is {'rope_type': 'linear'",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["meta", "mistral"])
def test_a_model_that_params_json_cannot_represent_is_refused(
    kind: str, extra: dict[str, Any], words: str, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", extra_config=extra)
    options = f"--checkpoint-type {kind}"
    refused(
        hf,
        tmp_path / "out",
        "llama_mistral",
        2,
        words,
        "params.json can't represent",
        options=options,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 3", "can't be divided"),
        ("--pp 2", "--pp 2"),
        ("--tp 2 --checkpoint-type mistral", "--tp 2"),
        ("--loader mixtral_hf", "not a Mixtral"),
    ],
)
def test_options_that_meta_and_mistral_files_do_not_support_are_refused(
    options: str, words: str, tmp_path: Path
) -> None:
    hf = write_llama(tmp_path / "hf", vocab=132)
    refused(hf, tmp_path / "out", "llama_mistral", 2, words, options=options)


def test_a_config_json_without_weights_of_its_own_does_not_hide_metas_files(tmp_path: Path) -> None:
    write_meta(tmp_path / "meta", LLAMA3)
    (tmp_path / "meta" / "config.json").write_text("{}")
    assert find_input(tmp_path / "meta").loader.name == "llama_mistral"


def test_a_mixtral_is_read_under_megatrons_name_for_it(tmp_path: Path) -> None:
    hf = to("hf", FIXTURES / "core-mixtral-seq-tp1ep1" / "checkpoint", tmp_path / "hf")
    core = to("core", hf, tmp_path / "core", loader="mixtral_hf", tp=2, ep=2)
    assert fingerprint(core).weights == fingerprint(hf).weights
    words = ("experts", "params.json can't represent")
    refused(hf, tmp_path / "out", "llama_mistral", 2, *words, options="--checkpoint-type meta")


def test_the_command_line_says_which_side_the_type_is_of(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", vocab=132)
    arguments = ["--saver", "llama_mistral", "--checkpoint-type", "mistral"]
    assert run("convert", "--load-dir", hf, "--save-dir", tmp_path / "a", *arguments).status == 0
    assert (tmp_path / "a" / "consolidated.safetensors").is_file()
    arguments = ["--loader", "llama_mistral", "--saver", "core", "--checkpoint-type", "mistral"]
    assert (
        run(
            "convert", "--load-dir", tmp_path / "a", "--save-dir", tmp_path / "b", *arguments
        ).status
        == 0
    )
    arguments = [
        "--saver",
        "llama_mistral",
        "--loader",
        "llama_mistral",
        "--checkpoint-type",
        "hf",
        "--tp",
        "2",
    ]
    assert run("convert", "--load-dir", hf, "--save-dir", tmp_path / "c", *arguments).status == 0
    assert len(read_meta(tmp_path / "c")) == 2
    assert json.loads(run("inspect", tmp_path / "c", "--json").out)["loader"] == "llama_mistral"
    for other in "abc":
        assert run("diff", hf, tmp_path / other).status == 0
