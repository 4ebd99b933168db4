"""Size and speed of the report's page: synthetic traces of LLaDA's size in a real browser.

    python benchmarks/page_speed.py

Two runs with two samples each, 32 steps, 32 layers of 32 heads. Lifts are log-normal and change slowly between steps
("smooth"), or are independent at every step ("noise"), which cannot be compressed. Frames are counted while a slider
moves as fast as the browser draws; the longest frame is in brackets. Needs `chromium` (Debian's, or the path in
CHROMIUM).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from floatscope.reports.charts import Lines, Map, Model, Report, Section, Series
from floatscope.reports.explorer import build_payload
from floatscope.reports.page import write_page
from floatscope.schema import Paradigm
from floatscope.traces import Trace

STEPS, LAYERS, HEADS, NEW = 32, 32, 32, 32
WORDS = ("the", "a", "river", "float", "sink", "anchor", "of", "and", "to", "moves", "token", "mask", "layer", "who")

DRAG = """([part, frames]) => new Promise((done) => {
  const slider = document.querySelector(`[data-part="${part}"]`);
  const times = [];
  let at = 0;
  const next = (now) => {
    times.push(now);
    if (times.length > frames) {
      const gaps = times.slice(1).map((t, i) => t - times[i]);
      return done([1000 * gaps.length / (times[frames] - times[0]), Math.max(...gaps)]);
    }
    at = (at + 1) % (Number(slider.max) + 1);
    slider.value = at;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})"""
PAINTS = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


def make_trace(sample: str, keys: int, noise: bool) -> Trace:
    """Return a synthetic trace with the fields that the page reads."""
    rng = np.random.default_rng(len(sample) + keys)
    shape = (STEPS, LAYERS, 1, keys)
    constant = rng.normal(0, 1, (1, *shape[1:]))
    lift = np.exp(rng.normal(0, 1, shape) if noise else constant + 0.05 * np.cumsum(rng.normal(0, 1, shape), 0))
    lift /= lift.mean(-1, keepdims=True)
    tokens = np.tile(rng.integers(1, 500, keys), (STEPS, 1))
    states = np.ones((STEPS, keys))
    order = keys - NEW + rng.permutation(NEW)
    written = tokens[0, order]
    for step in range(STEPS):
        states[step, order[step:]], states[step, order[:step]] = 2, 3
        tokens[step, order[step:]] = 0
    keys_by_rank = rng.integers(0, keys, (1 if not noise else STEPS, LAYERS, HEADS, 1, 16))
    top_key = np.broadcast_to(keys_by_rank, (STEPS, *keys_by_rank.shape[1:]))
    spread = np.ones((STEPS, 1, 1, keys))
    arrays = {
        "tokens": tokens.astype(np.int32),
        "states": states.astype(np.int8),
        "keys": np.full(STEPS, keys, np.int32),
        "queries": np.full(STEPS, keys, np.int32),
        "layers": np.arange(LAYERS, dtype=np.int32),
        "layer_visibility": np.zeros(LAYERS, np.int32),
        "commit_step": np.arange(NEW, dtype=np.int32),
        "commit_position": order.astype(np.int32),
        "commit_token": written.astype(np.int32),
        "commit_confidence": rng.random(NEW).astype(np.float32),
        "region_member": (np.arange(keys)[:, None] * 8 // keys == np.arange(8)),
        "received": (lift / keys).astype(np.float32),
        "uniform": (spread / keys).astype(np.float32),
        "eligible": spread.astype(np.int8),
        "top_key": top_key.astype(np.int32),
        "top": np.exp(rng.normal(2, 1, (*top_key.shape, 1))).astype(np.float32),
    }
    step_key, layer_key = ("step", "key"), ("step", "layer", "group", "key")
    axes = dict.fromkeys(("keys", "queries"), ("step",)) | {name: ("layer",) for name in arrays if "layer" in name}
    axes |= {"tokens": step_key, "states": step_key, "region_member": ("key", "region"), "received": layer_key}
    axes |= dict.fromkeys(("uniform", "eligible"), ("step", "visibility", "group", "key"))
    axes |= {name: ("commit",) for name in arrays if name.startswith("commit")}
    axes |= {"top_key": ("step", "layer", "head", "group", "rank")}
    axes |= {"top": ("step", "layer", "head", "group", "rank", "top_stat")}
    coords = {"group": ("all",), "region": tuple(f"document {i}" for i in range(8)), "top_stat": ("lift",)}
    pieces = {str(i): "\n" if i % 40 == 0 else f" {WORDS[i % len(WORDS)]}{i if i % 3 == 0 else ''}" for i in range(500)}
    return Trace(sample, arrays, axes, coords, {"pieces": pieces, "rows": "all"})


def make_report(keys: int, noise: bool) -> Report:
    """Return a report with charts, maps and four explorable samples."""
    x = list(range(LAYERS))
    lines = Lines("lines", "layer", "lift", x, [Series("a", m, [i / 9 for i in x]) for m in ("mdm", "arm")])
    grid = Map("map", "key", "step", [[(a * b) % 7 for a in range(keys)] for b in x], list(range(keys)), x)
    sections = [Section(f"s{i}", "A section", "Words.", "Words.", [lines, lines]) for i in range(10)]
    sections.append(Section("maps", "Maps", "Words.", "Words.", [grid, grid]))
    runs = [build_payload(make_trace(f"{name}{i}", keys, noise), name) for name in ("mdm", "arm") for i in range(2)]
    return Report("Speed", ["Words."], [Model("mdm", Paradigm.MDM, 32), Model("arm", Paradigm.ARM, 32)], sections, runs)


def measure_page(page: Page, path: Path) -> tuple[float, float, list[str]]:
    """Return the first paint, the time until the explorer is ready, and the frame rates of both sliders."""
    began = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("#explorer[data-ready]")
    ready = time.perf_counter() - began
    page.locator("#explorer").scroll_into_view_if_needed()
    page.evaluate(DRAG, ["step", 10])
    frames = [page.evaluate(DRAG, [part, 90]) for part in ("step", "layer")]
    return page.evaluate(PAINTS), ready, [f"{rate:.0f} ({longest:.0f} ms)" for rate, longest in frames]


def main() -> None:
    """Print the table."""
    print("| keys | lifts | page | left out | first paint | explorer ready | steps: frames/s | layers: frames/s |")
    print("|---:|---|---:|---|---:|---:|---:|---:|")
    executable = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for keys, noise in ((1024, False), (1024, True), (4096, False)):
            report = make_report(keys, noise)
            path = write_page(report, Path(folder) / f"{keys}-{noise}.html")
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            paint, ready, rates = measure_page(page, path)
            payload = report.explorer[0]
            layers = LAYERS - len(payload["layers"])
            left = ["heads"] * (payload["heads"] is None) + [f"{layers} layers"] * (layers > 0) or ["nothing"]
            lifts = "noise" if noise else "smooth"
            print(
                f"| {keys} | {lifts} | {path.stat().st_size / 1e6:.1f} MB | {', '.join(left)} |"
                f" {paint:.0f} ms | {1000 * ready:.0f} ms | {' | '.join(rates)} |",
                flush=True,
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
