"""Wrong files and flags for floatscope's commands, made from tables: each case prepares its files and names a command.

    for case in make_cases(300, random.Random(0), folder):
        case.prepare()
        run(case.words)

| group | what is wrong |
|---|---|
| records | an entry of run.json, predictions, stress.json, experiment.json or a trace; the digest fits |
| bytes | a file of any kind emptied, cut, made of random bytes or zeros, or a folder in its place |
| configs | a setting of config.json, tokenizer.json or an adapter; hostile settings, templates and GGUF headers |
| questions | fields of questions and templates replaced; wrong JSON, TOML, encodings and archives |
| flags | wrong options and values |
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import robustness_commands as commands

from floatscope.files.records import with_digest
from floatscope.traces.trace_file import BLANK_DIGEST

SHORT = ("--new-tokens", "2", "--device", "cpu")
DATA = ("--data", "twin:reading-1", "--limit", "2")
REMOVED = object()
VALUES = (REMOVED, None, [], {}, "text", "", 1e308, -1, 10**30, True, [[None]], {"a": {"b": None}}, "\u202e\x1b[2J")


@dataclass(frozen=True)
class Case:
    """A wrong input and the command that gets it."""

    name: str
    prepare: Callable[[], object]
    words: list[str]


def make_cases(count: int, rng: random.Random, work: Path) -> Iterator[Case]:
    """Yield cases of all groups in turn, drawn at random; the fixed ones of configs, questions and flags come all."""
    folder = Originals(work)
    fixed = [*fixed_configs(folder), *fixed_questions(folder), *fixed_flags(folder)]
    rng.shuffle(fixed)
    groups = [random_records, random_bytes, random_configs, random_questions]
    yield from fixed[:count]
    for number in range(max(0, count - len(fixed))):
        yield groups[number % len(groups)](folder, rng)


class Originals:
    """Correct files that cases copy and change: `copy("trace")` is a fresh folder with a finished run."""

    def __init__(self, work: Path) -> None:
        from floatscope.models.random_checkpoints import write_random

        self.work, self.home = work, work / "originals"
        self.home.mkdir()
        write_random(self.home / "checkpoint", "llada", layers=1, heads=2, width=16, ffn=16)
        (self.home / "passages.jsonl").write_text('{"id": "a", "text": "Mira lives in Velmora."}\n')
        (self.home / "text.txt").write_text("The river froze, and people walked over it. " * 200)
        (self.home / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        (self.home / "template.toml").write_text(TEMPLATE)
        (self.home / "model.gguf").write_bytes(build_gguf())
        for words in WRITERS.values():
            done = commands.run([word.format(home=self.home) for word in words], 300)
            assert done.status == 0, done.stderr

    def copy(self, name: str) -> Path:
        """A fresh copy, in place of the last one."""
        target = self.work / "case"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.home, target)
        return target / name

    def write(self, name: str, content: str | bytes) -> Callable[[], object]:
        """A function that writes a file into a fresh copy of everything."""

        def prepare() -> None:
            path = self.copy(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

        return prepare

    def path(self, name: str) -> str:
        """The path of a file in the copy."""
        return str(self.work / "case" / name)


TRACE = ("trace", "twin:mdm", *DATA, *SHORT, "--out", "{home}/trace")
EVAL = ("eval", "twin:mdm", *DATA, *SHORT, "--out", "{home}/eval")
STRESS = ("stress", "twin:mdm", "--kind", "position", "--data", "twin:reading-5", "--limit", "1", *SHORT)
EDIT = ("intervene", "twin:mdm", "--edit", "mask_anchors(k=1)", "--draws", "1", *DATA, *SHORT)
ADAPT = ("adapt", "twin:arm", "--text", "{home}/text.txt", "--train-steps", "1", "--batch-tokens", "512")
WRITERS = {
    "trace": TRACE,
    "eval": EVAL,
    "stress": (*STRESS, "--out", "{home}/stress"),
    "intervene": (*EDIT, "--out", "{home}/intervene"),
    "index": ("index", "add", "{home}/index", "{home}/passages.jsonl"),
    "adapted": (*ADAPT, "--rank", "2", "--workers", "0", "--device", "cpu", "--out", "{home}/adapted"),
}
REPORT = ("report", "{home}/trace", "--out", "{home}/page.html")
COMPARE = ("compare", "{home}/eval")
SEARCH = ("index", "search", "{home}/index", "Mira")
DECODE = ("decode", "{home}/checkpoint", "--prompt", "hi", *SHORT)
DECODE_ADAPTED = ("decode", "twin:arm+{home}/adapted/adapter", "--prompt", "hi", *SHORT)
DECODE_GGUF = ("decode", "{home}/model.gguf", "--prompt", "hi", *SHORT)
DESCRIBE = ("models", "{home}/checkpoint")
READ_DATA = ("data", "{home}/questions.jsonl")
ASK = ("eval", "twin:mdm", "--data", "{home}/questions.jsonl", *SHORT, "--out", "{home}/new")
ASK_TEMPLATE = ("eval", "twin:mdm", *DATA, *SHORT, "--template", "{home}/template.toml", "--out", "{home}/new")

FILES: list[tuple[str, tuple[tuple[str, ...], ...]]] = [
    ("trace/run.json", (REPORT, TRACE)),
    ("trace/samples/*.safetensors", (REPORT, TRACE)),
    ("eval/run.json", (COMPARE, EVAL)),
    ("eval/predictions.jsonl", (COMPARE, EVAL)),
    ("stress/*/stress.json", (WRITERS["stress"],)),
    ("stress/*/*/predictions.jsonl", (WRITERS["stress"],)),
    ("stress/*/*/run.json", (WRITERS["stress"],)),
    ("intervene/*/experiment.json", (WRITERS["intervene"],)),
    ("intervene/*/*/run.json", (WRITERS["intervene"],)),
    ("checkpoint/config.json", (DECODE, DESCRIBE)),
    ("checkpoint/tokenizer.json", (DECODE, DESCRIBE)),
    ("checkpoint/tokenizer_config.json", (DECODE, DESCRIBE)),
    ("checkpoint/model.safetensors", (DECODE, DESCRIBE)),
    ("adapted/adapter/adapter.json", (DECODE_ADAPTED,)),
    ("adapted/adapter/adapter_config.json", (DECODE_ADAPTED,)),
    ("adapted/adapter/adapter_model.safetensors", (DECODE_ADAPTED,)),
    ("adapted/c*/**/*.*", (WRITERS["adapted"],)),
    ("model.gguf", (DECODE_GGUF,)),
    ("questions.jsonl", (READ_DATA, ASK)),
    ("template.toml", (ASK_TEMPLATE,)),
    ("index/meta.json", (SEARCH, WRITERS["index"])),
    ("index/tantivy/*", (SEARCH, WRITERS["index"])),
    ("passages.jsonl", (("index", "add", "{home}/new-index", "{home}/passages.jsonl"),)),
    ("text.txt", (("adapt", "twin:arm", "--text", "{home}/text.txt", "--train-steps", "1", "--out", "{home}/n"),)),
]
QUESTIONS: list[dict[str, Any]] = [
    {
        "id": f"q{i}",
        "question": "Where does Mira live?",
        "answers": ["Velmora"],
        "passages": [{"title": "Mira", "text": "Mira lives in Velmora.", "gold": True, "evidence": [[14, 21]]}],
    }
    for i in range(2)
]
TEMPLATE = 'prompt = "{passages}Question: {question}\\nAnswer:"\npassage = "Document {number}: {passage}\\n"\n'


def fill(words: tuple[str, ...], folder: Originals) -> list[str]:
    """A command on the copy."""
    return [word.format(home=folder.work / "case") for word in words]


# Records: the file is well-formed JSON, its digest fits, and an entry is wrong


def random_records(folder: Originals, rng: random.Random) -> Case:
    """Change an entry of a record, at the top or below."""
    pattern, readers = rng.choice([entry for entry in FILES if entry[0].split("/")[0] in RECORD_FOLDERS])
    file = rng.choice(sorted(folder.home.glob(pattern)))
    relative, value, words = file.relative_to(folder.home), rng.choice(VALUES), rng.choice(readers)
    where = rng.random()

    def prepare() -> None:
        path = folder.copy(str(relative))
        if path.suffix == ".safetensors":
            change_trace(path, lambda content: change(content, value, random.Random(where)))
        elif path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            content = json.loads(lines[0])
            content.pop("digest")
            changed = change(content, value, random.Random(where))
            path.write_text("\n".join([json.dumps(sign(changed)), *lines[1:]]) + "\n")
        else:
            content = json.loads(path.read_text())
            content.pop("digest", None)
            path.write_text(json.dumps(sign(change(content, value, random.Random(where))), indent=1))

    return Case(f"{relative} with {show(value)}", prepare, fill(words, folder))


RECORD_FOLDERS = ("trace", "eval", "stress", "intervene")


def change(content: Any, value: object, rng: random.Random) -> Any:
    """Replace or remove a random entry, at a random depth."""
    if not isinstance(content, dict | list) or not content or rng.random() < 0.15:
        return None if value is REMOVED else value
    key = rng.choice(sorted(content)) if isinstance(content, dict) else rng.randrange(len(content))
    if rng.random() < 0.5 and isinstance(content[key], dict | list) and content[key]:
        content[key] = change(content[key], value, rng)
    elif value is REMOVED:
        del content[key]
    else:
        content[key] = value
    return content


def sign(content: Any) -> Any:
    """The record with a digest that fits."""
    return with_digest(content) if isinstance(content, dict) else content


def change_trace(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change the metadata or the header of a trace file and write a digest that fits."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    metadata = header.pop("__metadata__")
    plain = {
        key: metadata[key] if key == "format" else json.loads(metadata[key]) for key in metadata if key != "sha256"
    }
    both = edit({"metadata": plain, "header": header})
    both = both if isinstance(both, dict) else {}
    plain, header = both.get("metadata"), both.get("header")
    if isinstance(plain, dict):
        texts = {key: value if key == "format" else json.dumps(value) for key, value in plain.items()}
        metadata = {**texts, "sha256": BLANK_DIGEST}
    else:
        metadata = plain
    text = json.dumps({"__metadata__": metadata, **(header if isinstance(header, dict) else {})}).encode()
    text = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(text + raw[end:]).hexdigest()
    path.write_bytes(text.replace(BLANK_DIGEST.encode(), digest.encode()) + raw[end:])


def show(value: object) -> str:
    """A value in the name of a case."""
    return "an entry removed" if value is REMOVED else ascii(value)[:30]


# Bytes: the file is not what it was


def random_bytes(folder: Originals, rng: random.Random) -> Case:
    """Damage the bytes of a file of any kind."""
    pattern, readers = rng.choice(FILES)
    file = rng.choice(sorted(path for path in folder.home.glob(pattern) if path.is_file()))
    relative, words, kind, seed = file.relative_to(folder.home), rng.choice(readers), rng.choice(DAMAGES), rng.random()

    def prepare() -> None:
        path = folder.copy(str(relative))
        raw, random_source = path.read_bytes(), random.Random(seed)
        path.unlink()
        if kind == "a folder":
            path.mkdir()
        elif kind == "a loop":
            path.symlink_to(path.name)
        elif kind == "missing":
            return
        else:
            path.write_bytes(damage(raw, kind, random_source))

    return Case(f"{relative} {kind}", prepare, fill(words, folder))


DAMAGES = ("empty", "cut", "random", "zeros", "flipped", "doubled", "a folder", "a loop", "missing")


def damage(raw: bytes, kind: str, rng: random.Random) -> bytes:
    """Damaged bytes."""
    if kind == "cut":
        return raw[: rng.randrange(max(1, len(raw)))]
    if kind == "flipped":
        changed = bytearray(raw)
        for _ in range(min(8, len(raw))):
            changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    size = min(len(raw), 1 << 20)
    return {"empty": b"", "random": rng.randbytes(size), "zeros": bytes(size), "doubled": raw + raw}[kind]


# Configs, tokenizers, templates, GGUF files


def random_configs(folder: Originals, rng: random.Random) -> Case:
    """Replace a setting of a checkpoint or an adapter."""
    name, words = rng.choice(
        [
            ("checkpoint/config.json", DECODE),
            ("checkpoint/config.json", DESCRIBE),
            ("checkpoint/tokenizer.json", DECODE),
            ("checkpoint/tokenizer_config.json", DECODE),
            ("adapted/adapter/adapter.json", DECODE_ADAPTED),
            ("adapted/adapter/adapter_config.json", DECODE_ADAPTED),
            ("index/meta.json", SEARCH),
        ]
    )
    value, where = rng.choice([*VALUES, math.nan, 10**12, "x" * 10**6]), rng.random()

    def prepare() -> None:
        path = folder.copy(name)
        path.write_text(json.dumps(change(json.loads(path.read_text()), value, random.Random(where))))

    return Case(f"{name} with {show(value)}", prepare, fill(words, folder))


HOSTILE_TEMPLATES = (
    "{{ 'a'*20000000000 }}",
    "{% for i in range(10**12) %}x{% endfor %}",
    "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "{{ 9**9**9 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages[0].content.__globals__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages | tojson(indent=2000000000) }}",
    "{% set x = 'a' %}{% for i in range(60) %}{% set x = x + x %}{% endfor %}{{ x }}",
    "{{ raise_exception('no') }}",
    "{% if %}",
    "{{ 'x'.ljust(30000000000) }}",
    "{{ '%20000000000d' % 1 }}",
    "{{ '{:>20000000000}'.format(1) }}",
)
HOSTILE_CONFIGS: tuple[dict[str, Any], ...] = (
    {"n_layers": 10**9, "num_hidden_layers": 10**9},
    {"d_model": 10**9, "hidden_size": 10**9},
    {"vocab_size": 10**12, "embedding_size": 10**12},
    {"rope_theta": 0},
    {"rope_theta": math.nan},
    {"max_sequence_length": 0, "max_position_embeddings": 0},
    {"max_sequence_length": -5, "max_position_embeddings": -5},
    {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "attention_types": [[["global"], 10**12]]},
    {"architectures": ["xLSTMForCausalLM"], "model_type": "xlstm", "num_blocks": 10**9},
    {"architectures": ["ProphetNetForCausalLM"], "model_type": "prophetnet", "num_decoder_layers": 10**8},
    {"architectures": ["Nothing"], "model_type": "nothing"},
    {"architectures": None},
    {"architectures": [], "model_type": []},
    {"mask_token_id": 10**9},
    {"mask_token_id": -1},
    {"mask_token_id": "x"},
    {"quantization_config": {"quant_method": "gptq"}},
    {"auto_map": {"AutoModel": "modeling.Model"}},
    {"n_heads": 0, "num_attention_heads": 0},
    {"n_heads": 3, "num_attention_heads": 3},
    {"torch_dtype": "float1"},
)
HOSTILE_NORMALIZERS: tuple[dict[str, Any], ...] = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**6},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aa" * 50}] * 30},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
)


def fixed_configs(folder: Originals) -> Iterator[Case]:
    """Settings, chat templates, normalisers and GGUF headers that ask for too much, or for nonsense."""

    def edit_json(name: str, changes: dict[str, Any]) -> Callable[[], object]:
        def prepare() -> None:
            path = folder.copy(name)
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return prepare

    for number, changes in enumerate(HOSTILE_CONFIGS):
        words = DECODE if number % 2 else DESCRIBE
        yield Case(f"config {show(changes)}", edit_json("checkpoint/config.json", changes), fill(words, folder))
    for text in HOSTILE_TEMPLATES:
        name, chat = "checkpoint/chat_template.jinja", (*DECODE, "--chat")
        yield Case(f"chat template {text[:30]}", folder.write(name, text), fill(chat, folder))
    for normalizer in HOSTILE_NORMALIZERS:
        changes = {"normalizer": normalizer}
        words = fill((*DECODE[:3], "a" * 200, *DECODE[4:]), folder)
        yield Case(f"normaliser {show(changes)}", edit_json("checkpoint/tokenizer.json", changes), words)
    for name, content in GGUF_FILES.items():
        yield Case(f"GGUF {name}", folder.write("model.gguf", content), fill(DECODE_GGUF, folder))


def build_gguf(tensors: int = 0, values: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    """A GGUF header with these counts."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def _text(text: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode()


