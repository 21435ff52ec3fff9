"""Mutation testing: break one safety line at a time and see whether the tests of its module notice.

    python -m tests.campaign.mutants [--only PACKAGE ...] [--seed S] [--count N] [--reached FILE] [--list]

The lines that carry safety are comparisons, guards, boolean operands, bounds, and calls that release something.
Mutants are drawn at random from the modules of ``TESTS``, the same number from each package. The tests of these modules
run once, to find the lines that each test reaches (``reached.py``). Then each mutant is written into a copy of the
project, and those tests of its module run there that reach its line, quick ones first, until one fails. Survivors are
printed with their change; ``ACCEPTED`` lists changes that no test can notice, with the reason.

mutmut and cosmic-ray mutate every expression and run one set of tests for all; neither removes a guard or a release,
which are the mutants that matter here, and neither draws a sample from chosen modules.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import pytest

from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed
from tests.campaign.reached import SITECUSTOMIZE, Chosen, Reached
from tests.vllm.environment import ENGINE_IN_THIS_PROCESS

ROOT: Final = Path(__file__).parents[2]

TESTS: Final[dict[str, str]] = {
    "bounded.py": "test_bounded.py",
    "eviction.py": "test_eviction.py",
    "namespace.py": "test_namespace.py",
    "tenants.py": "test_tenants.py tiering",
    "primary/*.py": "primary tiering",
    "tiering/*.py": "tiering",
    "tiers/*.py": "tiers contract/test_memory_tier.py peer/test_stored.py",
    "transfer/*.py": "transfer",
    "codec/*.py": "codec seal",
    "backends/disk/*.py": "disk cli/test_looking_after.py",
    "backends/duplex.py": "redis peer",
    "backends/redis/*.py": "redis cli/test_admin_redis.py",
    "backends/s3/*.py": "s3",
    "backends/peer/*.py": "peer",
    "runtime/*.py": "runtime contract/test_process_host.py tiers/test_tier_io.py tiers/test_health.py",
    "vllm/*.py": "vllm",
}
"""Modules of the package, and the tests under ``tests`` that have to notice a change."""

ACCEPTED: Final[dict[str, str]] = {
    "shifted: `time.monotonic() < deadline` -> `(time.monotonic() <= deadline)`": "the last moment of a wait",
    "shifted: `now - self._looked_at > _READ_INTERVAL_S` -> `(now - self._looked_at >= _READ_INTERVAL_S)`": (
        "the last moment of an interval"
    ),
    "operand dropped: `self.gone and self._lifetime.has_ended` -> `(self._lifetime.has_ended)`": (
        "asked only of a killed child; before its start a child holds no lock and has no I/O"
    ),
    "operand dropped: `isinstance(kind, type) and issubclass(kind, errors.KVStoreError)`"
    " -> `(isinstance(kind, type))`": "for the type checker: that module has no other classes",
    "operand dropped: `formatter._fmt or ''` -> `(formatter._fmt)`": "for the type checker: a formatter has a format",
    "operand dropped: `key not in kept and key[tag_bytes:] in payloads` -> `(key[tag_bytes:] in payloads)`": (
        "a shortcut: a note kept twice is the same note"
    ),
    "operand dropped: `found.dict_id or declared in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)`"
    " -> `(found.dict_id)`": "both constants are huge numbers, which the caller refuses because they do not fit",
    "operand dropped: `self._expiry.active and self._expiry.forbids(key)` -> `(self._expiry.forbids(key))`": (
        "a shortcut: where nothing expires, no block is forbidden"
    ),
    "operand dropped: `self._closed or not state.policy.store or (not (state.policy.cpu or state.store_links))`"
    " -> `(self._closed or not (state.policy.cpu or state.store_links))`": (
        "a request that may store nothing has a limit of 0 tokens, too, which refuses each block"
    ),
    "shifted: `len(new) <= len(primary.free)` -> `(len(new) < len(primary.free))`": (
        "a shortcut: with room for all nothing is evicted, so pinning the others changes nothing"
    ),
    "guard removed: `not self._waiters and self.in_use + amount <= self._total` -> `False`": (
        "a shortcut: the first in line is granted its amount at once"
    ),
    "shifted: `self._clock() < self._recovery_awaited_until` -> `(self._clock() <= self._recovery_awaited_until)`": (
        "the last moment of a wait belongs to neither side"
    ),
    "shifted: `len(settled) + len(others) <= _SETTLED_MAX` -> `(len(settled) + len(others) < _SETTLED_MAX)`": (
        "the bound is of memory, and one source more or less is none"
    ),
    "shifted: `fit.q * blocks > _PIECE_S` -> `(fit.q * blocks >= _PIECE_S)`": "at equality a piece is all blocks",
    "shifted: `self.fd >= 0` -> `(self.fd > 0)`": "0 is standard input, which is open",
    "operand dropped: `self._flushing is None and (not self._writing)` -> `(not self._writing)`": (
        "a second flush in the same iteration of the loop finds nothing to send"
    ),
    "shifted: `header.record_bytes <= RedisHoldings.record_bytes_max`"
    " -> `(header.record_bytes < RedisHoldings.record_bytes_max)`": "no block is as long as the bound, 4 GiB",
    "operand dropped: `self._backfill_uses or 1` -> `(self._backfill_uses)`": (
        "for the type checker: blocks are copied to faster tiers only if the number is given"
    ),
    "shifted: `len(self._text) > _TEXT_PIECES_MAX` -> `(len(self._text) >= _TEXT_PIECES_MAX)`": (
        "the bound is of memory, and one piece more or less is none"
    ),
    "operand dropped: `self._start < self._end and self._step(replies)` -> `(self._step(replies))`": (
        "a shortcut: without bytes a step does nothing"
    ),
    "shifted: `slot_bytes > _SLOT_BYTES_MAX` -> `(slot_bytes >= _SLOT_BYTES_MAX)`": "no model has blocks of 1 GiB",
    "operand dropped: `work and self._side is not None` -> `(work)`": (
        "for the type checker: the parent sends its first message before any other"
    ),
    "shifted: `now < ctx.since + ctx.unheard_s` -> `(now <= ctx.since + ctx.unheard_s)`": (
        "the last moment of a wait belongs to neither side"
    ),
    "shifted: `now < until` -> `(now <= until)`": "the last moment of a pause belongs to neither side",
    "shifted: `now - self._changed_at < _TRIAL_S` -> `(now - self._changed_at <= _TRIAL_S)`": (
        "the last moment of a trial belongs to neither side"
    ),
    "shifted: `now - last < _WARN_AGAIN_S` -> `(now - last <= _WARN_AGAIN_S)`": (
        "the last moment of a minute belongs to neither side"
    ),
    "flipped: `view.nbytes <= PIECE_BYTES` -> `(view.nbytes > PIECE_BYTES)`": (
        "the digest is the same; one call is faster for a short payload, and pieces keep the GIL for a long one"
    ),
    "shifted: `len(keys) > min(map(self.room, links), default=len(keys))`"
    " -> `(len(keys) >= min(map(self.room, links), default=len(keys)))`": (
        "a shortcut: if there is room for exactly these blocks, the long way stores them all, too"
    ),
    "guard removed: `not self._has_set_aside` -> `False`": "a shortcut: if none is set aside, none is taken back",
}
"""Mutants that no test can notice, by their text without the line number, and why."""

LIMIT_S: Final = 150
"""A run of tests that takes longer is ended without a verdict; a single test that hangs fails much earlier."""

TESTS_S: Final = 15.0
"""Tests of one mutant take no longer than this unless ``--tests-s`` is given, or it is only one."""

MEASURED_S: Final = 600
"""To find the lines that tests reach, each argument of pytest has this time."""

Reach: TypeAlias = dict[str, dict[str, tuple[float, list[str]]]]
"""By the argument of pytest and the test: its time in seconds (negative if it failed), and the lines it reaches."""

_RELEASES: Final = re.compile(
    r"^_?(unpin|pin|release|close|cancel|discard|pop|popitem|remove|abandon|clear|free|forget|drop|settle|finish|end|"
    r"unlink|fsync|fdatasync|wait|drain|give_back|stop|flush|add|append|update|move_to_end|note|set)(_|$)"
)
"""Names of calls whose result nobody uses, and whose effect is the point."""

_SHIFTED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_FLIPPED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place."""

    path: str  # Module, relative to the package.
    node: ast.expr | ast.stmt  # Its place in the source.
    kind: str  # Kind of the change.
    text: str  # The new source of the place.
    in_function: bool = True

    def changed(self, source: str) -> str:
        """Return the module with the change."""
        lines = source.encode().splitlines(keepends=True)
        node = self.node
        before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
        after = lines[(node.end_lineno or 0) - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno or 0 :])
        return (before + self.text.encode() + after).decode()

    def __str__(self) -> str:
        return f"{self.path}:{self.node.lineno}: {self.name}"

    @property
    def lines(self) -> range:
        """Lines of the source; those of the whole module outside functions, which run before any test."""
        node = self.node
        return range(node.lineno, (node.end_lineno or node.lineno) + 1) if self.in_function else range(1, 10_000)

    @property
    def name(self) -> str:
        """Kind, old and new source; the same when the line moves."""
        return f"{self.kind}: `{_line(ast.unparse(self.node))}` -> `{_line(self.text)}`"


