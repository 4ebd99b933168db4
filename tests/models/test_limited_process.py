"""Work in a child process: its answers, its limits, and that it leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

import floatscope as fs
from floatscope.models.limited_process import ChildError, LimitedProcess, LimitExceeded, Limits, run_limited
from floatscope.models.limited_tokenizer import LimitedTokenizer
from floatscope.models.tokenizer_files import open_tokenizer

SMALL = Limits(seconds=1.0, memory=1 << 28)
LITTLE_MEMORY = Limits(seconds=30.0, memory=1 << 28)  # a busy machine needs seconds to fill 256 MiB


def evaluate(expression):
    return eval(expression, {"os": os})


@pytest.fixture
def process():
    process = LimitedProcess(evaluate, SMALL)
    yield process
    process.close()


def test_answers_are_json_and_one_child_gives_them_all(process):
    assert process.request("[1, 'é \\ud800 \\0', None, {'a': 2.5}]") == [1, "é \ud800 \0", None, {"a": 2.5}]
    children = {process.request("os.getpid()") for _ in range(50)}
    assert len(children) == 1
    assert os.getpid() not in children


@pytest.mark.parametrize(
    ("limits", "work", "message"),
    [
        (LITTLE_MEMORY, "'a' * 20_000_000_000", "it needs more than 256 MiB of memory"),
        (LITTLE_MEMORY, "[bytes(1000) for _ in range(10**7)]", "it needs more than 256 MiB of memory"),
        (SMALL, "(10**7) ** (10**7)", "it needs more than 1 s"),
        (Limits(memory=1 << 30), "'a' * (1 << 27)", "its result is larger than 64.0 MiB"),
        (LITTLE_MEMORY, "os.abort()", "it needs more than 256 MiB of memory"),  # as Rust does without memory
        (SMALL, "os.kill(os.getpid(), 11)", r"it crashes the process that reads it \(status -11\)"),
    ],
)
def test_a_limit_ends_the_child_and_the_next_request_has_a_new_one(limits, work, message):
    process = LimitedProcess(evaluate, limits)
    with pytest.raises(LimitExceeded, match=message):
        process.request(work)
    assert process.request("1 + 1") == 2
    process.close()


def test_every_request_has_its_own_time():
    def spend(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return seconds

    process = LimitedProcess(spend, SMALL)
    assert [process.request(0.6) for _ in range(2)] == [0.6] * 2  # more than the limit together


def test_errors_cross_the_boundary():
    def fail(kind):
        if kind == "user":
            raise fs.UserError("say less")
        raise KeyError(kind)

    process = LimitedProcess(fail, SMALL)
    with pytest.raises(fs.UserError, match=r"^say less$"):
        process.request("user")
    with pytest.raises(ChildError, match="KeyError: 'bug'"):
        process.request("bug")


def test_run_limited_raises_user_errors_and_leaves_bugs_to_this_process():
    def fail(error):
        raise error

    run_limited(lambda: object(), SMALL)
    run_limited(lambda: fail(KeyError("met again here")), SMALL)
    with pytest.raises(fs.UserError, match="say less"):
        run_limited(lambda: fail(fs.UserError("say less")), SMALL)


def test_a_wrapped_memory_error_is_a_limit():
    def wrap():
        try:
            return "a" * 20_000_000_000
        except MemoryError as error:
            raise fs.UserError("something else") from error

    with pytest.raises(LimitExceeded, match="of memory"):
        run_limited(wrap, SMALL)


def test_the_child_shares_no_files_and_no_terminal(tmp_path, capfd):
    def list_files(_):
        sys.stdout.write("out")
        sys.stdout.flush()
        os.write(2, b"err")
        return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]

    with (tmp_path / "run.lock").open("w"):
        names = LimitedProcess(list_files, SMALL).request(None)
    assert names.count("/dev/null") >= 3
    assert not any("run.lock" in name for name in names)
    assert capfd.readouterr() == ("", "")


def test_the_child_ends_with_its_owner(process):
    child = process.request("os.getpid()")
    process.close()
    assert not Path(f"/proc/{child}").exists()
    other = LimitedProcess(evaluate, SMALL)
    child = other.request("os.getpid()")
    del other
    assert not Path(f"/proc/{child}").exists()


def test_the_children_of_a_killed_process_end():
    code = (
        "import sys, time; from floatscope.models.limited_process import LimitedProcess\n"
        "children = [LimitedProcess(eval) for _ in range(3)]\n"
        "print(*[c.request('__import__(\"os\").getpid()') for c in children], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        children = owner.stdout.readline().split()
        assert len(children) == 3
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_fork_of_the_owner_has_its_own_child(process):
    before = process.request("os.getpid()")
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, str(process.request("os.getpid()")).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 100)) != before
    os.close(read)
    os.close(write)
    assert process.request("os.getpid()") == before


def test_threads_take_turns(process):
    answers: dict[int, list[int]] = {i: [] for i in range(4)}

    def work(i):
        answers[i] = [process.request(f"{i} * 1000 + {k}") for k in range(50)]

    threads = [threading.Thread(target=work, args=(i,)) for i in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: [i * 1000 + k for k in range(50)] for i in range(4)}


@pytest.mark.parametrize("architecture", ["llada", "bert"])
def test_a_limited_tokenizer_gives_what_an_unlimited_one_gives(tmp_path, monkeypatch, architecture):
    folder = write_tiny(tmp_path / "m", architecture)
    limited = open_tokenizer(folder, has_separator=architecture == "bert")
    assert isinstance(limited, LimitedTokenizer)
    monkeypatch.setattr("floatscope.models.tokenizer_files.is_shipped", lambda folder: True)
    plain = open_tokenizer(folder, has_separator=architecture == "bert")
    assert not isinstance(plain, LimitedTokenizer)
    for tokenizer in (limited, pickle.loads(pickle.dumps(limited))):
        for text in ("", "What floats? é 語 😀\n", "x" * 300):
            for chat in {False, plain.has_chat_template}:
                assert tokenizer.encode(text, chat) == plain.encode(text, chat)
                assert tokenizer.encode_with_offsets(text, chat) == plain.encode_with_offsets(text, chat)
            ids = plain.encode(text)
            assert tokenizer.decode(ids) == plain.decode(ids)
            assert tokenizer.pieces(ids) == plain.pieces(ids)
        assert tokenizer.suffix == plain.suffix


def test_messages_that_are_not_json_are_refused(tmp_path):
    tokenizer = open_tokenizer(write_tiny(tmp_path / "m"))
    with pytest.raises(fs.UserError, match="messages must hold texts"):
        tokenizer.encode([{"role": "user", "content": object()}], chat=True)
    assert tokenizer.encode("hi", chat=True)
