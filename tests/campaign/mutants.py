"""Mutation testing: break one safety line at a time and see whether the tests of its module notice.

    python -m tests.campaign.mutants [--only FILE] [--seed S] [--count N] [--list]

The lines that carry safety are comparisons, guards, boolean operands, bounds, and calls that release something.
Mutants are drawn at random from the modules of ``TESTS``. Each is written into a copy of the project, and the tests of
its module run there until one fails. Survivors are printed with their change; ``ACCEPTED`` lists changes that no test
can notice, with the reason.

mutmut and cosmic-ray mutate every expression and run one set of tests for all; neither removes a guard or a release,
which are the mutants that matter here, and neither draws a sample from chosen modules.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
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
from typing import Final, NoReturn

import pytest

from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed

ROOT: Final = Path(__file__).parents[2]

TESTS: Final[dict[str, str]] = {
    "bounded.py": "test_bounded.py",
    "eviction.py": "test_eviction.py",
    "namespace.py": "test_namespace.py",
    "tenants.py": "test_tenants.py tiering/test_tenants.py",
    "primary/*.py": "primary tiering/test_copies.py tiering/test_tenants.py",
    "tiering/*.py": (
        "tiering/test_behaviour.py tiering/test_copies.py tiering/test_faults.py tiering/test_offload.py"
        " tiering/test_flat.py tiering/test_hits.py tiering/test_peers.py tiering/test_tally.py"
        " tiering/test_policy.py tiering/test_gate.py tiering/test_gated_loads.py tiering/test_hand_over.py"
        " tiering/test_hints.py tiering/test_deadlines.py tiering/test_tenants.py"
    ),
    "transfer/host.py transfer/base.py": "transfer/test_host.py transfer/test_cross_tp.py",
    "transfer/cuda.py transfer/pinning.py": "transfer",
    "tiers/presence.py": "tiers/test_presence.py tiers/test_refused.py tiers/test_async_tier.py",
    "tiers/async_tier.py tiers/health.py": (
        "tiers/test_health.py tiers/test_async_tier.py tiers/test_refused.py tiers/test_epochs.py"
    ),
    "tiers/tier_io.py tiers/block_mover.py tiers/epochs.py": (
        "tiers/test_tier_io.py tiers/test_block_mover.py tiers/test_removal_order.py tiers/test_refused.py"
        " tiers/test_defective_backend.py tiers/test_epochs.py tiers/test_async_tier.py"
    ),
    "codec/record.py codec/checksum.py codec/base.py codec/chain.py codec/rows.py": (
        "codec/test_record.py codec/test_rows.py codec/test_hostile.py codec/test_coding.py codec/test_corruption.py"
    ),
    "codec/coding.py codec/zstd.py codec/byteplane.py": (
        "codec/test_coding.py codec/test_hostile.py codec/test_corruption.py codec/test_tiers.py"
    ),
    "codec/seal.py codec/keyring.py": "seal",
    "backends/disk/journal.py backends/disk/table.py backends/disk/columns.py backends/disk/notes.py": (
        "disk/test_notes.py disk/test_journal.py disk/test_table.py disk/test_recovery.py"
    ),
    "backends/disk/index.py": "disk/test_index.py disk/test_shares.py",
    "backends/disk/index.py backends/disk/records.py backends/disk/segments.py": (
        "disk/test_segments.py disk/test_index.py disk/test_table.py disk/test_recovery.py disk/test_room.py"
        " disk/test_contract.py"
    ),
    "backends/disk/blocks.py backends/disk/space.py backends/disk/session.py backends/disk/files.py": (
        "disk/test_damage.py disk/test_room.py disk/test_recovery.py disk/test_notes.py disk/test_errors.py"
        " disk/test_shared.py disk/test_power_cut.py disk/test_contract.py"
    ),
    "backends/duplex.py": "redis/test_connection.py redis/test_early_answers.py peer/test_faults.py",
    "backends/redis/resp.py backends/redis/exchange.py backends/redis/parts.py": (
        "redis/test_resp.py redis/test_parts.py redis/test_connection.py redis/test_hostile.py"
        " redis/test_topology.py redis/test_several_nodes.py"
    ),
    "backends/s3/packs.py backends/s3/http.py backends/s3/names.py backends/s3/http.py backends/s3/wire.py": (
        "s3/test_packing.py s3/test_http.py s3/test_texts.py s3/test_wire.py"
    ),
    "backends/peer/protocol.py backends/peer/summary.py backends/peer/server.py": (
        "peer/test_protocol.py peer/test_summary.py peer/test_stored.py peer/test_faults.py peer/test_contract.py"
    ),
    "runtime/process.py runtime/wire.py runtime/lifetime.py": (
        "runtime/test_child_connection.py runtime/test_process.py"
    ),
    "runtime/breaker.py runtime/limits.py runtime/buffers.py": (
        "runtime/test_breaker.py runtime/test_limits.py tiers/test_health.py tiers/test_tier_io.py"
    ),
}
"""Modules of the package, and the tests under ``tests`` that have to notice a change, quick ones first."""

ACCEPTED: Final[dict[str, str]] = {
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
    "call removed: `pool.close()` -> `pass`": "the memory goes with its last view, a moment later",
    "operand dropped: `missed and self._backend.exclusive and (not self._closed)`"
    " -> `(missed and self._backend.exclusive)`": "a closed medium answers with an error, which reports nothing",
}
"""Mutants that no test can notice, by their text without the line number, and why."""

LIMIT_S: Final = 150
"""A run of tests that takes longer is ended without a verdict; a single test that hangs fails much earlier."""

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
    def name(self) -> str:
        """Kind, old and new source; the same when the line moves."""
        return f"{self.kind}: `{_line(ast.unparse(self.node))}` -> `{_line(self.text)}`"


def main() -> int:
    """Command line; the exit status is 1 if a mutant survived that is not accepted."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign.mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; random unless given")
    parser.add_argument("--count", type=int, default=150, help="mutants to draw; 0 takes all")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    args = parser.parse_args()
    seed = args.seed or fresh_seed()
    mutants = [mutant for mutant in all_mutants() if args.only in mutant.path]
    drawn = random.Random(seed).sample(mutants, min(args.count or len(mutants), len(mutants)))
    print(f"seed {seed}: {len(drawn)} of {len(mutants)} mutants", flush=True)
    if args.list:
        print(*drawn, sep="\n")
        return 0
    counts: Counter[str] = Counter()
    for mutant, verdict, took_s in tried(drawn):
        counts[verdict] += 1
        print(f"{verdict:9} {took_s:4.0f} s  {mutant}", flush=True)
    killed, decided = counts["killed"], counts["killed"] + counts["survived"]
    print(f"{killed} of {decided} mutants killed ({killed / max(1, decided):.1%}); {dict(counts)}; seed {seed}")
    return 1 if counts["survived"] else 0