def main() -> int:
    """Command line; the exit status is 1 if a mutant survived that is not accepted."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign.mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default=[""], nargs="+", help="modules whose path starts with one of these")
    parser.add_argument("--match", default="", help="mutants whose text contains this; with --count 0, all of them")
    parser.add_argument("--reached", type=Path, help="file with the lines that tests reach; made if it is missing")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; random unless given")
    parser.add_argument("--count", type=int, default=150, help="mutants to draw; 0 takes all")
    parser.add_argument("--tests-s", type=float, default=TESTS_S, help="most seconds of tests of a mutant")
    parser.add_argument("--done", type=Path, help="output of an interrupted run, whose mutants are left out")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    args = parser.parse_args()
    seed = args.seed or fresh_seed()
    mutants = [
        mutant for mutant in all_mutants() if mutant.path.startswith(tuple(args.only)) and args.match in str(mutant)
    ]
    drawn = drawn_evenly(mutants, args.count or len(mutants), seed)
    done = args.done.read_text() if args.done else ""
    drawn = [mutant for mutant in drawn if f" s  {mutant}  [" not in done]
    print(f"seed {seed}: {len(drawn)} of {len(mutants)} mutants", flush=True)
    if args.list:
        print(*drawn, sep="\n")
        return 0
    counts: Counter[str] = Counter()
    for mutant, verdict, took_s, remark in tried(drawn, args.reached, args.tests_s):
        counts[verdict] += 1
        print(f"{verdict:9} {took_s:4.0f} s  {mutant}  [{remark}]", flush=True)
    killed, decided = counts["killed"], counts["killed"] + counts["survived"]
    print(f"{killed} of {decided} mutants killed ({killed / max(1, decided):.1%}); {dict(counts)}; seed {seed}")
    return 1 if counts["survived"] else 0


def all_mutants() -> list[Mutant]:
    """Return every mutant of the modules of ``TESTS``."""
    found = []
    for path in sorted(modules()):
        tree = ast.parse((ROOT / "kvstore" / path).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
        for mutant in (mutant for node in _code(tree) for mutant in _mutants(path, node)):
            found.append(dataclasses.replace(mutant, in_function=mutant.node.lineno in inside))
    return found


def drawn_evenly(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return the first mutant of each package, then the second of each, and so on.

    The order within a package is random and depends on the seed only, so a sample can be tried one package at a time.
    """
    packages: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        packages.setdefault(mutant.path.rpartition("/")[0] or mutant.path, []).append(mutant)
    for name, found in packages.items():
        random.Random(f"{seed} {name}").shuffle(found)
    rounds = itertools.zip_longest(*(packages[name] for name in sorted(packages)))
    return [mutant for mutant in itertools.chain.from_iterable(rounds) if mutant][:count]