_LLAMA = _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
GGUF_FILES = {
    "with 2^60 tensors": build_gguf(2**60),
    "with 2^60 values": build_gguf(0, 2**60),
    "of version 99": build_gguf(version=99),
    "of a header only": build_gguf(0, 1, rest=_LLAMA),
    "with a text of 2^60 bytes": build_gguf(0, 1, rest=_text("a", 2**60)),
    "with an array of 2^60": build_gguf(0, 1, rest=_text("a") + struct.pack("<IIQ", 9, 4, 2**60)),
    "with nested arrays": build_gguf(0, 1, rest=_text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10**5),
    "with 10^9 layers": build_gguf(0, 2, rest=_LLAMA + _text("llama.block_count") + struct.pack("<II", 4, 10**9)),
    "with a tensor of 2^60": build_gguf(1, 1, rest=_LLAMA + _text("a") + struct.pack("<IQIQ", 1, 2**60, 0, 0)),
    "of another kind": b"PK\x03\x04" + bytes(100),
}

# Questions and templates


def random_questions(folder: Originals, rng: random.Random) -> Case:
    """Replace a field of a question."""
    question = change(json.loads(json.dumps(QUESTIONS[0])), rng.choice(VALUES), rng)
    wrapped: Any = rng.choice([question, {**QUESTIONS[0], "unknown": question}, [question], {"data": [question]}])
    text = json.dumps(wrapped) + "\n" + json.dumps(QUESTIONS[1]) + "\n"
    words = rng.choice([READ_DATA, (*READ_DATA, "--skip-bad"), ASK])
    return Case(f"question {ascii(text)[:60]}", folder.write("questions.jsonl", text), fill(words, folder))


WRONG_QUESTIONS = {
    "nothing": b"",
    "white space": b" \n\n \n",
    "deep": b"[" * 200_000,
    "not UTF-8": b'{"question": "\xff\xfe"}\n',
    "UTF-16": json.dumps(QUESTIONS[0]).encode("utf-16"),
    "NUL": b"\0" * 1000,
    "a number": b"12345678901234567890" * 1000,
    "NaN": b'{"id": NaN, "question": NaN}\n',
    "half a surrogate": b'{"id": "a\\ud800", "question": "a", "answers": ["b"]}\n',
    "bidirectional": '{"id": "a\u202eb", "question": "\u2066x\x1b[2J", "answers": ["b"]}\n'.encode(),
    "a long id": json.dumps({**QUESTIONS[0], "id": "x" * 10**5}).encode(),
    "an id twice": (json.dumps(QUESTIONS[0]) + "\n").encode() * 2,
    "misspelt": b'{"id": "a", "question": "a", "answers": ["b"], "passawes": []}\n',
    "gzip cut": gzip.compress(json.dumps(QUESTIONS[0]).encode() * 100)[:-20],
    "xz": lzma.compress(b"[" * 10**6),
    "evidence outside": json.dumps({**QUESTIONS[0], "passages": [{"text": "a", "evidence": [[0, 10**9]]}]}).encode(),
}
WRONG_TEMPLATES = {
    "no TOML": "prompt",
    "a number": "prompt = 1",
    "an unknown field": 'prompt = "{nothing}"',
    "attributes": 'prompt = "{question.__class__}{passages}"',
    "a width": 'prompt = "{question:>20000000000}{passages}"',
    "an index": 'prompt = "{question[0]}{passages}"',
    "braces": 'prompt = "{question} { {passages}"',
    "no question": 'prompt = "a"',
    "deep": "a = " + "[" * 100_000,
    "control characters": 'prompt = "\x1b{question}"',
    "twice": 'prompt = "{question}"\nprompt = "{question}"',
}


