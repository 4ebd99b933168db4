"""Tracing many samples: regions where they should be, runs that compare, and nothing lost or changed by a break."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import floatscope as fs
from floatscope.errors import UserError
from floatscope.pipelines import trace as module
from floatscope.pipelines.trace import plan_trace
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.template import load_template
from floatscope.traces import find_controls, open_run
from jobs import interrupt_after, read_notes, run_batches
from pairs import slow_except

MIRA = Passage("Mira", "Mira lives in Velmora.", True, ((14, 21),))
JON = Passage("Jon", "Jon keeps a cöw.")
SAMPLES = [
    Sample("one", "Where does Mira live?", ("Velmora",), (JON, MIRA), {"kind": "reading"}),
    Sample("two", "What does Jon keep?", ("cöw",), (JON,), {"kind": "reading"}),
    Sample("three", "Who?", ("Mira", "Jon")),
    Sample("four", "What is the name of the third person, if there is one?", ()),
    Sample("five", "Whom?", ("Jon",)),
]
SHORT = {"new_tokens": 4}
TRACED = {"batch_size": 3, "temperature": 1.0}
LAYOUTS = ("llada", "dream", "llama", "bert")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home, shape = tmp_path_factory.mktemp("models"), {"layers": 2, "width": 32, "ffn": 48, "context": 512}
    return {name: fs.load(fs.write_random(home / name, name, seed=3, **shape), device="cpu") for name in LAYOUTS}


@pytest.fixture(scope="module")
def twins():
    return {name: fs.load(f"twin:{name}", device="cpu") for name in ("mdm", "arm", "mdm-adapted")}


@pytest.fixture(scope="module")
def traced(models, tmp_path_factory):
    """The folder of a finished run in batches of three; tests change a copy of it."""
    folder = tmp_path_factory.mktemp("traced") / "run"
    trace(models["llada"], folder, **TRACED)
    return folder


def trace(model, out, samples=SAMPLES, **settings):
    return run_batches(plan_trace(model, samples, out, **{**SHORT, **settings}))


def files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "samples").iterdir())}


def message(trace, region) -> str:
    """The text of a region, from the trace alone."""
    at = trace.coords["region"].index(region)
    positions = np.flatnonzero(trace.arrays["region_member"][:, at])
    ids = trace.arrays["tokens_after"][positions]
    return "".join(trace.meta["pieces"][str(i)] for i in ids)


# --- what a trace holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", ["mdm", "arm", "mdm-adapted"])
def test_regions_hold_the_words_they_are_named_for(twins, twin, tmp_path):
    """Samples of many lengths in one batch: the padding moves nothing."""
    samples = [
        *read_samples("twin:reading-5", 2),
        *read_samples("twin:two-hop", 1),
        *read_samples("twin:closed-book", 1),
        *read_samples("twin:few-shot", 1),
    ]
    trace(twins[twin], tmp_path / "run", samples)
    for sample in samples:
        job = open_run(tmp_path / "run").trace(sample.id)
        solid = {name: message(job, name).strip() for name in job.coords["region"]}
        for number, passage in enumerate(sample.passages, 1):
            assert solid[f"document {number}"] == passage.text
        assert solid["question"] == sample.question
        assert message(job, "bos") == "<|beginoftext|>"
        if sample.passages:
            assert solid["gold"] == "\n ".join(p.text for p in sample.passages if p.gold)
            spoken = [p.text[a:b] for p in sample.passages for a, b in p.evidence]
            assert solid["evidence"] == " ".join(spoken)
        written = "".join(f"Document {n}:" for n in range(1, len(sample.passages) + 1)) + "Question:Answer:"
        assert solid["template"] == written
        answer = job.coords["region"].index("answer")
        keys = job.arrays["region_member"].shape[0]
        assert np.flatnonzero(job.arrays["region_member"][:, answer]).tolist() == list(
            range(len(job.arrays["tokens_after"]) - 4, keys)
        )


@pytest.mark.parametrize("chat", [None, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_model_is_traced_with_and_without_its_chat_template(models, layout, chat, tmp_path):
    trace(models[layout], tmp_path / "run", chat=chat)
    run = open_run(tmp_path / "run")
    templated = chat is None and layout != "bert"
    assert run.settings["chat"] is templated
    assert run.settings["template"] == "default"
    job = run.trace("one")
    ids = models[layout].tokenizer.encode(load_template().prompt(SAMPLES[0]).text, chat=templated)
    assert job.arrays["tokens_after"][: len(ids)].tolist() == ids
    # Bytes are tokens here: a space is one, and in the region it is in; half a character shows as broken.
    assert message(job, "document 2") == MIRA.text
    assert message(job, "evidence") == "Velmora"
    assert message(job, "document 1") == JON.text.replace("ö", "\ufffd\ufffd")
    around = {"llada": "user\n\n{}assistant\n\n", "dream": "user\n{}\nassistant\n", "llama": "user\n{}\nassistant\n"}
    scaffold = "Document 1: \nDocument 2: \nQuestion: \nAnswer:"
    plain = re.sub(r"<\|\w+\|>|\[\w+\]", "", message(job, "template"))  # special tokens are template too
    assert plain == (around[layout].format(scaffold) if templated else scaffold)
    parts = [i for i, name in enumerate(job.coords["region"]) if name not in ("gold", "evidence")]
    assert (job.arrays["region_member"][:, parts].sum(1) == 1).all()
    assert ("bos" in job.coords["region"]) == (layout == "llada" and templated)


def test_a_bare_prompt_is_one_region(twins, tmp_path):
    trace(twins["mdm"], tmp_path / "run", ["What floats?", "And what sinks?"])
    run = open_run(tmp_path / "run")
    assert run.samples == ("prompt-1", "prompt-2")
    assert run.trace("prompt-2").coords["region"] == ("bos", "prompt", "answer")
    assert message(run.trace("prompt-2"), "prompt") == "And what sinks?"
    assert run.settings["template"] is None
    assert trace(twins["mdm"], tmp_path / "one", "What floats?")[0].total == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_holds_what_a_reader_without_the_model_needs(models, layout, tmp_path):
    model = models[layout]
    trace(model, tmp_path / "run")
    for sample in SAMPLES:
        job = open_run(tmp_path / "run").trace(sample.id)
        used = set()
        for name in ("tokens", "tokens_after", "commit_token"):
            used |= set(job.arrays[name].ravel().tolist())
        assert {int(i) for i in job.meta["pieces"]} == used - {-1}
        assert all(model.tokenizer.pieces([int(i)]) == [piece] for i, piece in job.meta["pieces"].items())
        assert job.meta["paradigm"] == model.spec.paradigm
        assert job.meta["special"].get("mask") == model.spec.mask_id
        assert job.meta["special"].get("eos") == model.spec.eos_id
        assert set(job.meta["special_ids"]) == {i for i in used if i in model.tokenizer.special_ids}
        assert (job.meta["answers"], job.meta["sample_meta"]) == (list(sample.answers), sample.meta)
        assert (job.meta["acc"] is None) == (not sample.answers)
        assert isinstance(job.meta["prediction"], str)


def test_the_trace_is_that_of_decode(models, tmp_path):
    model = models["llada"]
    trace(model, tmp_path / "run", temperature=1.0, seed=5, batch_size=1, sampler="margin", block=2)
    prompt = load_template().prompt(SAMPLES[1]).text
    alone = fs.decode(
        model, prompt, watch=fs.Watch(), samples=["two"], temperature=1.0, seed=5, sampler="margin", block=2, **SHORT
    )
    job = open_run(tmp_path / "run").trace("two")
    for name in ("tokens", "states", "received", "row_mass", "tokens_after", "commit_confidence"):
        np.testing.assert_allclose(job.arrays[name], alone.trace.arrays[name], rtol=1e-5, atol=1e-7)
    assert job.meta["prediction"] == alone.text
    assert {k: v for k, v in job.meta.items() if k in alone.meta} == json.loads(json.dumps(alone.meta))


def test_two_models_on_the_same_samples_are_comparable(twins, tmp_path):
    samples = read_samples("twin:reading-1", 3)
    for name, twin in twins.items():
        trace(twin, tmp_path / name, samples, new_tokens=6, steps=6)
    runs = [open_run(tmp_path / name) for name in twins]
    assert len({run.settings["samples_sha256"] for run in runs}) == 1
    assert len({run.samples for run in runs}) == 1
    for sample in samples:
        job = [run.trace(sample.id) for run in runs]
        assert len({t.arrays["received"].shape[:3] for t in job}) == 1
        assert len({t.coords["region"] for t in job}) == 1
        assert len({len(t.arrays["tokens_after"]) for t in job}) == 1
        assert len({message(t, "document 1") for t in job}) == 1


def test_an_end_of_text_ends_the_prediction_but_not_the_steps(models, tmp_path):
    model = models["llama"]
    first = fs.decode(model, "What floats?", new_tokens=1).tokens[0, -1].item()
    ends = replace(model, spec=replace(model.spec, eos_id=first))
    trace(ends, tmp_path / "run", ["What floats?", "What?"], new_tokens=6)
    for job in open_run(tmp_path / "run"):
        assert len(job.arrays["keys"]) == 6
    assert open_run(tmp_path / "run").trace("prompt-1").meta["prediction"] == ""


def test_an_autoregressive_model_takes_a_step_per_token_and_no_other_number(models, tmp_path):
    trace(models["llama"], tmp_path / "run", steps=4)
    with pytest.raises(UserError, match="steps does not apply to 'ar'"):
        trace(models["llama"], tmp_path / "other", steps=3)


# --- batches, breaks, resuming ---------------------------------------------------------------------------------------


def test_the_longest_samples_come_first_and_similar_lengths_share_a_batch(models, tmp_path):
    trace(models["llada"], tmp_path / "run", batch_size=2)
    assert open_run(tmp_path / "run").plan == [["one", "four"], ["two", "five"], ["three"]]


def test_a_model_that_cannot_be_padded_gets_batches_of_one_length(models, tmp_path):
    samples = ["aaaa", "bb", "cc", "dddd", "ee"]
    alone = replace(models["llada"], spec=replace(models["llada"].spec, supports_padding=False))
    trace(alone, tmp_path / "run", samples, batch_size=2, chat=False)
    plan = [["prompt-1", "prompt-4"], ["prompt-2", "prompt-3"], ["prompt-5"]]
    assert open_run(tmp_path / "run").plan == plan


@pytest.mark.parametrize("written", slow_except([1, 2, 3, 4], 1, 2))
def test_an_interrupted_run_resumes_to_the_same_bytes(models, tmp_path, written):
    settings = {"temperature": 1.0, "batch_size": 2, "watch": fs.Watch("rows")}
    trace(models["llada"], tmp_path / "unbroken", **settings)
    interrupt_after(written, plan_trace(models["llada"], SAMPLES, tmp_path / "broken", **settings, **SHORT))
    early = open_run(tmp_path / "broken").finished
    assert len(early) == written
    late = trace(models["llada"], tmp_path / "broken", **settings)
    assert sorted([*early, *(sample for batch in late for sample in batch.samples)]) == sorted(s.id for s in SAMPLES)
    assert files(tmp_path / "broken") == files(tmp_path / "unbroken")
    assert trace(models["llada"], tmp_path / "broken", **settings) == []


@pytest.mark.parametrize("layout", ["llada", "llama"])
def test_influence_survives_an_interruption_and_is_a_setting_of_the_run(models, layout, tmp_path):
    settings = {"samples": SAMPLES[2:], "temperature": 1.0, "batch_size": 2, "watch": fs.Watch(influence=True)}
    trace(models[layout], tmp_path / "unbroken", **settings)
    interrupt_after(1, plan_trace(models[layout], out=tmp_path / "broken", **settings, **SHORT))  # of a batch of two
    with pytest.raises(UserError, match=r'fields \(.*\), first at entry \d+: "influence" in the folder, nothing now'):
        trace(models[layout], tmp_path / "broken", **{**settings, "watch": fs.Watch()})
    trace(models[layout], tmp_path / "broken", **settings)
    assert files(tmp_path / "broken") == files(tmp_path / "unbroken")
    for job in open_run(tmp_path / "broken"):
        assert job.meta["fields"][-1] == "influence"
        assert len(job.arrays["influence"]) == 4


CHILD = """
import json, os, signal, sys
import floatscope as fs
from floatscope.tasks.sample_files import read_samples
from floatscope.pipelines.trace import plan_trace
from floatscope.traces.run import Run
model, data, out, after = sys.argv[1:]
write, written = Run.write, []
def write_or_die(run, trace):
    write(run, trace)
    written.append(trace)
    if len(written) == int(after):
        os.kill(os.getpid(), signal.SIGKILL)
