"""What kills, malformed inputs and flipped bits do to floatscope's commands: counts, and every failure by name.

    python benchmarks/robustness.py                      # all three, in a temporary folder
    python benchmarks/robustness.py --kills 10 --malformed 0 --flips 0 --seed 1

kills       commands killed (-9) at random times, up to three times in a row, then run to their end; the files are
            compared with those of an unbroken run, byte for byte
malformed   wrong files and flags (`malformed_inputs.py`): a command must end with one sentence, within 2 GB and
            20 s of processor time (on the clock, which other work slows down, within 100 s); a traceback is tried again
            in a fresh interpreter, and counted apart if it does not come again
flips       one bit of one file of a finished run flipped (not of locks, which hold no results); the command that reads
            the run, or the same command again, must name the file

The models are the shipped twins and tiny ones with random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import malformed_inputs
import robustness_commands as commands
from watch_cost import machine

from floatscope.tasks.sample_files import read_shipped

SECONDS, BYTES = 20.0, 2e9
QUESTIONS = ("--data", "twin:reading-5", "--new-tokens", "3", "--batch-size", "1", "--device", "cpu")
VOLATILE = ("provenance", "resumed", "digest", "seconds", "created", "segments", "training", "history")
"""Entries of JSON files that differ between two runs of the same command: times and machines."""


@dataclass(frozen=True)
class Task:
    """A command that can be killed, and what must not depend on it."""

    name: str
    words: Callable[[Path], list[str]]  # the command that writes to a folder
    fingerprint: Callable[[Path], dict[str, str]]  # names and contents that two runs share


@dataclass
class Counts:
    """The results of a part, and a line about each failure."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.failures.append(f"{kind}: {text}")
        print(self.failures[-1], flush=True)


# The commands


def make_tasks(inputs: Path) -> list[Task]:
    """The commands, each with a small job."""
    text, passages = inputs / "text.txt", inputs / "passages.jsonl"
    samples = read_shipped("reading-5")
    text.write_text("\n".join(passage.text for sample in samples[:60] for passage in sample.passages))
    lines = [{"id": f"{s.id}-{i}", "text": p.text} for s in samples for i, p in enumerate(s.passages)]
    passages.write_text("".join(json.dumps(line) + "\n" for line in lines))
    adapt = ["adapt", "twin:arm", "--text", str(text), "--train-steps", "4", "--batch-tokens", "512", "--rank", "2"]
    stress = ["stress", "twin:mdm", "--kind", "position", "--limit", "2", *QUESTIONS]
    edit = ["intervene", "twin:mdm", "--edit", "mask_anchors(k=1)", "--draws", "1", "--limit", "2", *QUESTIONS]
    study = [
        "study",
        "sinks",
        "twin:mdm",
        "--set",
        "counts=1",
        "--set",
        "draws=1",
        "--set",
        "types=none",
        "--limit",
        "2",
        *QUESTIONS,
    ]
    trace = ["trace", "twin:mdm", "--untrained-controls", "1", "--limit", "4", *QUESTIONS]
    plans = {
        "trace": lambda out: [*trace, "--out", str(out)],
        "eval": lambda out: ["eval", "twin:mdm", "--limit", "6", *QUESTIONS, "--out", str(out)],
        "stress": lambda out: [*stress, "--out", str(out)],
        "intervene": lambda out: [*edit, "--out", str(out)],
        "study": lambda out: [*study, "--out", str(out)],
        "adapt": lambda out: [*adapt, "--workers", "0", "--device", "cpu", "--out", str(out)],
    }
    tasks = [Task(name, words, read_files) for name, words in plans.items()]
    return [*tasks, Task("index add", lambda out: ["index", "add", str(out), str(passages)], read_index)]