def all_mutants() -> list[Mutant]:
    """Return every mutant of the modules of ``TESTS``."""
    found = []
    for path in sorted(modules()):
        tree = ast.parse((ROOT / "kvstore" / path).read_text())
        found += [mutant for node in _code(tree) for mutant in _mutants(path, node)]
    return found


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


def tried(mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """Test each mutant; yield it with ``killed``, ``undecided``, ``survived`` or ``accepted``, and its time."""
    tests, proven = modules(), list[list[str]]()
    for name in ("hypothesis", "msgspec", "numpy", "psutil", "redis", "xxhash"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="kvstore-mutants-") as directory:
        tree = Path(directory) / "kvstore"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".hypothesis", "__pycache__"))
        for mutant in mutants:
            if mutant.name in ACCEPTED:
                yield mutant, "accepted", 0.0
                continue
            path = tree / "kvstore" / mutant.path
            if (own := tests[mutant.path]) not in proven:
                # That they pass is what `make test` shows; here they have to be found, or every mutant looks killed.
                if _verdict(tree, [*own, "--collect-only"]) != "survived":
                    raise SystemExit(f"{own} can't run:\n{(tree.parent / 'log').read_text()[-2000:]}")
                proven.append(own)
            source = path.read_text()
            path.write_text(mutant.changed(source))
            began = time.monotonic()
            try:
                verdict = _verdict(tree, own)
            finally:
                path.write_text(source)
                # Compiled code counts as that of its source if both are of one second and the sources equally long.
                for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                    compiled.unlink()
            yield mutant, verdict, time.monotonic() - began


def _verdict(tree: Path, tests: Sequence[str]) -> str:
    pid = os.fork()
    if not pid:
        _run_tests(tree, tests)
    deadline, ended, status = time.monotonic() + LIMIT_S, 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
    # Also what a failed test has left running.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return "undecided"
    return "killed" if status else "survived"


def _run_tests(tree: Path, tests: Sequence[str]) -> NoReturn:
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
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in {"kvstore", "tests", "examples"}]:
            del sys.modules[name]
        plugins = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
        plugins += ["-p", "_hypothesis_pytestplugin"]
        marks = ["-m", "not heavy and not root and not walk", "-o", "timeout=60"]
        status = pytest.main(["-q", "-x", *plugins, *marks, f"--basetemp={tree.parent / 'pytest'}", *tests])
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
