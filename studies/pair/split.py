"""The split into training and held-out files, made before any training and the same on every machine.

    python studies/pair/split.py --qa qa --text enwik8_clean.txt.xz --out runs/pair/data

| file | content |
|---|---|
| `nq-train.jsonl` | NQ questions to train on |
| `nq.jsonl` | held-out NQ questions: a fifth of the articles of their passages, with all questions of each |
| `xquad.jsonl` | all of XQuAD, held out |
| `multihop-train.jsonl` | 2WikiMultiHopQA, HotpotQA and MuSiQue questions to train on, without yes-or-no questions |
| `text-train.txt` | the text without its held-out articles |
| `text-held.txt` | its last articles, held out |

`held_out.json` beside this file has the digests of the held-out files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from floatscope.files.digests import sha256_file
from floatscope.lab.adapt.corpus import exclude_held_out
from floatscope.lab.training.text import read_text
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples

DIGESTS = Path(__file__).parent / "held_out.json"
HELD_OUT_ONE_IN = 5  # articles
HELD_OUT_LINES = 2000  # paragraphs at the end of the text
MULTIHOP = ("2wiki_500.json.gz", "hotpot_dev_distractor_100.json", "musique_100.json")


def main() -> None:
    """Write the files; refuse if the held-out files are not those of held_out.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qa", type=Path, required=True, help="folder of the question files")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/pair/data"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    nq = read_samples(args.qa / "nq-open-oracle.jsonl.gz")
    held_out = [s for s in nq if is_held_out(s)]
    xquad = read_samples(args.qa / "xquad.en.json")
    train, _ = exclude_held_out([s for s in nq if not is_held_out(s)], [*held_out, *xquad])
    write(args.out / "nq.jsonl", held_out)
    write(args.out / "xquad.jsonl", shuffle(xquad))
    write(args.out / "nq-train.jsonl", train)
    multihop = [sample for file in MULTIHOP for sample in read_samples(args.qa / file)]
    open_ended = [s for s in multihop if s.answers and s.answers[0].lower() not in ("yes", "no")]
    multihop, _ = exclude_held_out(open_ended, [*held_out, *xquad])
    write(args.out / "multihop-train.jsonl", multihop)
    lines = read_text(args.text).splitlines()
    (args.out / "text-train.txt").write_text("\n".join(lines[:-HELD_OUT_LINES]), encoding="utf-8")
    (args.out / "text-held.txt").write_text("\n".join(lines[-HELD_OUT_LINES:]), encoding="utf-8")
    digests = {name: sha256_file(args.out / name) for name in ("nq.jsonl", "xquad.jsonl", "text-held.txt")}
    if DIGESTS.exists() and json.loads(DIGESTS.read_text()) != digests:
        raise SystemExit(f"the held-out files are not those of {DIGESTS.name}: other question files or another text")
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"training: {len(train)} NQ, {len(multihop)} multi-hop; held out: {len(held_out)} NQ, {len(xquad)} XQuAD")


def is_held_out(sample: Sample) -> bool:
    """Whether the article of the passage is held out, so that no article is on both sides."""
    return int(hashlib.sha256(sample.passages[0].title.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def shuffle(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples in an order that depends on their ids alone, so that the first hundred mix many articles."""
    return sorted(samples, key=lambda s: hashlib.sha256(s.id.encode()).hexdigest())


def write(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines, with ids made from the file's name."""
    lines = (json.dumps({**s.as_json(), "id": f"{path.stem}-{i}"}, ensure_ascii=False) for i, s in enumerate(samples))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
