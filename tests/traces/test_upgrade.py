"""Folders that floatscope 0.6 wrote are read under today's names; their tables equal those of new folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_decodings import decode_mdm, record_traces
from trace_equality import assert_equal_traces

from floatscope.analysis import analyse, open_evaluation
from floatscope.analysis.experiments import read_experiment
from floatscope.analysis.stress_tests import read_stress
from floatscope.errors import UserError
from floatscope.traces import Trace, create_run, open_run
from floatscope.traces.run_record import read_record
from floatscope.traces.trace_file import BLANK_DIGEST
from floatscope.traces.upgrade import DEFAULT_TEMPLATE, FIELDS, SETTINGS, upgrade_settings

IDS = ["a", "b"]
NEW_SETTINGS = {
    "model": "twin:mdm",
    "paradigm": "mdm",
    "architecture": "llada",
    "confidence_from": "model",
    "template": "default",
    "chat": False,
    "level": "summary",
    "fields": ["received", "uniform", "visible_rows", "score_at_mean_direction"],
}
OLD_SETTINGS = {
    "model": "twin:mdm",
    "family": "mdm",
    "layout": "llada",
    "judged": "model",
    "prompt": DEFAULT_TEMPLATE,
    "template": None,
    "keep": "summary",
    "fields": ["received", "uniform", "seen", "turned"],
}
META = ("paradigm", "architecture", "confidence_from", "fields")


def build_trace(sample: str, seed: int = 0) -> Trace:
    pieces = {str(i): f" word{i}" for i in range(100)}
    meta = {key: NEW_SETTINGS[key] for key in META} | {"rows": "all", "pieces": pieces}
    return record_traces([decode_mdm(seed, 20, 6, 3)], level="summary", names=[sample], meta=meta)[0]


def write_run(folder: Path, samples: list[str] = IDS) -> Path:
    with create_run(folder, NEW_SETTINGS, IDS) as run:
        for seed, sample in enumerate(IDS):
            if sample in samples:
                run.write(build_trace(sample, seed))
    return folder


def downgrade(folder: Path) -> Path:
    """Rewrite a run folder as 0.6 would have written it."""
    record = read_record(folder)  # 0.6 had no digests
    (folder / "run.json").write_text(json.dumps(record | {"format": 1, "settings": OLD_SETTINGS}))
    for file in (folder / "samples").iterdir():
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:end])
        old = {new: old for old, new in FIELDS.items()}
        metadata = header.pop("__metadata__")
        header = {old.get(name, name): entry for name, entry in header.items()}
        meta = json.loads(metadata["meta"])
        names = {new: old for old, new in SETTINGS.items() if new in META}
        meta = {names.get(key, key): value for key, value in meta.items()} | {"fields": OLD_SETTINGS["fields"]}
        metadata |= {
            "format": "floatscope trace 1",
            "meta": json.dumps(meta),
            "order": json.dumps([old.get(name, name) for name in json.loads(metadata["order"])]),
            "axes": json.dumps({old.get(name, name): axes for name, axes in json.loads(metadata["axes"]).items()}),
            "sha256": BLANK_DIGEST,
        }
        file.write_bytes(_sign({"__metadata__": metadata, **header}, raw[end:]))
    return folder


def _sign(header: dict, data: bytes) -> bytes:
    """The bytes of a safetensors file with its digest."""

    def encode() -> bytes:
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    header["__metadata__"]["sha256"] = hashlib.sha256(encode() + data).hexdigest()
    return encode() + data


def test_settings_and_traces_have_todays_names(tmp_path):
    run = open_run(downgrade(write_run(tmp_path / "run")))
    assert run.settings == NEW_SETTINGS
    run.check()
    assert b'"turned"' in (run.path / "samples" / "a.safetensors").read_bytes()
    for seed, sample in enumerate(IDS):
        assert_equal_traces(run[sample], build_trace(sample, seed))


def test_tables_of_an_old_run_equal_those_of_a_new_one(tmp_path):
    new = analyse(write_run(tmp_path / "new"), "topk(k=3)")
    old = analyse(downgrade(write_run(tmp_path / "old")), "topk(k=3)")
    assert list(old) == list(new)
    assert old.missing == new.missing
    for name in new:
        pd.testing.assert_frame_equal(old[name], new[name], check_exact=True)


def test_a_damaged_old_trace_is_refused(tmp_path):
    run = open_run(downgrade(write_run(tmp_path / "run")))
    file = run.path / "samples" / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match="its bytes do not match its digest"):
        run.trace("a")


def test_an_old_run_is_resumed_with_the_same_settings(tmp_path):
    folder = downgrade(write_run(tmp_path / "run", ["a"]))
    with create_run(folder, NEW_SETTINGS, IDS, resume=True) as run:
        assert run.missing == ("b",)
        run.write(build_trace("b", 1))
    record = json.loads((folder / "run.json").read_text())
    assert (record["format"], record["status"], record["settings"]) == (2, "finished", NEW_SETTINGS)
    for seed, trace in enumerate(open_run(folder)):
        assert_equal_traces(trace, build_trace(IDS[seed], seed))


def test_an_old_run_is_not_resumed_with_other_settings(tmp_path):
    folder = downgrade(write_run(tmp_path / "run", ["a"]))
    with pytest.raises(UserError, match=r'level: "summary" in the folder, "heads" now\. Use the settings'):
        create_run(folder, NEW_SETTINGS | {"level": "heads"}, IDS, resume=True)


def test_an_old_template_becomes_a_chat_flag():
    assert upgrade_settings({"template": "chat"}) == {"chat": True}
    assert upgrade_settings({"template": None, "prompt": "short", "prompt_sha256": "0"}) == {
        "chat": False,
        "template": "short",
        "template_sha256": "0",
    }


def test_an_old_evaluation_is_read(tmp_path):
    create_run(tmp_path / "scores", {"kind": "evaluation"}, IDS).close()
    record = read_record(tmp_path / "scores")
    old = record | {"format": 1, "settings": {"what": "evaluation", "prompt": "default", "template": "chat"}}
    (tmp_path / "scores" / "run.json").write_text(json.dumps(old))
    lines = [{"id": "a", "acc": 1.0, "measures": {"nll": None}}, {"id": "b", "acc": 0.0, "measures": {"nll": 2.0}}]
    (tmp_path / "scores" / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation = open_evaluation(tmp_path / "scores")
    assert evaluation.settings == {"kind": "evaluation", "template": "default", "chat": True}
    assert evaluation.table["sample"].tolist() == IDS
    np.testing.assert_array_equal(evaluation.table["nll"], [np.nan, 2.0])


def test_an_old_stress_test_and_an_old_experiment_are_read(tmp_path):
    point = {"name": "first", "value": 0, "series": "", "note": ""}
    old = {"kind": "position", "model": "m", "told": ["a note"], "points": [point | {"asked": "first"}]}
    new = {"kind": "position", "model": "m", "notes": ["a note"], "points": [point | {"folder": "first"}]}
    for record in (old, new):
        (tmp_path / "stress.json").write_text(json.dumps(record))
        assert read_stress(tmp_path) == new
    condition = {"name": "baseline", "edits": [], "control_of": "", "value": None, "series": ""}
    old = {"model": "m", "title": "t", "told": [], "arms": [condition | {"condition": "gold"}]}
    new = {"model": "m", "title": "t", "notes": [], "conditions": [condition | {"subset": "gold"}]}
    for record in (old, new):
        (tmp_path / "experiment.json").write_text(json.dumps(record))
        assert read_experiment(tmp_path) == new