def modules() -> dict[str, list[str]]:
    """Return the modules and the arguments of pytest for each."""
    found = {}
    for patterns, tests in TESTS.items():
        for pattern in patterns.split():
            paths = [path for path in (ROOT / "kvstore").glob(pattern) if path.name != "__init__.py"]
            if not paths:
                raise SystemExit(f"TESTS names kvstore/{pattern}, which does not exist")
            for path in paths:
                found[str(path.relative_to(ROOT / "kvstore"))] = [f"tests/{test}" for test in tests.split()]
    return found


def tried(mutants: Sequence[Mutant], cache: Path | None, tests_s: float) -> Iterator[tuple[Mutant, str, float, str]]:
    """Yield each mutant with ``killed``, ``undecided``, ``survived`` or ``accepted``, its time and a remark."""
    for name in ("hypothesis", "msgspec", "numpy", "psutil", "redis", "xxhash"):
        importlib.import_module(name)
    if any(mutant.path.startswith(("vllm/", "transfer/")) for mutant in mutants):
        os.environ |= ENGINE_IN_THIS_PROCESS
        importlib.import_module("vllm.v1.kv_offload.tiering.spec")
    with tempfile.TemporaryDirectory(prefix="kvstore-mutants-") as directory:
        tree = Path(directory) / "kvstore"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".hypothesis", "__pycache__"))
        reached = _reached(tree, sorted({mutant.path for mutant in mutants}), cache)
        for mutant in mutants:
            if mutant.name in ACCEPTED:
                yield mutant, "accepted", 0.0, ""
            elif not (tests := _tests_of(mutant, reached, tests_s)):
                yield mutant, "survived", 0.0, "no test reaches it"
            else:
                began = time.monotonic()
                verdict, remark = _tried(tree, mutant, tests, LIMIT_S + 2 * tests_s)
                yield mutant, verdict, time.monotonic() - began, remark