Run.write = write_or_die
list(plan_trace(fs.load(model, device="cpu"), read_samples(data), out, batch_size=3, temperature=1.0, new_tokens=4,
                controls=(0, 1)))
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_and_changes_nothing(models, tmp_path):
    fs.write_random(tmp_path / "model", "dream", seed=3, layers=2, width=32)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(s.as_json()) + "\n" for s in SAMPLES))

    def start(out, after):
        words = [sys.executable, "-c", CHILD, tmp_path / "model", tmp_path / "data.jsonl", tmp_path / out, str(after)]
        return subprocess.run(words, check=False, timeout=300).returncode

    assert start("unbroken", 0) == 0
    assert start("killed", 2) == -signal.SIGKILL  # in the middle of the first batch
    assert len(open_run(tmp_path / "killed").finished) == 2
    assert start("killed", 7) == -signal.SIGKILL  # the ninth: in the middle of the first control
    assert start("killed", 0) == 0
    for place in (".", "untrained-0", "untrained-1"):
        assert files(tmp_path / "killed" / place) == files(tmp_path / "unbroken" / place)
        open_run(tmp_path / "killed" / place).check()


def test_a_deleted_sample_is_traced_again_in_its_batch(models, traced, tmp_path):
    shutil.copytree(traced, tmp_path / "run")
    before = files(tmp_path / "run")
    (tmp_path / "run/samples/four.safetensors").unlink()
    assert [t.samples for t in trace(models["llada"], tmp_path / "run", **TRACED)] == [("four",)]
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("is_interrupted", [True, False])
@pytest.mark.parametrize("damage", ["flip", "empty", "swap"])
def test_damaged_samples_are_named_and_decoded_again_on_request(models, traced, tmp_path, damage, is_interrupted):
    shutil.copytree(traced, tmp_path / "run")
    before = files(tmp_path / "run")
    one, two, four = (tmp_path / f"run/samples/{name}.safetensors" for name in ("one", "two", "four"))
    if is_interrupted:
        four.unlink()
    content = bytearray(one.read_bytes())
    content[-9] ^= 1
    one.write_bytes({"flip": bytes(content), "empty": b"", "swap": two.read_bytes()}[damage])
    with pytest.raises(UserError, match=r"one\.safetensors is .*\n.*is not resumed; redo_damaged=True"):
        trace(models["llada"], tmp_path / "run", **TRACED)
    (batch,) = trace(models["llada"], tmp_path / "run", **TRACED, redo_damaged=True)
    assert set(batch.samples) == ({"one", "four"} if is_interrupted else {"one"})
    assert files(tmp_path / "run") == before


