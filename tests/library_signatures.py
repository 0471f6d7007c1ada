"""Signatures of optional GPU packages and of torch's private operators, read from their sources without a GPU.

Make the file of signatures again, with clones of the repositories that have all tags. Without a clone (-), the signatures
of its package stay as they are:

    python -m tests.library_signatures FLASH_ATTENTION_CLONE TRANSFORMER_ENGINE_CLONE MAMBA_CLONE CAUSAL_CONV1D_CLONE FLA_CLONE TORCH_WHEELS

TORCH_WHEELS is a folder with wheels of torch: `pip download --no-deps torch==2.9.0`.

A version that a clone lacks is read from the wheel or the source package beside the clone: from
`flash_attn_4-4.0.0b36-*.whl`, `transformer_engine-2.20.2-*.whl` or `causal_conv1d-1.7.0.tar.gz`, as `pip download` writes them.

Sources: github.com/Dao-AILab/flash-attention, github.com/NVIDIA/TransformerEngine, github.com/state-spaces/mamba,
github.com/Dao-AILab/causal-conv1d and github.com/fla-org/flash-linear-attention.
"""

import ast
import inspect
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "fixtures/signatures.json"

FLASH_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")
FLASH = {
    "flash_attn": ("flash_attn/flash_attn_interface.py", ("v2.6.0", "v2.7.4", "v2.8.3")),
    "flash_attn_interface": ("hopper/flash_attn_interface.py", ("v2.8.0", "v2.8.3", "0251105a")),
    "flash_attn.cute": (
        "flash_attn/cute/interface.py",
        ("v2.8.3", "fa4-v4.0.0.beta20", "fa4-v4.0.0.beta27", "0251105a", "4.0.0b36"),
    ),
}
"""The file and the versions (tags, commits or packages) of each module. FlashAttention 2 begins at pyproject.toml's oldest version."""

ENGINE = ("v1.11", "v1.13", "v2.0", "v2.2", "v2.3", "v2.8", "v2.9", "v2.13", "v2.18", "v2.20.2")
"""Versions of Transformer Engine from pyproject.toml's oldest one, with those where a signature changed."""
ENGINE_FILES = {
    "Linear": "transformer_engine/pytorch/module/linear.py",
    "fp8_autocast": "transformer_engine/pytorch/{file}.py",
    "autocast": "transformer_engine/pytorch/{file}.py",
    "DelayedScaling": "transformer_engine/common/recipe/__init__.py",
    "Float8CurrentScaling": "transformer_engine/common/recipe/__init__.py",
    "Float8BlockScaling": "transformer_engine/common/recipe/__init__.py",
    "MXFP8BlockScaling": "transformer_engine/common/recipe/__init__.py",
}

STATES = {
    "Linear": "transformer_engine/pytorch/module/linear.py",
    "LayerNormLinear": "transformer_engine/pytorch/module/layernorm_linear.py",
    "GroupedLinear": "transformer_engine/pytorch/module/grouped_linear.py",
}
"""Modules whose parameters have names that checkpoints contain."""
MODULE_BASE = "transformer_engine/pytorch/module/base.py"

WITH_STATES = {
    "mamba_ssm.ops.triton.ssd_combined": (
        "mamba_ssm/ops/triton/ssd_combined.py", "mamba_chunk_scan_combined", ("v2.0.4", "v2.2.4", "v2.3.2"),
    ),
    "causal_conv1d": (
        "causal_conv1d/causal_conv1d_interface.py", "causal_conv1d_fn", ("v1.4.0", "v1.5.3", "v1.6.1", "v1.7.0"),
    ),
    "fla.ops.gated_delta_rule": (
        "fla/ops/gated_delta_rule/chunk.py", "chunk_gated_delta_rule", ("v0.3.0", "v0.4.2", "v0.5.2", "v0.6.0"),
    ),
    "fla.ops.kda": ("fla/ops/kda/chunk.py", "chunk_kda", ("v0.4.0", "v0.4.2", "v0.5.2", "v0.6.0")),
}  # fmt: skip
"""Kernels of mixers with a state: the module from which we import -> the file, the function, the versions."""

TORCH = ("2.9.0", "2.15.0")
"""pyproject.toml's oldest torch for the trainer, and the newest one. Tests also read the operators of the installed torch."""
TORCH_FILE = "torchgen/packaged/ATen/native/native_functions.yaml"
TORCH_OPERATORS = (
    "_flash_attention_backward", "_flash_attention_forward", "_foreach_norm.Scalar", "_make_per_channel_quantized_tensor",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_mm",
    "addmm.dtype_out", "mm.dtype_out", "silu_backward.grad_input",
)  # fmt: skip
"""The operators that our code calls although they are private, or by their overload."""

Parameters = list[dict[str, Any]]
"""The parameters in order: each with `name`, `kind` and, if it has a default, `optional`."""


def signatures(package: str) -> dict[str, dict[str, dict[str, Parameters]]]:
    """Return the stored signatures of a package: by module (or package), version and function."""
    found: dict[str, dict[str, dict[str, Parameters]]] = json.loads(PATH.read_text())[package]
    return found


def states(version: str) -> dict[str, list[str]]:
    """Return the stored names of a version's state by module of Transformer Engine."""
    found: dict[str, list[str]] = json.loads(PATH.read_text())["states"][version]
    return found


def operators(version: str) -> dict[str, str]:
    """Return the stored schemas of torch's operators by name, such as `mm.dtype_out`."""
    found: dict[str, str] = json.loads(PATH.read_text())["torch"][version]
    return found


