"""Traces of the shipped twins, with tokens that would break a careless page; and a browser to open it in."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
from made_report import DOTS, LINES, MAP, NAMED, NASTY, PROMPT, TABLE, WIDE

import floatscope as fs
from floatscope.reports.charts import Model, Report, Section
from floatscope.reports.explorer import payload
from floatscope.reports.page import write_page


def trace_of(twin: str) -> fs.Trace:
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
    pieces |= {str(i): piece for i, piece in zip(dict.fromkeys(ids), NASTY, strict=False)}
    special = [model.spec.eos_id, model.spec.mask_id]
    return replace(trace, meta={**trace.meta, "pieces": pieces, "special_ids": [i for i in special if i is not None]})


@pytest.fixture(scope="session")
def mdm():
    return trace_of("mdm")


@pytest.fixture(scope="session")
def arm():
    return trace_of("arm")


@pytest.fixture(scope="session")
def report(mdm, arm):
    words = "Plain **bold** words & <b>no tags</b>."
    sections = [
        Section("lines", "Lines", words, "How.\n\nAnd why.", [LINES, NAMED], "tables/lines.csv"),
        Section("dots", "Dots", words, "How.", [DOTS, TABLE], "tables/absent.csv"),
        Section("maps", "Maps", words, "How.", [MAP, WIDE]),
    ]
    models = [Model("mdm", "mdm", 32, "A model.", {"dtype": "float32"}), Model("arm", "arm", 1)]
    shown = [payload(mdm, "mdm"), payload(arm, "arm")]
    settings = {"seed": 0, "settings": {"steps": 8, "names": ["a", "b"], "block": None}, "none": {}}
    return Report("A </title> of <b>floats</b>", [words], models, sections, shown, settings)


@pytest.fixture(scope="session")
def page_path(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "tables").mkdir()
    (folder / "tables" / "lines.csv").write_text("layer,lift\n")
    return write_page(report, folder / "report.html")


@pytest.fixture(scope="session")
def browser():
    """Chromium, headless. Without one these tests are skipped, except where it must be there."""
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("no browser to open the page in: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()