def test_a_resumed_run_keeps_its_batches(models, tmp_path):
    interrupt_after(1, plan_trace(models["llada"], SAMPLES, tmp_path / "run", batch_size=2, **SHORT))
    with pytest.raises(UserError, match="cannot be resumed with other settings: plan: "):
        plan_trace(models["llada"], SAMPLES, tmp_path / "run", batch_size=3, **SHORT)
    trace(models["llada"], tmp_path / "run")  # none asked for: as it was begun
    assert open_run(tmp_path / "run").plan == [["one", "four"], ["two", "five"], ["three"]]
    assert trace(models["llada"], tmp_path / "run", batch_size=3) == []  # nothing left to decode


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_tokens": 5}, "new_tokens: 4 in the folder, 5 now"),
        ({"seed": 1}, "seed: 0 in the folder, 1 now"),
        ({"chat": False}, "chat: true in the folder, false now"),
        ({"watch": fs.Watch("heads")}, 'level: "summary" in the folder, "heads" now'),
        ({"source": {"data": "other"}}, 'data: nothing in the folder, "other" now'),
        ({"samples": SAMPLES[:4]}, "samples: "),
        ({"samples": [replace(SAMPLES[0], question="Why?"), *SAMPLES[1:]]}, "samples_sha256: "),
        ({"resume": False}, "already holds a run"),
    ],
)
def test_other_settings_are_refused_before_anything_is_decoded(models, traced, change, message):
    with pytest.raises(UserError) as refused:
        plan_trace(models["llada"], out=traced, **{"samples": SAMPLES, **SHORT, "temperature": 1.0, **change})
    assert message in str(refused.value)