def fixed_questions(folder: Originals) -> Iterator[Case]:
    """Files of questions and templates that are wrong as a whole."""
    for name, content in WRONG_QUESTIONS.items():
        file = {"gzip cut": "questions.jsonl.gz", "xz": "questions.jsonl.xz"}.get(name, "questions.jsonl")
        for words in (READ_DATA, ASK):
            changed = tuple(word.replace("questions.jsonl", file) for word in words)
            yield Case(f"questions: {name}", folder.write(file, content), fill(changed, folder))
    for name, text in WRONG_TEMPLATES.items():
        yield Case(f"template: {name}", folder.write("template.toml", text), fill(ASK_TEMPLATE, folder))


# Flags

LONG = "x" * 300
WRONG_WORDS: tuple[tuple[str, ...], ...] = (
    (),
    ("nothing",),
    ("decode",),
    ("decode", "twin:nothing", "--prompt", "x"),
    ("decode", "", "--prompt", "x"),
    ("decode", "\u202e", "--prompt", "x"),
    ("decode", LONG, "--prompt", "x"),
    ("decode", "~nobody/x", "--prompt", "x"),
    ("decode", "org/name", "--prompt", "x"),
    ("decode", "/dev/zero", "--prompt", "x"),
    ("decode", "twin:mdm+", "--prompt", "x"),
    ("decode", "twin:mdm+nothing", "--prompt", "x"),
    ("decode", "twin:mdm", "--prompt", "x", "--sampler", "threshold(tau=2)"),
    ("decode", "twin:mdm", "--prompt", "x", "--sampler", "threshold(tau="),
    ("decode", "twin:mdm", "--prompt", "x", "--sampler", "__import__('os')"),
    ("decode", "twin:mdm", "--prompt", "x", "--new-tokens", "1000000000"),
    ("decode", "twin:mdm", "--prompt", "x" * 100_000),
    ("decode", "twin:mdm", "--prompt", ""),
    ("decode", "twin:mdm", "--prompt", "x", "--steps", "0"),
    ("decode", "twin:mdm", "--prompt", "x", "--temperature", "nan"),
    ("decode", "twin:mdm", "--prompt", "x", "--temperature", "inf"),
    ("decode", "twin:mdm", "--prompt", "x", "--temperature", "1e-300"),
    ("decode", "twin:mdm", "--prompt", "x", "--guidance", "nan"),
    ("decode", "twin:mdm", "--prompt", "x", "--guidance", "1e308"),
    ("decode", "twin:mdm", "--prompt", "x", "--seed", "99999999999999999999999"),
    ("decode", "twin:mdm", "--prompt", "x", "--seed", "-1"),
    ("decode", "twin:mdm", "--prompt", "x", "--top-k", "1000000000"),
    ("decode", "twin:mdm", "--prompt", "x", "--top-p", "nan"),
    ("decode", "twin:mdm", "--prompt", "x", "--layer", "99"),
    ("decode", "twin:mdm", "--prompt", "x", "--device", "cuda:99"),
    ("decode", "twin:mdm", "--prompt", "x", "--device", "tpu"),
    ("decode", "twin:mdm", "--prompt", "x", "--dtype", "int8"),
    ("decode", "twin:mdm", "--prompt", "x", "--mask-id", "99999999999"),
    ("decode", "twin:arm", "--prompt", "x", "--shift"),
    ("decode", "twin:mdm", "--prompt", "x", "--revision", "v1"),
    ("trace", "twin:mdm", "--prompt", "x", "--out", "/proc/nothing"),
    ("trace", "twin:mdm", "--prompt", "x", "--out", "/dev/null"),
    ("trace", "twin:mdm", "--prompt", "x", "--out", LONG),
    ("trace", "twin:mdm", "--data", "/dev/zero", "--out", "{home}/new"),
    ("trace", "twin:mdm", "--data", "/dev/tty", "--out", "{home}/new"),
    ("trace", "twin:mdm", "--data", "{home}", "--out", "{home}/new"),
    ("trace", "twin:mdm", "--prompt", "x", "--out", "{home}/eval"),
    ("trace", "twin:mdm", "--prompt", "x", "--level", "all", "--out", "{home}/new"),
    ("eval", "twin:mdm", *DATA, "--passages", "-1", "--out", "{home}/new"),
    ("eval", "twin:mdm", *DATA, "--retrieve", "{home}/trace", "--out", "{home}/new"),
    ("stress", "twin:mdm", "--kind", "nothing", *DATA, "--out", "{home}/new"),
    ("stress", "twin:mdm", "--kind", "noise", "--set", "counts=x", *DATA, "--out", "{home}/new"),
    ("stress", "twin:mdm", "--kind", "noise", "--set", "counts=99999999999", *DATA, "--out", "{home}/new"),
    ("stress", "twin:mdm", "--kind", "noise", "--set", "nothing", *DATA, "--out", "{home}/new"),
    ("stress", "twin:mdm", "twin:mdm", "--kind", "noise", *DATA, "--out", "{home}/new"),
    ("intervene", "twin:mdm", "--edit", "mask_anchors(k=-1)", *DATA, "--out", "{home}/new"),
    ("intervene", "twin:mdm", "--edit", "mask_anchors(k=10**10**10)", *DATA, "--out", "{home}/new"),
    ("intervene", "twin:mdm", "--edit", "zero_heads(pairs=[(99, 99)])", *DATA, *SHORT, "--out", "{home}/new"),
    ("intervene", "twin:mdm", "--edit", "mask_anchors(" + "[" * 10_000, *DATA, "--out", "{home}/new"),
    ("study", "nothing", "twin:mdm", *DATA, "--out", "{home}/new"),
    ("study", "heads", "twin:mdm", *DATA, *SHORT, "--out", "{home}/new"),
    ("report", "{home}/eval"),
    ("report", "{home}/trace", "--out", "/proc/x.html"),
    ("report", "{home}/trace", "--detector", "nothing(", "--out", "{home}/p.html"),
    ("report", "{home}/trace", "--tables", "/dev/null", "--out", "{home}/p.html"),
    ("report", "{home}/trace", "--figures", "/proc/x", "--out", "{home}/p.html"),
    ("report", "{home}/trace", "{home}/trace", "--out", "{home}/p.html"),
    ("compare", "{home}/trace"),
    ("compare", "{home}/eval", "--out", "{home}/x.docx"),
    ("compare", "{home}/eval", "--out", "/proc/x.md"),
    ("compare", "{home}/eval", "--out", "{home}/[/b].md"),
    ("index", "search", "{home}/trace", "x"),
    ("index", "search", "{home}/index", ""),
    ("index", "search", "{home}/index", '"(((' * 1000),
    ("index", "search", "{home}/index", "x" * 100_000),
    ("index", "remove", "{home}/index", "nothing"),
    ("index", "add", "{home}/trace", "{home}/passages.jsonl"),
    ("index", "add", "/proc/x", "{home}/passages.jsonl"),
    ("lens", "twin:mdm", "--prompt", "x", "--out", "/proc/x.csv", *SHORT),
    ("adapt", "twin:mdm", "--text", "{home}/text.txt", "--out", "{home}/new"),
    ("adapt", "twin:arm", "--text", "/dev/zero", "--out", "{home}/new"),
    ("adapt", "twin:arm", "--out", "{home}/new"),
    ("adapt", "twin:arm", "--text", "{home}/text.txt", "--lr", "nan", "--train-steps", "1", "--out", "{home}/new"),
    ("models", "{home}"),
    ("models", "{home}/adapted/adapter"),
    ("fetch", "nothing"),
    ("twins", "train", "--out", "/proc/x"),
    ("demo", "--out", "/proc/x"),
    ("data", "twin:nothing"),
    ("data", "{home}/questions.jsonl", "--format", "nothing"),
    ("data", "{home}/questions.jsonl", "--model", "nothing/nothing"),
)


def fixed_flags(folder: Originals) -> Iterator[Case]:
    """Wrong options and values."""
    for words in WRONG_WORDS:
        yield Case("flags", lambda: folder.copy(""), fill(words, folder))
