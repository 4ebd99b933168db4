"""Every analysis takes a run, its path, traces, one trace or one view, and a detector; `analyse` computes them all."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from dense_decodings import build_trace, random_decoding

import floatscope as fs
from floatscope.analysis import TraceView, trace_views
from floatscope.analysis.run_tables import ANALYSES, RunTables
from floatscope.analysis.trace_view import per_sample
from floatscope.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")
DETECTOR = "topk(k=2)"
TABLES = sorted({*ANALYSES, "floating", "attribution"} - {"influence", "experts"})


def build_traces() -> list[fs.Trace]:
    """Two masked decodings with regions that every analysis can read."""
    traces = []
    for seed in range(2):
        decoding = random_decoding(seed, "full")
        n = len(decoding.states[0])
        regions = {"document 1": range(10), "question": range(10, 20), "answer": range(20, n), "evidence": [1, 2]}
        meta = {"prediction": "word", "answers": ["word"], "acc": 1}
        traces.append(build_trace(type(decoding)(**{**vars(decoding), "regions": regions}), f"sample-{seed}", **meta))
    return [_with_norms(trace) for trace in traces]


def _with_norms(trace: fs.Trace) -> fs.Trace:
    """With values where dense decodings have none."""
    rng = np.random.default_rng(0)
    arrays = {
        name: np.where(np.isnan(array), rng.random(array.shape), array).astype(array.dtype)
        if name in ("residual", "rollout", "key_stats", "head_stats", "score_at_mean_direction", "top", "moments")
        else array
        for name, array in trace.arrays.items()
    }
    return fs.Trace(trace.sample, arrays, trace.axes, trace.coords, trace.meta)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> fs.Run:
    traces = build_traces()
    folder = tmp_path_factory.mktemp("runs") / "run"
    with fs.create_run(folder, {"model": "dense"}, [trace.sample for trace in traces]) as created:
        for trace in traces:
            created.write(trace)
    return fs.open_run(folder)


def test_dir_lists_the_public_names():
    assert dir(fs.analysis) == sorted(fs.analysis.__all__)
    assert set(TABLES) <= set(dir(fs.analysis))
    for name in fs.analysis.__all__:
        assert getattr(fs.analysis, name).__doc__, name
    assert not [name for name in dir(fs.analysis) if inspect.ismodule(getattr(fs.analysis, name))]


@pytest.mark.parametrize("name", TABLES)
def test_an_analysis_takes_a_run_a_path_or_traces(run, name):
    compute = getattr(fs.analysis, name)
    table = compute(run, DETECTOR)
    assert isinstance(table, pd.DataFrame)
    assert list(dict.fromkeys(table["sample"])) == ["sample-0", "sample-1"]
    for source in (run.path, str(run.path), list(run), iter(run)):
        pd.testing.assert_frame_equal(compute(source, detector=DETECTOR), table)
    if name != "floating":  # `across` compares all samples
        one = table[table["sample"] == "sample-1"].reset_index(drop=True)
        pd.testing.assert_frame_equal(compute(run["sample-1"], DETECTOR), one)
        pd.testing.assert_frame_equal(compute(TraceView(run["sample-1"], DETECTOR)), one)


def test_analyse_computes_every_table(run):
    progress: list[str] = []
    tables = fs.analyse(run, DETECTOR, progress.append)
    assert progress == ["sample-0", "sample-1"]
    assert sorted(tables) == TABLES
    assert (tables.missing, tables.partial) == ({}, {})
    for name in tables:
        pd.testing.assert_frame_equal(tables[name], getattr(fs.analysis, name)(run, DETECTOR))


def test_floating_across_is_over_all_samples(run):
    index = fs.analysis.floating(run)
    each = pd.concat([fs.analysis.floating(trace) for trace in run], ignore_index=True)
    columns = [name for name in index.columns if name != "across"]
    pd.testing.assert_frame_equal(each[columns], index[columns])
    pd.testing.assert_series_equal(each["across"], each["within"], check_names=False)
    assert index["within"].notna().any()
    assert not index["across"].equals(index["within"])


def test_options_are_keyword_arguments(run):
    assert fs.analysis.arness(run, ks=(1, 3))["k"].tolist() == [1, 3, 1, 3]
    assert "step" in fs.analysis.absorption(run, DETECTOR, per_step=True).columns
    with pytest.raises(TypeError):
        fs.analysis.sinks(run, epsilon=0.3)


def test_the_signature_shows_source_detector_and_options():
    signature = inspect.signature(fs.analysis.sinks)
    assert list(signature.parameters) == ["source", "detector", "commits", "eps"]
    assert signature.parameters["detector"].default == "zscore"
    assert signature.parameters["commits"].default == "answer"
    assert signature.parameters["commits"].kind == inspect.Parameter.KEYWORD_ONLY
    assert signature.parameters["eps"].kind == inspect.Parameter.KEYWORD_ONLY
    assert fs.analysis.sinks.__name__ == "sinks"
    assert "average row" in fs.analysis.sinks.__doc__


def test_per_sample_concatenates_the_tables_of_a_function():
    @per_sample
    def count_keys(view: TraceView, factor: int = 1) -> pd.DataFrame:
        return pd.DataFrame({"sample": [view.sample], "keys": [factor * int(view.keys[0])]})

    traces = build_traces()
    assert count_keys(traces, factor=2)["keys"].tolist() == [2 * int(trace.arrays["keys"][0]) for trace in traces]
    assert [view.sample for view in trace_views(traces)] == ["sample-0", "sample-1"]


def test_tables_are_looked_up_by_name():
    tables = RunTables({"sinks": pd.DataFrame({"first": [0.1]})}, {"flow": "the trace of 'a' has no regions"})
    assert tables["sinks"]["first"].tolist() == [0.1]
    assert ("sinks" in tables, "flow" in tables, len(tables)) == (True, False, 1)
    assert repr(tables) == "RunTables(sinks; missing: flow)"
    with pytest.raises(UserError, match="there is no table 'flow': the trace of 'a' has no regions"):
        tables["flow"]
    with pytest.raises(UserError, match=r"unknown table 'sink' \(did you mean 'sinks'\?\)"):
        tables["sink"]


def test_a_run_without_traces_is_refused(tmp_path):
    fs.create_run(tmp_path / "run", {}, ["a"]).close()
    with pytest.raises(UserError, match="there is no finished trace to analyse; trace some samples first"):
        fs.analysis.sinks(tmp_path / "run")


def test_importing_analysis_does_not_load_torch():
    code = "import sys, floatscope.analysis; sys.exit(len({'torch', 'transformers'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