def test_a_run_that_fails_before_its_first_sample_is_removed(models, tmp_path, monkeypatch):
    def too_large(*args, **kwargs):
        raise UserError("5 prompts do not fit: 2 at a time would fit")

    with monkeypatch.context() as patched:
        patched.setattr(module, "decode", too_large)
        with pytest.raises(UserError, match="2 at a time would fit"):
            trace(models["llada"], tmp_path / "run")
    assert len(trace(models["llada"], tmp_path / "run", batch_size=2)) == 3


def test_progress_counts_samples_and_estimates_the_time_left(models, tmp_path):
    record = trace(models["llada"], tmp_path / "run", batch_size=2, controls=(0,))
    assert [t.done for t in record] == [2, 4, 5, 7, 9, 10]
    assert {t.total for t in record} == {10}
    assert [t.part for t in record] == ["run"] * 3 + ["run/untrained-0"] * 3
    assert all(a.seconds <= b.seconds for a, b in pairwise(record))
    assert record[-1].seconds_left == 0
    assert record[0].seconds_left == pytest.approx(record[0].seconds / 2 * 8)


# --- controls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["llada", "llama"])
def test_controls_are_runs_inside_the_run(models, layout, tmp_path):
    trace(models[layout], tmp_path / "run", controls=(0, 10, 2))
    main = open_run(tmp_path / "run")
    matches = find_controls(tmp_path / "run")
    assert [path.name for path in matches] == ["untrained-0", "untrained-2", "untrained-10"]
    assert main.settings["control_seed"] is None
    for path, seed in zip(matches, (0, 2, 10), strict=True):
        run = open_run(path)
        differ = {key for key in run.settings if run.settings[key] != main.settings[key]}
        assert differ == {"model", "weights", "control_seed"}
        assert (run.settings["control_seed"], run.samples, run.plan) == (seed, main.samples, main.plan)
        for job in run:
            mine = main.trace(job.sample)
            assert job.arrays["tokens"].shape == mine.arrays["tokens"].shape
            assert job.coords["region"] == mine.coords["region"]
            assert not np.array_equal(job.arrays["received"], mine.arrays["received"])


