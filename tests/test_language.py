"""The code and the documents keep the field's words: the words of a private dialect do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src/floatscope").rglob("*.py"))
SCRIPTS = sorted(path for folder in ("benchmarks", "studies") for path in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

DENIED_WORDS = frozenset(
    ["told", "said", "asked", "posed", "brought", "spelled", "judged", "legs", "lessons", "dice", "rolls"]
)
"""No identifier has one of these words as a part: a past participle is not a noun, and each had several meanings."""

DENIED_NAMES = frozenset(
    [
        *("able", "ahead", "arms", "ask", "Ask", "behind", "forced", "how", "kept", "Look", "looks", "material"),
        *("seeing", "turned", "whole"),
    ]
)
"""No identifier is one of these."""

DENIED_PHRASES = (
    "broken off",
    "gone on with",
    "goes on with",
    "go on with",
    "cannot be told",
    "the way back",
    "is no valid",
    "is none of",
    "so many of",
    "what is told",
    "rows that decide",
    "rows that write the answer",
)
"""No text a person reads has one of these."""


def words(identifier: str) -> set[str]:
    """The words of an identifier: `read_told` and `ReadTold` → {"read", "told"}."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module defines or uses, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.value.lineno, node.arg


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The comments and strings of a module, with their lines."""
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def denied_identifiers(source: str) -> list[str]:
    return [
        f"{line}: {name}"
        for line, name in identifiers(ast.parse(source))
        if name.strip("_") in DENIED_NAMES or words(name) & DENIED_WORDS
    ]


def denied_phrases(text: str) -> list[str]:
    flat = re.sub(r"\s+", " ", text.lower())
    return [phrase for phrase in DENIED_PHRASES if phrase in flat]


def collect(paths: list[Path], find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """What `find` finds in each of the files that has any of it."""
    found = {str(path.relative_to(ROOT)): find(path.read_text()) for path in paths}
    return {path: places for path, places in found.items() if places}


def test_identifiers_are_plain():
    assert collect([*SOURCES, *SCRIPTS], denied_identifiers) == {}
    assert [path for path in SOURCES if words(path.stem) & DENIED_WORDS] == []


def test_messages_and_comments_are_plain():
    def find(source: str) -> list[str]:
        return [f"{line}: {phrase}" for line, text in texts(source) for phrase in denied_phrases(text)]

    assert collect([*SOURCES, *SCRIPTS], find) == {}


def test_documents_are_plain():
    assert collect(PAGES, denied_phrases) == {}


def test_the_deny_list_finds_what_it_denies():
    found = denied_identifiers("told = 1\ndef read_said(asked): return x.kept\n")
    assert sorted(found) == ["1: told", "2: asked", "2: kept", "2: read_said"]
    assert denied_identifiers("untold_story = whole_number = kept_alive = 1") == []
    assert denied_phrases("A run that was broken\n    off") == ["broken off"]


def private_imports(source: str) -> list[str]:
    """Private names of other modules of the package that a module imports or reaches into."""
    tree = ast.parse(source)
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("floatscope")
    ]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    found = [alias.name for node in imports for alias in node.names if is_private(alias.name)]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
            and node.value.id.islower()
            and is_private(node.attr)
        ):
            found.append(f"{node.value.id}.{node.attr}")
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_private_name_crosses_modules():
    assert collect(SOURCES, private_imports) == {}
    assert private_imports("from floatscope.traces import run\nrun._take_lock()") == ["run._take_lock"]


def test_public_definitions_have_docstrings():
    without = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name, node in _public(ast.parse(path.read_text()))
        if ast.get_docstring(node) is None
    ]
    assert without == []


def _public(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """The public functions and classes of a module, and the public methods of those classes."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_") or is_overload(node):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and not is_overload(inner):
                    yield f"{node.name}.{inner.name}", inner


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether it is a signature for the type checker only."""
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)
