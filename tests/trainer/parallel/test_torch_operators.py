"""Our calls of torch's private operators, against the schemas of the installed torch, and of the oldest and the newest one."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import megatron_lite
from tests.library_signatures import TORCH, TORCH_OPERATORS, operators

ROOT = Path(megatron_lite.__file__).parent
PRIVATE = re.compile(r"torch\.(ops\.aten\.|(?=_[a-z]+(_[a-z]+)*$))")
"""The begin of an operator's full name: in torch.ops.aten, or a private function of torch."""
INSTALLED = "installed"
STARRED = {"batch_first": 3, "tensors": 5}
"""The number of tensors that a starred argument stands for, by its name."""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the operators that our code calls, with the calls."""
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "torch.ops." not in text and "torch._" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and PRIVATE.match(ast.unparse(node.func)):
                yield f"{path.name}:{node.lineno}", node


CALLS = list(calls())


def places(call: ast.Call) -> int:
    """Return the number of positional arguments."""
    count = 0
    for each in call.args:
        if not isinstance(each, ast.Starred):
            count += 1
        elif isinstance(each.value, ast.Name):
            count += STARRED[each.value.id]
        else:
            # *map(function, (q, k, v))
            assert isinstance(each.value, ast.Call)
            several = each.value.args[1]
            assert isinstance(several, ast.Tuple)
            count += len(several.elts)
    return count


def keywords(call: ast.Call) -> set[str]:
    """Return the names of keyword arguments, with those of _window_size."""
    named = {each.arg for each in call.keywords if each.arg is not None}
    spread = [ast.unparse(each.value) for each in call.keywords if each.arg is None]
    if spread:
        assert spread == ["_window_size(q, k, seen)"]
        named |= {"window_size_left", "window_size_right"}
    return named


def overload(call: ast.Call) -> Any:
    """Return the operator's overload, as named in the call or the default one."""
    found: Any = torch.ops.aten
    for part in PRIVATE.sub("", ast.unparse(call.func)).split("."):
        found = getattr(found, part)
    if isinstance(found, torch._ops.OpOverloadPacket):
        found = getattr(
            found, "default" if "default" in found.overloads() else found.overloads()[0]
        )
    return found


def full_name(call: ast.Call) -> str:
    """Return the name of the operator, with its overload."""
    schema = overload(call)._schema
    name = schema.name.removeprefix("aten::")
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def schema_of(call: ast.Call, version: str) -> Any:
    if version == INSTALLED:
        return overload(call)._schema
    return torch._C.parse_schema(f"aten::{operators(version)[full_name(call)]}")


@pytest.mark.parametrize("version", [INSTALLED, *TORCH])
@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[place for place, _ in CALLS])
def test_a_call_fits_the_schema(call: ast.Call, version: str) -> None:
    arguments = schema_of(call, version).arguments
    by_place = [each for each in arguments if not each.kwarg_only]
    given = {each.name for each in by_place[: places(call)]}
    assert places(call) <= len(by_place)
    assert not given & keywords(call), "given twice"
    assert keywords(call) <= {each.name for each in arguments}
    missing = [each.name for each in arguments if not each.has_default_value()]
    assert set(missing) <= given | keywords(call)


def test_the_schemas_of_all_operators_are_stored() -> None:
    assert {full_name(call) for _, call in CALLS} == set(TORCH_OPERATORS)


def test_all_operators_are_found() -> None:
    assert len(CALLS) == 11


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
def test_the_grouped_product_has_the_schema_of_our_calls() -> None:
    """Called as in models/moe/grouped.py: two tensors and offs."""
    parameters = inspect.signature(F.grouped_mm).parameters
    required = [name for name, each in parameters.items() if each.default is each.empty]
    assert (required, "offs" in parameters) == (["mat_a", "mat_b"], True)
    offs = torch.tensor([2, 4], dtype=torch.int32)
    a, b = torch.randn(4, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    found: Tensor = F.grouped_mm(a, b, offs=offs)
    expected = torch.cat([a[:2] @ b[0], a[2:] @ b[1]])
    torch.testing.assert_close(found, expected)
