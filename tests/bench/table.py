#!/usr/bin/env python3
"""The rows of the bench programs as a table, and as build/bench.json.

    table.py LINES JSON

LINES holds what the programs printed: one JSON object a ratio with the keys name, value, goal,
limit, better, sizes and machine (`tests/bench/bench.h`), and anything else, which is passed over.
A goal or a limit may be null: nobody set one. Ratios that miss their goal are marked SHORT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KEYS = ["name", "value", "goal", "limit", "better", "sizes", "machine"]

Row = dict[str, Any]


def parse(text: str) -> list[Row]:
    """The rows among the lines; a line that begins like a row and is none is an error."""
    rows = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        if list(row) != KEYS or row["better"] not in ("lower", "higher"):
            raise ValueError(f"not a row of a bench: {line}")
        rows.append(row)
    return rows


def verdict(row: Row) -> str:
    if row["goal"] is None:
        return ""
    met = row["value"] <= row["goal"] if row["better"] == "lower" else row["value"] >= row["goal"]
    return "" if met else "SHORT"


def bound(row: Row, key: str) -> str:
    sign = "<=" if row["better"] == "lower" else ">="
    # A limit of 0 of something that should be high says nothing; it stands in for "none".
    nothing = row[key] is None or (key == "limit" and row["better"] == "higher" and row[key] == 0)
    return "-" if nothing else f"{sign if key == 'goal' else ''}{row[key]:g}"


def table(rows: list[Row]) -> str:
    lines = [f"{'name':24} {'value':>9} {'goal':>8} {'limit':>8} {'':5}  sizes"]
    lines += [f"{row['name']:24} {row['value']:9.3f} {bound(row, 'goal'):>8} "
              f"{bound(row, 'limit'):>8} {verdict(row):5}  {row['sizes']}" for row in rows]
    return "\n".join(lines + sorted({f"machine: {row['machine']}" for row in rows}))


def main() -> None:
    rows = parse(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
