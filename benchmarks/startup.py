"""CPU time of the commands that need no model, and of the imports behind them.

python benchmarks/startup.py

Each command runs five times in its own process; the smallest user + system time counts. `compare` and `report` read
two small runs of the twins, which are made first.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile

GOALS = {"--help": 0.5, "trace --wrong": 0.5, "compare eval-mdm eval-arm": 1.5}
COMMANDS = [*GOALS, "models", "data twin:reading-1", "report trace-mdm trace-arm --out report.html"]
IMPORTS = ["floatscope", "floatscope.traces", "floatscope.analysis", "floatscope.reports.build"]
REPEATS = 5


def cpu_seconds(words: list[str], folder: str) -> float:
    """User and system time of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for twin in ("mdm", "arm"):
            for verb in ("eval", "trace"):
                words = f"{verb} twin:{twin} --data twin:reading-1 --limit 3 --new-tokens 8 --out {verb}-{twin}"
                command = [sys.executable, "-m", "floatscope", *words.split()]
                subprocess.run(command, cwd=folder, capture_output=True, check=True)
        print(f"{'command':50} {'CPU s':>6} {'goal':>6}")
        for words in COMMANDS:
            seconds = min(cpu_seconds(["-m", "floatscope", *words.split()], folder) for _ in range(REPEATS))
            print(f"{'floatscope ' + words:50} {seconds:6.2f} {GOALS.get(words, ''):>6}")
        for module in IMPORTS:
            seconds = min(cpu_seconds(["-c", f"import {module}"], folder) for _ in range(REPEATS))
            print(f"{'import ' + module:50} {seconds:6.2f}")


if __name__ == "__main__":
    main()