def _tried(tree: Path, mutant: Mutant, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
    path = tree / "kvstore" / mutant.path
    source = path.read_text()
    path.write_text(mutant.changed(source))
    try:
        verdict = _verdict(tree, sorted({test.partition("::")[0] for test in tests}), Chosen(tests), limit_s)
    finally:
        path.write_text(source)
        # Compiled code counts as that of its source if both are of one second and the sources equally long.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
    log = (tree.parent / "log").read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    if verdict == "killed" and "Timeout (>" in log:
        return verdict, f"time limit of {failed[-1] if failed else tests[0]}"
    return verdict, (failed[-1] if failed and verdict == "killed" else f"{len(tests)} tests")


def _reached(tree: Path, paths: Sequence[str], cache: Path | None) -> Reach:
    """Return for each test its time and the lines that it reaches; tests that fail without a mutant are left out."""
    own = modules()
    known: dict[str, Any] = json.loads(cache.read_text()) if cache and cache.exists() else {}
    (tree / "sitecustomize.py").write_text(SITECUSTOMIZE)
    for tests in sorted({test for path in paths for test in own[path]}):
        if known.get(tests):
            continue
        began, answer = time.monotonic(), tree.parent / "reached"
        answer.unlink(missing_ok=True)
        plugin = Reached(f"{tree / 'kvstore'}{os.sep}", tree.parent / "children", answer)
        _verdict(tree, [tests], plugin, MEASURED_S)
        if not answer.exists():
            raise SystemExit(f"{tests} can't run:\n{(tree.parent / 'log').read_text()[-2000:]}")
        known[tests] = json.loads(answer.read_text())
        if not known[tests]:
            raise SystemExit(f"{tests} has no tests:\n{(tree.parent / 'log').read_text()[-2000:]}")
        failed = [test for test, (took_s, _) in known[tests].items() if took_s < 0]
        took_s = time.monotonic() - began
        print(f"{tests}: {len(known[tests])} tests, {took_s:.0f} s; failed: {len(failed)} {failed[:3]}", flush=True)
        if cache:
            cache.write_text(json.dumps(known))
    (tree / "sitecustomize.py").unlink()
    return known


def _tests_of(mutant: Mutant, reached: Reach, tests_s: float) -> list[str]:
    """Return the tests of the module that reach the mutant: quick ones first, and rather those named for the module."""
    lines = {f"{mutant.path}:{line}" for line in mutant.lines}
    stem = Path(mutant.path).stem
    found = []
    for tests in modules()[mutant.path]:
        for test, (took_s, places) in reached.get(tests, {}).items():
            if took_s >= 0 and not lines.isdisjoint(places):
                found.append((took_s / 4 if f"/test_{stem}.py" in test else took_s, took_s, test))
    total, chosen = 0.0, []
    for _, took_s, test in sorted(found):
        if not chosen or total + took_s <= tests_s:
            chosen.append(test)
            total += took_s
    return chosen


def _verdict(tree: Path, tests: Sequence[str], plugin: object, limit_s: float) -> str:
    while True:
        pid = os.fork()
        if not pid:
            _run_tests(tree, tests, plugin)
        began = last = time.monotonic()
        ended, status, paused = 0, 0, False
        while not ended and last < began + limit_s:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
            paused |= time.monotonic() > last + 5
            last = time.monotonic()
        # Also what a failed test has left running.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            os.waitpid(pid, 0)
        if paused and (status or not ended):
            continue  # This program was stopped for a while, and time limits of tests have passed.
        if not ended:
            return "undecided"
        return "killed" if status else "survived"


def _run_tests(tree: Path, tests: Sequence[str], plugin: object) -> NoReturn:
    """Run tests in this process, a fork whose imports of other packages are done: they are most of the time."""
    status = 1
    try:
        os.setsid()
        os.chdir(tree)
        log = os.open(tree.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"PYTHONPATH": str(tree), "TMPDIR": str(tree.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        os.environ.setdefault(SEED_VARIABLE, "1")
        tempfile.tempdir = None
        # Without compiled code each run would compile the project, and pytest would rewrite the tests.
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in {"kvstore", "tests", "examples"}]:
            del sys.modules[name]
        plugins = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
        plugins += ["-p", "_hypothesis_pytestplugin"]
        marks = ["-m", "not engine and not torture and not root and not walk", "-o", "timeout=60"]
        if isinstance(plugin, Chosen):
            marks.append("-x")
        base = f"--basetemp={tree.parent / 'pytest'}"
        status = pytest.main(["-q", *plugins, *marks, base, *tests], plugins=[plugin])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _code(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all nodes but those of logging, representations and imports for types."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        text = ast.unparse(node)[:60] if isinstance(node, ast.Expr | ast.If) else ""
        if text.startswith(("logger.", "if TYPE_CHECKING")):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in {"__repr__", "__str__", "describe"}:
            continue
        if isinstance(node, ast.JoinedStr):  # Its nodes have no places of their own before Python 3.12.
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def _mutants(path: str, node: ast.AST) -> Iterator[Mutant]:
    match node:
        case ast.Compare(ops=[operation]):
            for kind, table in (("flipped", _FLIPPED), ("shifted", _SHIFTED)):
                if other := table.get(type(operation)):
                    yield _edited(path, node, kind, ops=[other()])
        case ast.BoolOp(values=values):
            for dropped in range(len(values)):
                rest = [value for number, value in enumerate(values) if number != dropped]
                yield (
                    _edited(path, node, "operand dropped", values=rest)
                    if len(rest) > 1
                    else Mutant(path, node, "operand dropped", f"({ast.unparse(rest[0])})")
                )
        case ast.If(test=test, body=[*_, ast.Raise() | ast.Return() | ast.Continue() | ast.Break()], orelse=[]):
            yield Mutant(path, test, "guard removed", "False")
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            call = node.value.value if isinstance(node.value, ast.Await) else node.value
            name = ast.unparse(call.func).rpartition(".")[2]  # type: ignore[attr-defined]
            if _RELEASES.match(name):
                yield Mutant(path, node, "call removed", "pass")
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            opposite = "max" if name == "min" else "min"
            yield Mutant(path, node.func, "swapped", opposite)
        case (
            ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=int() | float() as number) as value)
            | ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float() as number) as value)
        ) if name.isupper() and not isinstance(number, bool) and re.search("MAX|LIMIT|MOST|BOUND", name):
            yield Mutant(path, value, f"{name} raised", str(number * 1000))


def _edited(path: str, node: ast.expr, kind: str, **fields: object) -> Mutant:
    edited = copy.copy(node)
    for name, value in fields.items():
        setattr(edited, name, value)
    return Mutant(path, node, kind, f"({ast.unparse(edited)})")


def _line(text: str) -> str:
    return " ".join(text.split())[:90]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
