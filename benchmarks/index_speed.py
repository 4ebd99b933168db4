"""How fast passages are indexed and found: 100,000 made-up ones of about 100 words, on two cores.

    python benchmarks/index_speed.py                     # in a folder for the time being
    python benchmarks/index_speed.py --json out.json --passages 1000000

add         `Index.add` to an empty index, in commits of 10,000, until the last merge is done
add again   the same passages once more: every one is looked up, and none is written
search      `Index.search(question, 5)`, questions of 8 words; the median, and the slowest of a hundred (p99)

Words are drawn by Zipf's law from 50,000 invented ones, for passages and questions alike. There are no stop words among
them, so that a question has common words in it, which cost the most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from watch_cost import commit, machine

from floatscope.files.sizes import format_size
from floatscope.tasks.index import Index

VOCABULARY, WORDS, QUESTION, K = 50_000, 100, 8, 5
CORES = 2
GOALS = {"add": "60 s for 100,000", "search": "5 ms"}


def vocabulary() -> np.ndarray:
    """Invented words, the common ones short."""
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    words = []
    for rank in range(VOCABULARY):
        word, left = "", rank
        while left or not word:
            word += consonants[left % 18] + vowels[left // 18 % 5]
            left //= 90
        words.append(word + "n")  # no stop word ends so
    return np.array(words)


def drawn(words: np.ndarray, rng: np.random.Generator, lengths: np.ndarray) -> Iterator[str]:
    """A text for each of the lengths, its words by Zipf's law."""
    law = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    for length in lengths:
        yield " ".join(words[np.searchsorted(law, rng.random(length) * law[-1])])


def measure(passages: int, questions: int, folder: Path) -> list[dict[str, Any]]:
    rng, words = np.random.default_rng(0), vocabulary()
    texts = list(drawn(words, rng, rng.integers(WORDS // 2, WORDS * 3 // 2, passages)))
    titles = list(drawn(words, rng, rng.integers(1, 4, passages)))
    entries = [(None, title, text) for title, text in zip(titles, texts, strict=True)]
    index, rows = Index.create(folder), []
    for what in ("add", "add again"):
        began = time.perf_counter()
        counts = index.add(entries)
        seconds = time.perf_counter() - began
        assert counts.added == (passages if what == "add" else 0), counts
        rows.append({"what": what, "s": seconds, "per_s": passages / seconds})
    times = []
    for question in drawn(words, rng, np.full(questions, QUESTION)):
        began = time.perf_counter()
        assert len(index.search(question, K)) == K
        times.append(time.perf_counter() - began)
    median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[-1]
    return [*rows, {"what": "search", "median_ms": 1e3 * median, "p99_ms": 1e3 * p99, "bytes": index.stat().bytes}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--questions", type=int, default=1000)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    print(f"{machine('cpu')}, {len(os.sched_getaffinity(0))} cores, commit {commit()}")
    with TemporaryDirectory() as folder:
        rows = measure(args.passages, args.questions, Path(folder) / "index")
    print("| what | | goal |\n|---|---|---|")
    for r in rows:
        if "s" in r:
            said = f"{r['s']:.1f} s, {r['per_s']:,.0f} passages a second"
        else:
            size = format_size(r["bytes"])
            said = f"median {r['median_ms']:.2f} ms, p99 {r['p99_ms']:.2f} ms, in {size} of index"
        print(f"| {r['what']} | {said} | {GOALS.get(r['what'], '')} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