def test_controls_can_be_added_later_and_nothing_is_traced_twice(models, tmp_path):
    trace(models["llada"], tmp_path / "run")
    before = files(tmp_path / "run")
    assert find_controls(tmp_path / "run") == []
    record = trace(models["llada"], tmp_path / "run", controls=(0,))
    assert {t.part for t in record} == {"run/untrained-0"}
    assert [record[0].done, record[0].total] == [10, 10]
    assert files(tmp_path / "run") == before


# --- size, notes, mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["summary", "heads", "rows", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_forecast_equals_the_size_of_the_arrays(models, layout, level, tmp_path):
    tracing = plan_trace(models[layout], ["What?", "Who?!"], tmp_path / "run", watch=fs.Watch(level), **SHORT)
    assert not (tmp_path / "run").exists()
    list(tracing)
    taken = sum(array.nbytes for job in open_run(tmp_path / "run") for array in job.arrays.values())
    assert tracing.forecast.total == taken


@pytest.mark.parametrize("layout", ["llada", "llama"])
def test_the_forecast_counts_influence(models, layout, tmp_path):
    watch = fs.Watch(influence=True)
    tracing = plan_trace(models[layout], ["What?", "Who?!"], tmp_path / "run", watch=watch, **SHORT)
    list(tracing)
    job = list(open_run(tmp_path / "run"))
    assert tracing.forecast.bytes["influence"] == sum(t.arrays["influence"].nbytes for t in job)
    assert tracing.forecast.total == sum(array.nbytes for t in job for array in t.arrays.values())
    assert re.search(r"\ninfluence +commit 4 × key ", str(tracing.forecast))


