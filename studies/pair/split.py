"""Which files are learnt from and which are asked: made before any training, the same on every machine.

    python studies/pair/split.py --qa qa --text enwik8_clean.txt.xz --out runs/pair/data

| file | is |
|---|---|
| `nq-train.jsonl` | NQ questions to learn from |
| `nq.jsonl` | NQ questions held apart: a fifth of the articles their passages come from, with all their questions |
| `xquad.jsonl` | all of XQuAD, held apart |
| `multihop-train.jsonl` | 2WikiMultiHopQA, HotpotQA and MuSiQue questions to learn from, but yes-or-no ones |
| `text-train.txt` | the text but for the held articles |
| `text-held.txt` | its last articles, held apart |

`held.json` beside this file has the digests of the files that are held apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from floatscope.files.records import digest
from floatscope.lab.adapt.held import apart
from floatscope.lab.training.text import read_text
from floatscope.tasks.read import read_samples
from floatscope.tasks.sample import Sample

HELD = Path(__file__).parent / "held.json"
FIFTH = 5
HELD_LINES = 2000  # paragraphs at the end of the text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qa", type=Path, required=True, help="folder of the question files")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/pair/data"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    nq = read_samples(args.qa / "nq-open-oracle.jsonl.gz")
    held = [s for s in nq if is_held(s)]
    xquad = read_samples(args.qa / "xquad.en.json")
    train, _ = apart([s for s in nq if not is_held(s)], [*held, *xquad])
    write(args.out / "nq.jsonl", held)
    write(args.out / "xquad.jsonl", shuffled(xquad))
    write(args.out / "nq-train.jsonl", train)
    files = ("2wiki_500.json.gz", "hotpot_dev_distractor_100.json", "musique_100.json")
    hops = [sample for file in files for sample in read_samples(args.qa / file)]
    hops, _ = apart([s for s in hops if s.answers and s.answers[0].lower() not in ("yes", "no")], [*held, *xquad])
    write(args.out / "multihop-train.jsonl", hops)
    lines = read_text(args.text).splitlines()
    (args.out / "text-train.txt").write_text("\n".join(lines[:-HELD_LINES]), encoding="utf-8")
    (args.out / "text-held.txt").write_text("\n".join(lines[-HELD_LINES:]), encoding="utf-8")
    kept = {name: digest(args.out / name) for name in ("nq.jsonl", "xquad.jsonl", "text-held.txt")}
    if HELD.exists() and json.loads(HELD.read_text()) != kept:
        raise SystemExit(f"the files held apart are not those of {HELD.name}: other question files or another text")
    HELD.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"learnt: {len(train)} NQ, {len(hops)} multi-hop; held apart: {len(held)} NQ, {len(xquad)} XQuAD")


def is_held(sample: Sample) -> bool:
    """By the article of the passage, so that no article is on both sides."""
    return int(hashlib.sha256(sample.passages[0].title.encode()).hexdigest(), 16) % FIFTH == 0


def shuffled(samples: Iterable[Sample]) -> list[Sample]:
    """In an order that depends on their ids alone: the first hundred are of many articles."""
    return sorted(samples, key=lambda s: hashlib.sha256(s.id.encode()).hexdigest())


def write(path: Path, samples: Iterable[Sample]) -> None:
    lines = (json.dumps({**s.as_json(), "id": f"{path.stem}-{i}"}, ensure_ascii=False) for i, s in enumerate(samples))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