def stub(parameters: Parameters, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with these parameters. It calls body with the arguments by name."""
    signature = inspect.Signature([_parameter(each) for each in parameters])

    def function(*args: Any, **kwargs: Any) -> Any:
        return body(**signature.bind(*args, **kwargs).arguments)

    setattr(function, "__signature__", signature)  # noqa: B010
    return function


def _parameter(given: dict[str, Any]) -> inspect.Parameter:
    default = None if given.get("optional") else inspect.Parameter.empty
    kind = getattr(inspect.Parameter, given["kind"])
    return inspect.Parameter(given["name"], kind, default=default)


def parse(source: str, name: str) -> Parameters | None:
    """Return the parameters of a function or a class in source text; None if there is no such name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return list(_arguments(node.args))
        if isinstance(node, ast.ClassDef) and node.name == name:
            return list(_constructor(node))
    return None


def _constructor(node: ast.ClassDef) -> Iterator[dict[str, Any]]:
    """Yield the parameters of `__init__` without self, or the fields of a dataclass."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            yield from list(_arguments(each.args))[1:]
            return
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield _described(each.target.id, "POSITIONAL_OR_KEYWORD", each.value is not None)


def _arguments(args: ast.arguments) -> Iterator[dict[str, Any]]:
    places = [*args.posonlyargs, *args.args]
    first_optional = len(places) - len(args.defaults)
    for index, place in enumerate(places):
        kind = "POSITIONAL_ONLY" if index < len(args.posonlyargs) else "POSITIONAL_OR_KEYWORD"
        yield _described(place.arg, kind, index >= first_optional)
    for keyword, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _described(keyword.arg, "KEYWORD_ONLY", default is not None)


def parse_states(source: str, name: str) -> list[str]:
    """Return the names of a module's parameters in source text. A varying part of a name is {}."""
    (module,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    found = [name for node in ast.walk(module) for name in _registered(node)]
    return list(dict.fromkeys(found))


def _registered(node: ast.AST) -> Iterator[str]:
    """Yield the names that a call of register_parameter, or a list of one such name, contains."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_parameter":
        yield from _text_of(node.args[0])
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
        target = ast.unparse(node.targets[0])
        if target in ("self.weight_names", "self.bias_names"):
            yield from (text for each in node.value.elts for text in _text_of(each))


def _text_of(node: ast.expr) -> Iterator[str]:
    """Yield the text of a constant or of a formatted string."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    if isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )


def _described(name: str, kind: str, optional: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "kind": kind}
    return found | {"optional": True} if optional else found


def _text(clone: str, version: str, path: str) -> str | None:
    """Return a file of a version, or None if the version has no such file."""
    command = ["git", "-C", clone, "show", f"{version}:{path}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return found.stdout
    return _packaged(Path(clone).parent, version.removeprefix("v"), path)


def _packaged(folder: Path, version: str, path: str) -> str | None:
    """Return a file of the package of this version in a folder; None if no package there has it."""
    for wheel in folder.glob(f"*-{version}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if path in archive.namelist():
                return archive.read(path).decode()
    for package in folder.glob(f"*-{version}.tar.gz"):
        with tarfile.open(package) as archive:
            wanted = f"{package.name.removesuffix('.tar.gz')}/{path}"
            if wanted in archive.getnames() and (file := archive.extractfile(wanted)):
                return file.read().decode()
    return None


def _flash(clone: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for module, (path, versions) in FLASH.items():
        made[module] = {}
        for version in versions:
            source = _text(clone, version, path)
            assert source is not None, f"{clone} has no {path} at {version}"
            made[module][version] = {name: parse(source, name) for name in FLASH_FUNCTIONS}
    return made


def _engine(clone: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for version in ENGINE:
        made[version] = {}
        for name, path in ENGINE_FILES.items():
            for file in ("fp8", "quantization"):  # the newer versions' name of the file
                source = _text(clone, version, path.format(file=file))
                parameters = None if source is None else parse(source, name)
                if parameters is not None:
                    made[version][name] = parameters
    return {"transformer_engine": made}


def _states(clone: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for version in ENGINE:
        made[version] = {}
        for name, path in STATES.items():
            source, base = (_text(clone, version, each) for each in (path, MODULE_BASE))
            assert source is not None, f"{clone} has no {path} at {version}"
            assert base is not None, f"{clone} has no {MODULE_BASE} at {version}"
            extra = ["_extra_state"] if "def get_extra_state(self)" in base else []
            made[version][name] = [*parse_states(source, name), *extra]
    return made


def _with_states(clones: Sequence[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    clone_of = dict(zip(("mamba_ssm", "causal_conv1d", "fla"), clones, strict=True))
    for module, (path, name, versions) in WITH_STATES.items():
        clone = clone_of[module.split(".")[0]]
        if clone == "-":
            made[module] = signatures("with states")[module]
            continue
        made[module] = {}
        for version in versions:
            source = _text(clone, version, path)
            assert source is not None, f"{clone} has no {path} at {version}"
            made[module][version] = {name: parse(source, name)}
    return made


def _torch(wheels: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for version in TORCH:
        source = _packaged(Path(wheels), version, TORCH_FILE)
        assert source is not None, f"{wheels} has no wheel of torch {version}"
        lines = source.splitlines()
        schemas = [line.removeprefix("- func: ") for line in lines if line.startswith("- func: ")]
        by_name = {schema.partition("(")[0]: schema for schema in schemas}
        made[version] = {name: by_name[name] for name in TORCH_OPERATORS}
    return made


def main() -> None:
    """Write the file."""
    flash_clone, engine_clone, *clones, wheels = sys.argv[1:]
    found = json.loads(PATH.read_text())
    if flash_clone != "-":
        found["flash-attention"] = _flash(flash_clone)
    if engine_clone != "-":
        found |= {"engine": _engine(engine_clone), "states": _states(engine_clone)}
    found["with states"] = _with_states(clones)
    if wheels != "-":
        found["torch"] = _torch(wheels)
    lines = json.dumps(found, separators=(",", ":")).replace("}]", "}]\n")
    PATH.write_text(lines + "\n")


if __name__ == "__main__":
    main()
