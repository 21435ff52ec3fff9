"""Rules of CONVENTIONS.md that ruff and mypy do not check, held against the syntax tree of every module."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.tree import PACKAGE, ROOT, modules, name_of, parsed

MODULE_LINES_MAX = 400
CLASS_LINES_MAX = 300
FUNCTION_LINES_MAX = 70

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "torch.load"}
FORBIDDEN_ARGUMENTS = {"shell", "allow_pickle"}
BASE_PACKAGES = {"kvstore", "msgspec", "xxhash", "numpy", "aiofiles"}
ENGINE_PACKAGES = {"vllm", "torch"}
"""Held to their places by an import contract (pyproject.toml)."""

SUITE_PACKAGES = {"pytest", "hypothesis"}
"""Only the shipped suites may need them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a module once for each."""
    if "module" in metafunc.fixturenames:
        metafunc.parametrize("module", modules(), ids=name_of)


def test_nothing_runs_data_as_code(module: Path) -> None:
    """No module can be made to run bytes that it read: no pickle, marshal, eval, exec, yaml.load or shell."""
    found = [f"line {line}: {what}" for line, what in _dangers(parsed(module))]
    assert not found, f"{name_of(module)}: {found}"


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from marshal import loads", "eval('1')", "os.system('ls')", "run('ls', shell=True)"],
)
def test_the_gate_sees_what_it_forbids(code: str) -> None:
    """The check above does find what it looks for."""
    assert list(_dangers(ast.parse(code)))


def test_module_is_not_too_long(module: Path) -> None:
    """A module has at most 400 lines, a class 300, a function 70."""
    lines = len(module.read_text().splitlines())
    found = [f"module: {lines} lines"] if lines > MODULE_LINES_MAX else []
    for node in ast.walk(parsed(module)):
        limit = {ast.ClassDef: CLASS_LINES_MAX, ast.FunctionDef: FUNCTION_LINES_MAX}.get(
            ast.FunctionDef if isinstance(node, ast.AsyncFunctionDef) else type(node)
        )
        if limit and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                found.append(f"{node.name}: {length} lines, at most {limit}")
    assert not found, f"{name_of(module)}: {found}"


def test_public_names_are_documented(module: Path) -> None:
    """Every class and function in ``__all__`` has a docstring, and so has the module."""
    tree = parsed(module)
    assert ast.get_docstring(tree), f"{name_of(module)} has no docstring"
    public = _public_names(tree)
    bare = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name in public
        and not ast.get_docstring(node)
    ]
    assert not bare, f"{name_of(module)}: no docstring: {bare}"


def test_first_party_imports_stand_at_the_top(module: Path) -> None:
    """No function imports a module of kvstore: such an import would hide from the import contracts."""
    found = [
        f"line {inner.lineno}"
        for outer in ast.walk(parsed(module))
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.Import | ast.ImportFrom) and "kvstore" in _imported(inner)
    ]
    assert not found, f"{name_of(module)}: {found}"


def test_broad_handlers_give_a_reason(module: Path) -> None:
    """A handler that swallows ``Exception``, ``BaseException`` or everything has a comment at its line or around it."""
    lines = module.read_text().splitlines()
    found = []
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises_again(node):
            around = lines[max(node.lineno - 2, 0) : node.body[0].lineno]
            if not any("#" in line for line in around):
                found.append(f"line {node.lineno}")
    assert not found, f"{name_of(module)}: broad handlers without a reason: {found}"


def test_every_test_says_what_holds() -> None:
    """Every test, also a method of a class, has a docstring (ruff asks for it only of functions here)."""
    bare = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in [*(ROOT / "tests").rglob("test_*.py"), *(PACKAGE / "testing").rglob("*.py")]
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


def test_each_optional_package_has_one_door() -> None:
    """A package that a user may not have is imported by one module only."""
    doors: dict[str, set[str]] = defaultdict(set)
    known = BASE_PACKAGES | ENGINE_PACKAGES | set(sys.stdlib_module_names)
    for module in modules():
        suite = module.is_relative_to(PACKAGE / "testing")
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for package in _imported(node) - known - (SUITE_PACKAGES if suite else set()):
                    doors[package].add(name_of(module))
    assert {package: sorted(where) for package, where in doors.items() if len(where) > 1} == {}


def _dangers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for package in _imported(node) & FORBIDDEN_IMPORTS:
                yield node.lineno, f"import of {package}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS:
                yield node.lineno, f"call of {called}"
            for argument in node.keywords:
                off = isinstance(argument.value, ast.Constant) and argument.value.value is False
                if argument.arg in FORBIDDEN_ARGUMENTS and not off:
                    yield node.lineno, f"argument {argument.arg}"


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if not node.level else {"kvstore"}


def _public_names(tree: ast.Module) -> set[str]:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            return set(ast.literal_eval(value)) if value else set()
    return set()


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(one, ast.Name) and one.id in ("Exception", "BaseException") for one in kinds)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None
