"""Rules of CONVENTIONS.md that ruff and mypy do not check, applied to the syntax tree of every module."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType

import pytest

from tests.project.tree import PACKAGE, ROOT, modules, name_of, parsed

pytestmark = pytest.mark.repository

FUNCTION_LINES_MAX = 70

PUBLIC_PACKAGES = ("kvstore", "kvstore.errors", "kvstore.primary", "kvstore.testing", "kvstore.tiering")
"""The packages of docs/api.md."""

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "torch.load"}
FORBIDDEN_ARGUMENTS = {"shell", "allow_pickle"}
BASE_PACKAGES = {"kvstore", "msgspec", "xxhash", "numpy"}
ENGINE_PACKAGES = {"vllm", "torch"}
"""An import contract (pyproject.toml) restricts them to their modules."""

BAD_WORDS = re.compile(
    "_(anew|as_if|believe[ds]|everybody|gives?_up|given_up|giving_up|goes_by|hear[ds]?|knew|knows|learns|nobodys?|none"
    "|sa(id|ys?)|somebody|strangers?|tells?|told|unheard|want(ed|s)?|what(ever)?|who(ever|m|se)?|wish(ed)?)(_|$)"
)
"""Words that no test has in its name: a name states a property in nouns and standard terms."""

SUITE_PACKAGES = {"pytest", "hypothesis"}
"""Only the shipped test suites may need them."""


def test_nothing_runs_data_as_code() -> None:
    """No module can run bytes that it read: no pickle, marshal, eval, exec, yaml.load or shell."""
    _expect_none(lambda module: _dangers(parsed(module)))


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from marshal import loads", "eval('1')", "os.system('ls')", "run('ls', shell=True)"],
)
def test_check_for_dangerous_code_detects_it(code: str) -> None:
    """The check above detects forbidden code."""
    assert list(_dangers(ast.parse(code)))


def test_no_function_is_too_long() -> None:
    """A function has at most 70 lines; a module is as long as its one idea needs."""
    _expect_none(_too_long)


def test_public_names_are_documented() -> None:
    """Every public class, its public methods, every public function and every module has a docstring."""
    bare = [name_of(path) for path in modules() if not ast.get_docstring(parsed(path))]
    for package in PUBLIC_PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            if not isinstance(found, type | FunctionType):
                continue
            methods = {key: value for key, value in vars(found).items() if isinstance(value, FunctionType)}
            for key, value in {"": found, **methods}.items():
                if not key.startswith("_") and not inspect.getdoc(getattr(found, key) if key else value):
                    bare.append(f"{package}.{name} {key}")
    assert not bare, "\n".join(bare)


def test_first_party_imports_stand_at_the_top() -> None:
    """No function imports a module of kvstore, because the import contracts would not see such an import."""
    _expect_none(_hidden_imports)


def test_broad_handlers_give_a_reason() -> None:
    """A handler that swallows ``Exception``, ``BaseException`` or everything has a comment on or around its line."""
    _expect_none(_unexplained_handlers)


def test_every_test_has_a_docstring() -> None:
    """Every test, including methods of a class, has a docstring (ruff requires them only for functions here)."""
    bare = [f"{name_of(path)}:{node.lineno} {node.name}" for path, node in _tests() if not ast.get_docstring(node)]
    assert not bare, "\n".join(bare)


def test_names_of_tests_are_plain_english() -> None:
    """No name of a test has a clause in place of a noun, or a personification (CONVENTIONS.md, Language)."""
    found = [f"{name_of(path)}:{node.lineno} {node.name}" for path, node in _tests() if BAD_WORDS.search(node.name)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["test_what_is_sent", "test_engine_gives_up", "test_a_second_close_is_none"])
def test_check_for_plain_english_detects_bad_names(name: str) -> None:
    """The check above detects single words and pairs, also at the end of a name; a part of a word is no such word."""
    assert BAD_WORDS.search(name)
    assert not BAD_WORDS.search("test_whole_essays_are_retold")


def test_test_modules_do_not_import_each_other() -> None:
    """Shared parts of tests have their own module, so that a test module can be read and removed alone."""
    found = [
        f"{name_of(path)}:{node.lineno} {node.module}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and ".test_" in f".{node.module}"
    ]
    assert not found, "\n".join(found)


def test_each_optional_package_has_one_door() -> None:
    """Each optional package is imported by one module only."""
    doors: dict[str, set[str]] = defaultdict(set)
    known = BASE_PACKAGES | ENGINE_PACKAGES | set(sys.stdlib_module_names)
    for module in modules():
        suite = module.is_relative_to(PACKAGE / "testing")
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for package in _imported(node) - known - (SUITE_PACKAGES if suite else set()):
                    doors[package].add(name_of(module))
    assert {package: sorted(where) for package, where in doors.items() if len(where) > 1} == {}


def _expect_none(check: Callable[[Path], Iterable[tuple[int, str]]]) -> None:
    found = [f"{name_of(module)}:{line}: {what}" for module in modules() for line, what in check(module)]
    assert not found, "\n".join(found)


def _tests() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in [*(ROOT / "tests").rglob("*.py"), *(PACKAGE / "testing").rglob("*.py")]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path, node


def _too_long(module: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"


def _hidden_imports(module: Path) -> Iterator[tuple[int, str]]:
    for outer in ast.walk(parsed(module)):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(outer):
                if isinstance(inner, ast.Import | ast.ImportFrom) and "kvstore" in _imported(inner):
                    yield inner.lineno, f"{outer.name} imports a module of kvstore"


def _unexplained_handlers(module: Path) -> Iterator[tuple[int, str]]:
    lines = module.read_text().splitlines()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises_again(node):
            around = lines[max(node.lineno - 2, 0) : node.body[0].lineno]
            if not any("#" in line for line in around):
                yield node.lineno, "a broad handler without a reason"


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


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(one, ast.Name) and one.id in ("Exception", "BaseException") for one in kinds)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None
