"""Hub ids, with a small server on this machine that answers like the hub."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from tiny_checkpoints import edit_json, read_weights, write_tiny

from floatscope.cli.options import check_model
from floatscope.errors import UserError
from floatscope.models import hub as hub_module
from floatscope.models.hub import fetch_config, is_hub_id

COMMIT = "c0ffee" + "0" * 34


class Hub(BaseHTTPRequestHandler):
    """org/name → the files of a folder; `gated` and unknown ones answer as the hub does."""

    folders: dict[str, Path]
    requests: list[str]

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        name = "/".join(parts[2:4] if api else parts[:2])
        if name == "org/gated":
            return self.refuse(403, "GatedRepo")
        if name not in self.folders:
            return self.refuse(401, "RepoNotFound")
        if (parts[5] if api else parts[3]) not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        folder = self.folders[name]
        if api and parts[4] == "tree":
            tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0"} for p in folder.iterdir()]
            return self.send(json.dumps(tree).encode(), body)
        if api:
            files = [{"rfilename": p.name} for p in sorted(folder.iterdir())]
            return self.send(json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode(), body)
        file = folder / parts[4]
        if not file.is_file():
            return self.refuse(404, "EntryNotFound")
        if body:
            self.requests.append(file.name)
        return self.send(file.read_bytes(), body)

    def send(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    home = tmp_path_factory.mktemp("hub")
    small = write_tiny(home / "small", shards=2)
    for extra in ("pytorch_model.bin", "modeling_llada.py", "README.md", "optimizer.pt"):
        (small / extra).write_text("not for us")
    images, bare = write_tiny(home / "images"), home / "bare"
    edit_json(images / "config.json", architectures=["MMadaModelLM"])
    bare.mkdir()
    (bare / "README.md").write_text("no checkpoint")

    class Handler(Hub):
        folders = {"org/small": small, "org/images": images, "org/bare": bare}  # noqa: RUF012
        requests = []  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Handler.requests
    server.shutdown()


def run_code(code: str, cache: Path, **environment: str) -> list[str]:
    """Run code in a process that knows only this hub, and return the lines it prints."""
    start = """
import sys, floatscope as fs
from floatscope.models.description import describe
def print_error(function):
    try:
        function()
    except fs.UserError as error:
        print(error)
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_hub_checkpoint_is_described_fetched_and_cached(hub, tmp_path):
    url, requests = hub
    small = write_tiny(tmp_path / "small")
    requests.clear()
    parameters = sum(t.numel() for t in read_weights(small).values())
    code = """
print(describe("org/small").parameters, describe("org/small").spec.revision)
"""
    lines = run_code(code, tmp_path, HF_ENDPOINT=url)
    assert lines == [f"{parameters} {COMMIT}"]
    assert not any(name.endswith(".safetensors") for name in requests)

    code = """
model = fs.load("org/small", device="cpu")
text = model.tokenizer.decode(model.tokenizer.encode("hi"))
print(model.spec.name, model.spec.revision, model.spec.architecture, text)
"""
    assert run_code(code, tmp_path, HF_ENDPOINT=url) == [f"org/small {COMMIT} llada hi"]
    assert sorted(n for n in requests if n.endswith(".safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    assert not {"pytorch_model.bin", "modeling_llada.py", "README.md", "optimizer.pt"} & set(requests)

    requests.clear()
    assert run_code(code, tmp_path, HF_HUB_OFFLINE="1") == [f"org/small {COMMIT} llada hi"]
    assert requests == []


def test_hub_errors_are_one_sentence(hub, tmp_path):
    url, requests = hub
    requests.clear()
    code = """
print_error(lambda: fs.load("org/images"))
print_error(lambda: fs.load("org/nothing"))
print_error(lambda: fs.load("org/gated"))
print_error(lambda: fs.load("org/bare"))
print_error(lambda: fs.load("org/small", revision="nowhere"))
print_error(lambda: describe("org/images"))
"""
    images, nothing, gated, bare, revision, described = run_code(code, tmp_path, HF_ENDPOINT=url)
    assert images.startswith("org/images: LLaDA-V / MMaDA (MMadaModelLM) cannot be opened: it reads images")
    assert "MMaDA (MMadaModelLM) cannot be opened" in described
    assert nothing.startswith("org/nothing is neither a folder here nor a repository on the hub you can read")
    assert gated == "org/gated is gated; accept its terms on the hub and log in (hf auth login)"
    assert bare == "org/bare has no config.json on the hub, so it is not a transformers checkpoint"
    assert revision == "org/small has no revision 'nowhere' on the hub"
    assert set(requests) <= {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_an_unreachable_hub_is_an_error(tmp_path):
    code = 'print_error(lambda: fs.load("org/small"))\n'
    (line,) = run_code(code, tmp_path, HF_HUB_OFFLINE="1")
    assert line.startswith("org/small is not in the local cache, and the hub cannot be reached (offline?)")


@pytest.fixture(params=["refused", "silent"])
def dead_hub(request, monkeypatch):
    """The address of a hub that refuses connections, or accepts them and never answers."""
    monkeypatch.setattr(hub_module, "PATIENCE", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "silent":
            server.listen()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield


def test_a_dead_hub_is_asked_once_and_then_only_the_cache_is_used(dead_hub, monkeypatch, tmp_path):
    calls = []

    def download(name, **options):
        calls.append(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    fetch_config("org/name")
    monkeypatch.setattr(hub_module.urllib.request, "urlopen", None)  # a second question would fail
    fetch_config("org/name", "v2")
    assert calls == [
        {"filename": "config.json", "revision": None, "local_files_only": True},
        {"filename": "config.json", "revision": "v2", "local_files_only": True},
    ]


def test_a_command_says_at_once_that_the_hub_is_dead(dead_hub, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"^org/name is not in the local cache, and the hub cannot be reached"):
        check_model("org/name")
    (tmp_path / "models--org--name").mkdir()
    check_model("org/name")


def test_any_answer_is_a_sign_of_life(hub, monkeypatch):
    url, _ = hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for address in (url, f"{url}/org/nothing/resolve/main/x", "no address"):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        assert hub_module.is_reachable()


@pytest.mark.parametrize("name", ["org/name", "GSAI-ML/LLaDA-8B-Instruct", "a.b/c_d-e"])
def test_hub_ids_are_recognised(name):
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "../x", "/abs/x", "a/..", "org/na me", "org/name\n", "~/x", "twin:mdm"]
)
def test_other_names_are_not_hub_ids(name):
    assert not is_hub_id(name)