def read_files(folder: Path) -> dict[str, str]:
    """Path → contents, without locks; JSON objects without their volatile entries."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")):
        raw = path.read_bytes()
        if path.suffix == ".json":
            content = json.loads(raw)
            raw = json.dumps({key: value for key, value in content.items() if key not in VOLATILE}).encode()
        found[str(path.relative_to(folder))] = raw.hex()
    return found


def read_index(folder: Path) -> dict[str, str]:
    """The number of passages and the digest of an index, all checksums compared, and the hits of a question."""
    stat = json.loads(commands.run(["index", "stat", str(folder), "--check", "--json"]).stdout or "{}")
    hits = commands.run(["index", "search", str(folder), "Where does Mira live?", "--json"]).stdout
    return {"passages": str(stat.get("passages")), "digest": str(stat.get("digest")), "hits": hits}


# Kills


def kill_commands(count: int, rng: random.Random, work: Path) -> Counts:
    """Kill commands at random times, run them to their end and compare."""
    result = Counts("kills")
    tasks = make_tasks(work)
    unbroken = {}
    for task in tasks:
        folders = [work / f"{task.name}-unbroken-{i}" for i in range(2)]
        done = [commands.run(task.words(folder), 300) for folder in folders]
        assert all(each.status == 0 for each in done), done[0].stderr
        first, second = (task.fingerprint(folder) for folder in folders)
        stable = {name for name in first if first[name] == second.get(name)}
        unbroken[task.name] = (first, stable, done[1].seconds)
        print(f"{task.name}: {done[1].seconds:.1f} s, {len(stable)} of {len(first)} files do not depend on the time")
    while result.counts["killed"] < count:
        task = tasks[result.counts["trials"] % len(tasks)]
        folder = work / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        result.counts["trials"] += 1
        expected, stable, seconds = unbroken[task.name]
        for _ in range(rng.randint(1, 3)):
            if result.counts["killed"] < count:
                result.counts["killed"] += commands.run_and_kill(task.words(folder), rng.uniform(0.0, seconds))
                for claim in find_false_claims(folder):
                    result.fail("false status", f"{task.name}: {claim}")
        done = commands.run(task.words(folder), 300)
        if done.status != 0:
            result.fail("not resumed", f"{task.name}: {done.stderr.strip()[-300:]}")
            continue
        found = task.fingerprint(folder)
        for name in expected:
            if name not in found:
                result.fail("lost", f"{task.name}: {name}")
            elif name in stable and found[name] != expected[name]:
                result.fail("different", f"{task.name}: {name}")
        for name in found.keys() - expected.keys():
            result.fail("left over", f"{task.name}: {name}")
        for text in find_duplicates(folder):
            result.fail("duplicated", f"{task.name}: {text}")
        for claim in find_false_claims(folder, is_over=True):
            result.fail("false status", f"{task.name}: {claim}")
    return result


def find_false_claims(folder: Path, is_over: bool = False) -> Iterator[str]:
    """Runs that say they are finished and are not; with `is_over` also those that are and do not say it."""
    for file in folder.rglob("run.json"):
        record = json.loads(file.read_text())
        predictions = file.with_name("predictions.jsonl")
        if "kind" in record["settings"]:
            count = predictions.read_bytes().count(b"\n") if predictions.exists() else 0
        else:
            count = len(list((file.parent / "samples").glob("*.safetensors")))
        is_finished = count == len(record["samples"])
        if (record["status"] == "finished" and not is_finished) or (is_over and record["status"] != "finished"):
            yield f"{file.relative_to(folder)} says {record['status']}, {count} of {len(record['samples'])} are there"


def find_duplicates(folder: Path) -> Iterator[str]:
    """Predictions of one sample that occur twice."""
    for file in folder.rglob("predictions.jsonl"):
        ids = Counter(json.loads(line)["id"] for line in file.read_text().splitlines())
        yield from (f"{file.relative_to(folder)}: {name}" for name, times in ids.items() if times > 1)


# Malformed inputs


def try_malformed(count: int, rng: random.Random, work: Path) -> Counts:
    """Give commands wrong files and flags."""
    result = Counts("malformed")
    for case in malformed_inputs.make_cases(count, rng, work):
        case.prepare()
        done = commands.run(case.words, 5 * SECONDS, folder=work)
        result.counts["tried"] += 1
        result.counts["refused"] += done.status == 2
        result.counts["accepted"] += done.status == 0
        text = f"{case.name}: floatscope {' '.join(case.words)}"
        if done.status == 0:
            print(f"accepted: {text}", flush=True)
        is_slow = done.processor_seconds > SECONDS or done.seconds > 5 * SECONDS
        if done.has_traceback and not is_slow:
            case.prepare()
            is_certain = commands.run_fresh(case.words, work).has_traceback
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            result.fail(
                "traceback" if is_certain else "traceback in a fork only",
                f"{text}\n    status {done.status}, {''.join(last)[:200]}",
            )
        if is_slow:
            result.fail("over 20 s", f"{text}\n    {done.processor_seconds:.0f} s, {done.seconds:.0f} s on the clock")
        if done.bytes > BYTES:
            result.fail("over 2 GB", f"{text}\n    {done.bytes / 1e9:.1f} GB")
    return result


# Flipped bits


def flip_bits(count: int, rng: random.Random, work: Path) -> Counts:
    """Flip single bits in the files of finished runs, and open them."""
    result = Counts("flips")
    tasks = [task for task in make_tasks(work) if task.name in ("trace", "eval", "stress", "intervene")]
    originals = {task.name: work / f"{task.name}-original" for task in tasks}
    for task in tasks:
        done = commands.run(task.words(originals[task.name]), 300)
        assert done.status == 0, done.stderr
    while result.counts["flipped"] < count:
        task = tasks[result.counts["flipped"] % len(tasks)]
        folder = work / "flipped"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(originals[task.name], folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
        file = rng.choice(files)
        raw = bytearray(file.read_bytes())
        before, bit = bytes(raw), rng.randrange(8 * len(raw))
        raw[bit // 8] ^= 1 << bit % 8
        file.write_bytes(raw)
        result.counts["flipped"] += 1
        result.counts[classify(task, folder, file, before, result)] += 1
    return result


def classify(task: Task, folder: Path, file: Path, before: bytes, result: Counts) -> str:
    """What became of a flipped bit."""
    reader = {"trace": "report", "eval": "compare"}.get(task.name)
    words = [reader, str(folder), *(["--out", str(folder.parent / "page.html")] if reader == "report" else [])]
    tries = [words] if reader else []
    for words in [*tries, task.words(folder)]:
        done = commands.run(words, 120)
        name = file.parent.name if file.name == "predictions.jsonl" else file.name
        if done.status == 2 and (file.name in done.stderr or name in done.stderr):
            return "detected and named"
        if done.status != 0:
            result.fail("not named", f"{task.name}: {file.relative_to(folder)}: {done.stderr.strip()[-200:]}")
            return "unclear"
    if file.read_bytes() == before:
        return "written again, as it was"
    if read_files(folder) == read_files(folder.parent / f"{task.name}-original"):
        return "written again, or the same value"
    result.fail("undetected", f"{task.name}: {file.relative_to(folder)}")
    return "undetected (see below)"


def main() -> None:
    """Run the parts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("kills", 100), ("malformed", 300), ("flips", 60), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    commands.preload()
    parts = {"kills": kill_commands, "malformed": try_malformed, "flips": flip_bits}
    results = []
    for name, part in parts.items():
        if count := getattr(arguments, name):
            with TemporaryDirectory() as work:
                results.append(part(count, random.Random(f"{arguments.seed} {name}"), Path(work)))
    print(f"\n{machine('cpu')}, seed {arguments.seed}")
    for result in results:
        for kind, number in result.counts.items():
            print(f"{result.name:<10} {kind:<32} {number:>5}")
        for failure in result.failures:
            print(f"  {failure}")
    sys.exit(any(result.failures for result in results))


if __name__ == "__main__":
    main()
