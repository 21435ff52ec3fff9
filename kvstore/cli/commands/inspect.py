"""``kvstore inspect``: shows a tier's medium, from its namespaces down to the header of one block."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from typing import Annotated, Any, Final

from kvstore.cli.command_line import JsonFlag, Option, TierOption, Typer
from kvstore.cli.commands.on_medium import SCHEMA, Namespaces, counted, print_report, reading
from kvstore.cli.holdings.care import chosen, summary
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.interruption import DEADLINE_TO_LOOK, Deadline, DeadlineOption
from kvstore.cli.reporting.terminal import Column, age_text, print_json_text, print_line, print_table, rounded_size
from kvstore.codec.record import HEADER_BYTES, decode_header
from kvstore.errors import ConfigError, RecordError
from kvstore.types import BlockInfo, NamespaceInfo

__all__ = ["add_commands"]

_COLUMNS: Final = (
    Column("short", "namespace", left=True, style="bold"),
    Column("model", "model", left=True, rank=1, folds=True),
    Column("blocks", "blocks"),
    Column("size", "size"),
    Column("ages", "ages", rank=4),
    Column("unused", "unused", rank=3),
    Column("in_use", "in use", rank=2, left=True),
)


def add_commands(app: Typer) -> None:
    """Add the command."""
    app.command("inspect")(inspect_command)


def inspect_command(
    tier: TierOption,
    namespace: Namespaces = None,
    block: Annotated[
        str | None, Option(metavar="HEX", help="Show the header of the block whose key begins with this.")
    ] = None,
    keys: Annotated[
        bool, Option("--keys", help="List all blocks, one per line: namespace, key, bytes, last use (Unix time).")
    ] = False,
    deadline: DeadlineOption = DEADLINE_TO_LOOK,
    json: JsonFlag = False,
) -> None:
    """Show the contents of a medium. Namespaces with blocks, bytes and ages; keys; or the header of one block.

    Changes nothing.
    """
    with Deadline(deadline), reading(tier, namespace) as medium:
        namespaces = chosen(medium.namespaces(), namespace or ())
        if block is not None:
            _show_header(medium, _found_block(medium, namespaces, block), json)
            return
        if keys:
            _list_keys(medium, namespaces, json)
            return
        rows = [summary(medium, each) for each in namespaces]
        fields = namespaces[0].fields if namespace and len(namespaces) == 1 else None
    if json:
        print_report("inspect", medium.tier, rows=rows, fields=fields)
        return
    for row in rows:
        row |= {
            "short": row["namespace"][:12],
            "size": rounded_size(row["size_bytes"]),
            "ages": _ages(row["newest_s"], row["oldest_s"]),
            "unused": age_text(row["unused_s"]),
            "in_use": row["holder"] or ("no" if medium.knows_holders else None),
        }
    total = sum(row["size_bytes"] for row in rows)
    counts = [counted(len(rows), "namespace"), counted(sum(row["blocks"] for row in rows), "block")]
    print_table(rows, _COLUMNS, title=f"{medium.tier.name}: {', '.join(counts)}, {rounded_size(total)}")
    if fields is not None:
        print_line(f"namespace {namespaces[0].hex}")
        print_json_text(json_module.dumps(fields, indent=1, ensure_ascii=False))


def _ages(newest_s: float | None, oldest_s: float | None) -> str | None:
    """Return the ages of the youngest and the oldest block: ``"5m-12d"``."""
    newest, oldest = age_text(newest_s), age_text(oldest_s)
    return newest if newest == oldest else f"{newest}-{oldest}"


def _list_keys(medium: Medium, namespaces: Sequence[NamespaceInfo], json: bool) -> None:
    """Print all blocks as they are found: there may be millions."""
    if json:
        head = json_module.dumps(
            {"schema": SCHEMA, "command": "inspect", "tier": medium.tier.shown()}, ensure_ascii=False
        )
        print_json_text(head[:-1] + ', "rows": [')
    comma = ""
    for namespace in namespaces:
        for block in medium.blocks(namespace):
            key, used_at = block.key.hex(), int(block.used_at) or None
            if json:
                row = {"namespace": namespace.hex, "key": key, "size_bytes": block.size_bytes, "used_at": used_at}
                print_json_text(comma + json_module.dumps(row))
                comma = ", "
            else:
                print_line(f"{namespace.hex} {key} {block.size_bytes} {used_at or '-'}")
    if json:
        print_json_text("]}")


def _found_block(medium: Medium, namespaces: Sequence[NamespaceInfo], start: str) -> tuple[NamespaceInfo, BlockInfo]:
    for namespace in namespaces:
        for block in medium.blocks(namespace):
            if block.key.hex().startswith(start.lower()):
                return namespace, block
    raise ConfigError(f"No block has a key that begins with {start!r} (in hexadecimal). List them: --keys.")


def _show_header(medium: Medium, found: tuple[NamespaceInfo, BlockInfo], json: bool) -> None:
    namespace, block = found
    (record,) = medium.read(namespace, [block])
    if record.error is not None:
        raise record.error
    if record.data is None:
        raise ConfigError(f"Block {block.key.hex()} has just gone. Ask for another one.")
    row: dict[str, Any] = {"namespace": namespace.hex, "key": block.key.hex(), "size_bytes": block.size_bytes}
    try:
        header = decode_header(bytes(record.data[:HEADER_BYTES]))
    except RecordError as error:
        row["fault"] = str(error)
    else:
        row |= {name: value.hex() if isinstance(value, bytes) else value for name, value in header._asdict().items()}
    if json:
        print_json_text(json_module.dumps({"schema": SCHEMA, "command": "inspect", "block": row}, indent=1))
        return
    for name, value in row.items():
        print_line(f"{name:<18}{value}")
