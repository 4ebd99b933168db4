"""How large the report's page is and how fast it moves: made-up traces of LLaDA's size in a real browser.

    python benchmarks/page_speed.py

Two runs with two samples each, 32 steps, 32 layers of 32 heads. Lifts are log-normal and change a little from step to
step ("alike"), or are drawn anew at every step ("noise"), which nothing can compress. A frame is counted when the
browser asks for the next one, while a slider is moved as fast as frames come; the longest frame is in brackets. Needs
`chromium` (Debian's, or the path in CHROMIUM).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from floatscope.reports.charts import Lines, Map, Model, Report, Section, Series
from floatscope.reports.explorer import payload
from floatscope.reports.page import write_page
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


def made_up(sample: str, keys: int, noise: bool) -> Trace:
    rng = np.random.default_rng(len(sample) + keys)
    shape = (STEPS, LAYERS, 1, keys)
    still = rng.normal(0, 1, (1, *shape[1:]))
    lift = np.exp(rng.normal(0, 1, shape) if noise else still + 0.05 * np.cumsum(rng.normal(0, 1, shape), 0))
    lift /= lift.mean(-1, keepdims=True)
    tokens = np.tile(rng.integers(1, 500, keys), (STEPS, 1))
    states = np.ones((STEPS, keys))
    order = keys - NEW + rng.permutation(NEW)
    written = tokens[0, order]
    for step in range(STEPS):
        states[step, order[step:]], states[step, order[:step]] = 2, 3
        tokens[step, order[step:]] = 0
    drawn = rng.integers(0, keys, (1 if not noise else STEPS, LAYERS, HEADS, 1, 16))
    top_key = np.broadcast_to(drawn, (STEPS, *drawn.shape[1:]))
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


def report(keys: int, noise: bool) -> Report:
    x = list(range(LAYERS))
    lines = Lines("lines", "layer", "lift", x, [Series("a", m, [i / 9 for i in x]) for m in ("mdm", "arm")])
    grid = Map("map", "key", "step", [[(a * b) % 7 for a in range(keys)] for b in x], list(range(keys)), x)
    sections = [Section(f"s{i}", "A section", "Words.", "Words.", [lines, lines]) for i in range(10)]
    sections.append(Section("maps", "Maps", "Words.", "Words.", [grid, grid]))
    runs = [payload(made_up(f"{name}{i}", keys, noise), name) for name in ("mdm", "arm") for i in range(2)]
    return Report("Speed", ["Words."], [Model("mdm", "mdm", 32), Model("arm", "arm", 32)], sections, runs)


def measured(page: Page, path: Path) -> tuple[float, float, list[str]]:
    began = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("#explorer[data-ready]")
    ready = time.perf_counter() - began
    page.locator("#explorer").scroll_into_view_if_needed()
    page.evaluate(DRAG, ["step", 10])
    moved = [page.evaluate(DRAG, [part, 90]) for part in ("step", "layer")]
    return page.evaluate(PAINTS), ready, [f"{rate:.0f} ({worst:.0f} ms)" for rate, worst in moved]


def main() -> None:
    print("| keys | lifts | page | left out | first paint | explorer ready | steps: frames/s | layers: frames/s |")
    print("|---:|---|---:|---|---:|---:|---:|---:|")
    executable = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for keys, noise in ((1024, False), (1024, True), (4096, False)):
            told = report(keys, noise)
            path = write_page(told, Path(folder) / f"{keys}-{noise}.html")
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            paint, ready, moved = measured(page, path)
            kept = told.explorer[0]
            layers = LAYERS - len(kept["layers"])
            left = ["heads"] * (kept["heads"] is None) + [f"{layers} layers"] * (layers > 0) or ["nothing"]
            print(
                f"| {keys} | {'noise' if noise else 'alike'} | {path.stat().st_size / 1e6:.1f} MB | {', '.join(left)} |"
                f" {paint:.0f} ms | {1000 * ready:.0f} ms | {' | '.join(moved)} |",
                flush=True,
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
