"""Traces of the shipped twins with unsafe token texts, a report of them, and a browser that opens its page."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
from example_charts import DOTS, LINES, MAP, NAMED_LINES, PROMPT, TABLE, UNSAFE_TEXTS, WIDE_MAP

import floatscope as fs
from floatscope.analysis import statistics
from floatscope.reports.charts import Model, Report, Section
from floatscope.reports.explorer import build_payload
from floatscope.reports.page import write_page
from floatscope.schema import Paradigm


@pytest.fixture(scope="module", autouse=True)
def _few_draws():
    """Reports use fewer draws than usual, to save time; test_statistics.py tests the draws."""
    draw_means = statistics.draw_means
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "TEST_DRAWS", 500)
        patch.setattr(statistics, "draw_means", lambda cube, draws=200: draw_means(cube, draws))
        yield


def trace_twin(twin: str) -> fs.Trace:
    model = fs.load(f"twin:{twin}", device="cpu")
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode(PROMPT)
    length = len(prompt) + 8
    spans = {"document": [(1, 13)], "evidence": [(9, 11)], "answer": [(len(prompt), length)]}
    steps = {} if twin == "arm" else {"steps": 6}
    out = fs.decode(
        model,
        [prompt],
        new_tokens=8,
        regions=fs.Regions.from_spans([spans], length),
        watch=fs.Watch(level="heads"),
        samples=[f"<b>{twin}</b>"],
        **steps,
    )
    trace = out.trace
    ids = trace.arrays["tokens_after"].tolist()
    pieces = {str(i): piece for i, piece in zip(ids, model.tokenizer.pieces(ids), strict=True)}
    pieces |= {str(i): piece for i, piece in zip(dict.fromkeys(ids), UNSAFE_TEXTS, strict=False)}
    special = [model.spec.eos_id, model.spec.mask_id]
    return replace(trace, meta={**trace.meta, "pieces": pieces, "special_ids": [i for i in special if i is not None]})


@pytest.fixture(scope="session")
def mdm():
    return trace_twin("mdm")


@pytest.fixture(scope="session")
def arm():
    return trace_twin("arm")


@pytest.fixture(scope="session")
def report(mdm, arm):
    text = "Plain **bold** words & <b>no tags</b>."
    sections = [
        Section("lines", "Lines", text, "How.\n\nAnd why.", [LINES, NAMED_LINES], "tables/lines.csv"),
        Section("dots", "Dots", text, "How.", [DOTS, TABLE], "tables/absent.csv"),
        Section("maps", "Maps", text, "How.", [MAP, WIDE_MAP]),
    ]
    models = [Model("mdm", Paradigm.MDM, 32, "A model.", {"dtype": "float32"}), Model("arm", Paradigm.ARM, 1)]
    payloads = [build_payload(mdm, "mdm"), build_payload(arm, "arm")]
    settings = {"seed": 0, "settings": {"steps": 8, "names": ["a", "b"], "block": None}, "none": {}}
    return Report("A </title> of <b>floats</b>", [text], models, sections, payloads, settings)


@pytest.fixture(scope="session")
def page_path(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "tables").mkdir()
    (folder / "tables" / "lines.csv").write_text("layer,lift\n")
    return write_page(report, folder / "report.html")


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium. Without it the tests are skipped, except in CI, where they fail."""
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("these tests need a browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()