def test_a_run_that_does_not_fit_on_the_disk_is_refused(models, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 2 * 10**5))
    with pytest.raises(UserError, match=r"the traces need \d+ KiB and the disk of .*run has 195 KiB left; use fewer"):
        plan_trace(models["llada"], SAMPLES, tmp_path / "deep/run", **SHORT)
    assert not (tmp_path / "deep").exists()


def test_summaries_have_size_and_score(models, tmp_path):
    tracing = plan_trace(models["llada"], SAMPLES, tmp_path / "run", controls=(0,), **SHORT)
    list(tracing)
    model, control = tracing.summaries()
    assert (model.run, control.run) == (tmp_path / "run", tmp_path / "run/untrained-0")
    assert model.samples == 5
    assert model.bytes == sum(map(len, files(tmp_path / "run").values()))
    scores = [job.meta["acc"] for job in open_run(tmp_path / "run") if job.meta["acc"] is not None]
    assert len(scores) == 4
    assert model.acc == np.mean(scores)
    bare = plan_trace(models["llada"], ["What?"], tmp_path / "bare", **SHORT)
    list(bare)
    assert bare.summaries()[0].acc is None


def test_without_offsets_a_note_says_that_there_are_no_regions(models, tmp_path):
    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(models["llada"].tokenizer.hf, name)

        def __call__(self, *args, **settings):
            return models["llada"].tokenizer.hf(*args, **settings)

    slow = replace(models["llada"], tokenizer=type(models["llada"].tokenizer)(Slow(), "slow"))
    tracing = plan_trace(slow, SAMPLES, tmp_path / "run", **SHORT)
    (note,) = read_notes(tracing)
    assert note.startswith("5 of 5 samples, such as 'one', have no regions except bos and answer: the tokenizer of")
    assert open_run(tmp_path / "run").trace("one").coords["region"] == ("bos", "answer")
    assert plan_trace(models["llada"], SAMPLES, tmp_path / "other", **SHORT).notes == []


def test_a_sample_that_does_not_fit_is_named(models, tmp_path):
    long = Sample("long", "why " * 200, ("x",))
    with pytest.raises(UserError, match=r"sample 'long' has \d+ tokens, with 4 after it .*shorten it by"):
        plan_trace(models["llada"], [SAMPLES[0], long], tmp_path / "run", **SHORT)
    masked = Sample("masked", "a <|mdm_mask|>", ("x",))
    with pytest.raises(UserError, match="sample 'masked' contains the mask token"):
        plan_trace(models["llada"], [masked], tmp_path / "run", **SHORT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        ([], {}, "a run needs at least one sample"),
        ([SAMPLES[0], SAMPLES[0]], {}, "sample ids must differ, but 1 occur more than once, such as 'one'"),
        (["what", " \n"], {}, "sample 'prompt-2' is empty; give it some text"),
        (SAMPLES, {"batch_size": 0}, "a batch must hold at least 1 sample, got 0"),
        (SAMPLES, {"new_tokns": 4}, "unknown setting of decode 'new_tokns' (did you mean 'new_tokens'?)"),
        (SAMPLES, {"new_tokens": 0}, "new_tokens"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(models, tmp_path, samples, settings, message):
    with pytest.raises(UserError) as refused:
        plan_trace(models["llada"], samples, tmp_path / "run", **settings)
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer_is_refused(llada, tmp_path):
    with pytest.raises(UserError, match="has no tokenizer, so it cannot read text"):
        plan_trace(llada, SAMPLES, tmp_path / "run")
