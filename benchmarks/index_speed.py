"""Speed of indexing and searching 100,000 synthetic passages of about 100 words, on two cores.

    python benchmarks/index_speed.py                     # in a temporary folder
    python benchmarks/index_speed.py --json out.json --passages 1000000

add         `Index.add` to an empty index, in commits of 10,000, until the last merge is done
add again   the same passages again: each is looked up, and none is written
search      `Index.search(question, 5)`, questions of 8 words; median and 99th percentile (p99)

The words of passages and questions follow Zipf's law over 50,000 invented words. None of them is a stop word, so
questions contain common words, which cost the most.
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


def make_vocabulary() -> np.ndarray:
    """Return invented words; common ones are short."""
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    words = []
    for rank in range(VOCABULARY):
        word, left = "", rank
        while left or not word:
            word += consonants[left % 18] + vowels[left // 18 % 5]
            left //= 90
        words.append(word + "n")  # no stop word has this form
    return np.array(words)


def sample_texts(words: np.ndarray, rng: np.random.Generator, lengths: np.ndarray) -> Iterator[str]:
    """Yield a text for each length; its words follow Zipf's law."""
    cumulative = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    for length in lengths:
        yield " ".join(words[np.searchsorted(cumulative, rng.random(length) * cumulative[-1])])


def measure(passages: int, questions: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each operation."""
    rng, words = np.random.default_rng(0), make_vocabulary()
    texts = list(sample_texts(words, rng, rng.integers(WORDS // 2, WORDS * 3 // 2, passages)))
    titles = list(sample_texts(words, rng, rng.integers(1, 4, passages)))
    entries = [(None, title, text) for title, text in zip(titles, texts, strict=True)]
    index, rows = Index.create(folder), []
    for operation in ("add", "add again"):
        began = time.perf_counter()
        counts = index.add(entries)
        seconds = time.perf_counter() - began
        assert counts.added == (passages if operation == "add" else 0), counts
        rows.append({"operation": operation, "s": seconds, "per_s": passages / seconds})
    times = []
    for question in sample_texts(words, rng, np.full(questions, QUESTION)):
        began = time.perf_counter()
        assert len(index.search(question, K)) == K
        times.append(time.perf_counter() - began)
    median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[-1]
    return [
        *rows,
        {"operation": "search", "median_ms": 1e3 * median, "p99_ms": 1e3 * p99, "bytes": index.stats().bytes},
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--questions", type=int, default=1000)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    print(f"{machine('cpu')}, {len(os.sched_getaffinity(0))} cores, commit {commit()}")
    with TemporaryDirectory() as folder:
        rows = measure(args.passages, args.questions, Path(folder) / "index")
    print("| operation | | goal |\n|---|---|---|")
    for r in rows:
        if "s" in r:
            result = f"{r['s']:.1f} s, {r['per_s']:,.0f} passages per second"
        else:
            size = format_size(r["bytes"])
            result = f"median {r['median_ms']:.2f} ms, p99 {r['p99_ms']:.2f} ms, in {size} of index"
        print(f"| {r['operation']} | {result} | {GOALS.get(r['operation'], '')} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
