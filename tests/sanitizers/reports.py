#!/usr/bin/env python3
"""Which of ThreadSanitizer's reports count: python reports.py FOLDER_OF_LOGS

Debian's RocksDB and Thrift and LibTorch's wheel were compiled without ThreadSanitizer: it sees
their copies and allocations, and not the atomics and futexes that order them, and reports memory
that one thread got through them from another as a race. A data race counts if neither of its two
accesses has a frame of such a library; every other kind of report counts. What this hides: our own
code racing within a callback of such a library. LibTorch's parallel loops are not among them: their
bodies are compiled into ours, and openmp_joins.cc tells where they begin and end. Prints what
counts and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

UNINSTRUMENTED = re.compile(r"librocksdb|libthrift|libtorch|libc10")
SEPARATOR = re.compile(r"^={18}$", re.MULTILINE)


def counts(report: str) -> bool:
    """Of one report, from its WARNING line on."""
    if "ThreadSanitizer: data race" not in report:
        return True
    accesses = report.split("\n\n")[:2]
    return not any(UNINSTRUMENTED.search(access) for access in accesses)


def main() -> int:
    seen: Counter[bool] = Counter()
    for log in sorted(Path(sys.argv[1]).iterdir()):
        for report in SEPARATOR.split(log.read_text(errors="replace")):
            if "WARNING: ThreadSanitizer" not in report:
                continue
            seen[counts(report)] += 1
            if counts(report):
                print(f"{log.name}:\n{report.strip()}\n")
    print(f"ThreadSanitizer: {seen[True]} reports count; {seen[False]} have an access inside a "
          "library that was compiled without it")
    return 1 if seen[True] else 0


if __name__ == "__main__":
    sys.exit(main())
