"""The computation of an architecture as text: the functions of its file in transformers, in one normal form.

Two architectures compute the same if their functions are the same, except for names of classes and comments. Names of
tensors don't show a computation, so this comparison finds the places that a person has to read.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from pathlib import Path

_TASKS = re.compile(r"For(?!CausalLM|ConditionalGeneration)|PreTrainedModel|Output$|Cache$")
"""Classes of the file that don't belong to the language model."""
_UNUSED = re.compile(r"^(get_|set_|prepare_|_init_weights|extra_repr|_reorder|__repr__|resize_)")
"""Methods that don't compute the model's output."""
_SHOWN_LINES = 3


@dataclass(frozen=True)
class Function:
    """A function or method of an architecture's file."""

    name: str
    """Without the architecture's own prefix: `Attention.forward`."""
    shown: str
    """The name in the file."""
    line: int
    text: str
    """The function without annotations, comments and docstrings."""

    def new_lines(self, other: "Function | None") -> tuple[str, ...]:
        """The first lines that the other function doesn't have."""
        if other is None:
            return ()
        compared = unified_diff(other.text.splitlines(), self.text.splitlines(), n=0, lineterm="")
        added = [line[1:].strip() for line in compared if re.match(r"\+(?!\+\+)", line)]
        return tuple(added[:_SHOWN_LINES])


def prefix_of(architecture: str) -> str:
    """The part of class names that stands for the architecture: `Mistral`."""
    return re.split(r"For|LMHead", architecture)[0]


@cache
def source_of(architecture: str, model_type: str, models: Path) -> Path | None:
    """The file that defines a class, in transformers' folder of models; None if there is none."""
    plain = model_type.replace("-", "_")
    short = plain.removesuffix("_text")
    for folder in dict.fromkeys((plain, short, short.replace("_", ""))):
        for path in sorted((models / folder).glob("modeling_*.py")):
            if f"class {architecture}(" in path.read_text(encoding="utf-8"):
                return path
    return None


@cache
def functions_of(path: Path, architecture: str) -> dict[str, Function]:
    """The functions that compute the output of an architecture, by name without its prefix."""
    prefix = prefix_of(architecture)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found = {}
    for owner, node in _functions(_used_by(architecture, tree)):
        shown = f"{owner}.{node.name}" if owner else node.name
        name = shown.removeprefix(prefix)
        line = node.lineno
        found[name] = Function(name, shown, line, _normal(node, prefix))
    return found


def _used_by(architecture: str, tree: ast.Module) -> list[ast.stmt]:
    """The definitions of a file that a class names, directly or through others, in the order of the file.

    A file may define a multimodal model too, which the language model's class doesn't use.
    """
    defined = {name: node for node in tree.body for name in _defined_names(node)}
    used, waiting = set(), [architecture]
    while waiting:
        name = waiting.pop()
        if name in defined and name not in used:
            used.add(name)
            waiting += _names_in(defined[name])
    return [node for node in tree.body if used & set(_defined_names(node))]


def _names_in(node: ast.stmt) -> Iterator[str]:
    """The names that a definition uses, without those of methods that don't compute."""
    parts: list[ast.AST] = [node]
    if isinstance(node, ast.ClassDef):
        parts = [
            *node.bases,
            *(part for part in node.body if not _UNUSED.match(getattr(part, "name", ""))),
        ]
    for part in parts:
        yield from (each.id for each in ast.walk(part) if isinstance(each, ast.Name))


def _defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _functions(definitions: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (class or "", function)."""
    for node in definitions:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        if isinstance(node, ast.ClassDef) and not _TASKS.search(node.name):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not _UNUSED.match(inner.name):
                    yield node.name, inner


def _normal(node: ast.FunctionDef, prefix: str) -> str:
    stripped = _Stripped().visit(node)  # nobody reads the tree again
    return re.sub(rf"\b{prefix}(?=[A-Z])", "Model", ast.unparse(stripped))


class _Stripped(ast.NodeTransformer):
    """Removes annotations, decorators and docstrings."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def share_of_equal(ours: Mapping[str, Function], theirs: Mapping[str, Function]) -> float:
    """The share of our functions that the other architecture has unchanged, between 0 and 1."""
    equal = [name for name, each in ours.items() if _is_equal(each, theirs.get(name))]
    return len(equal) / max(1, len(ours))


def differing(ours: Mapping[str, Function], theirs: Mapping[str, Function]) -> tuple[Function, ...]:
    """Our functions that the other architecture lacks, or has otherwise."""
    return tuple(each for name, each in ours.items() if not _is_equal(each, theirs.get(name)))


def _is_equal(ours: Function, theirs: Function | None) -> bool:
    return theirs is not None and ours.text == theirs.text
