"""Runs command lines as a shell would, but `floatscope` in this process, where everything is imported once."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from floatscope.cli.main import app


def all_commands() -> list[str]:
    """The names of all commands and groups, such as "index add"; "" is `floatscope` itself."""

    def walk(group: object, prefix: str) -> list[str]:
        names = []
        for name, command in getattr(group, "commands", {}).items():
            path = f"{prefix} {name}".strip()
            names += [path, *walk(command, path)]
        return names

    return ["", *walk(get_command(app), "")]


def split_commands(text: str) -> list[str]:
    """The commands of a shell text; a line that ends in \\ or | continues, comments are left out."""
    joined = text.replace("\\\n", " ").replace("|\n", "| ")
    return [line.strip() for line in joined.splitlines() if shlex.split(line, comments=True)]


def run_command(line: str, folder: Path) -> str:
    """What a command prints; it must end with status 0."""
    before, pipe, command = line.rpartition("| floatscope ")
    stdin = _run_shell(before, folder) if pipe else ""
    if not pipe and not line.startswith("floatscope"):
        return _run_shell(line, folder)
    words = shlex.split(command if pipe else line.removeprefix("floatscope"), comments=True)
    target = words.pop() if words[-2:-1] == [">"] else None
    if target:
        words.pop()
    with contextlib.chdir(folder):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, input=stdin)
    assert done.exit_code == 0, f"{line}\n{done.output}"
    if target:
        (folder / target).write_text(done.stdout)
    return done.stdout


def _run_shell(line: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    done = subprocess.run(["sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout
