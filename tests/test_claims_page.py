"""docs/claims.md: the page is written from folders alone, names its registry, and leaves nothing out silently."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from floatscope.analysis.claims import CLAIMS, registry_digest

STUDIES = Path(__file__).parents[1] / "studies"


@pytest.fixture
def studies(monkeypatch):
    for folder in (STUDIES, STUDIES / "claims"):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(STUDIES))]:
        del sys.modules[name]


def write_floating(folder: Path, moved: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        {"sample": f"s{i}", "group": group, "layer": layer, "depth": float(layer), "moved": moved + rng.normal(0, 0.01)}
        for i in range(30)
        for group in ("all", "predicting")
        for layer in (0, 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows).assign(within=rng.random(len(rows)), across=0.2, excess_moved=0.1)
    table.to_parquet(folder / "floating.parquet", index=False)


def test_the_page_has_a_row_per_claim_and_the_digest(studies, tmp_path):
    import page

    for seed, (role, moved) in enumerate((("arm", 0.1), ("mdm", 0.3), ("mdm-adapted", 0.05))):
        write_floating(tmp_path / "twins" / "traces" / role, moved, seed)
        write_floating(tmp_path / "twins" / "traces" / role / "untrained-0", 0.01, seed + 10)
    page.main(["--out", str(tmp_path), "--results", str(tmp_path / "results"), "--page", str(tmp_path / "claims.md")])
    text = (tmp_path / "claims.md").read_text()
    assert registry_digest() in text
    table = text[text.index("## Every claim") : text.index("## 7M twins: mdm − arm")]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(CLAIMS)
    (row,) = [line for line in rows if line.startswith("| Attention of MDMs moves over steps |")]
    cells = row.strip("| ").split(" | ")
    assert cells[5].startswith("**supported**: +20.")
    assert cells[6].startswith("**contradicted**: −4.")
    assert "not measured" in text
    assert "SmolLM2 pair: MDM − ARM: all values" not in text


def test_the_page_of_stored_results_is_that_of_the_folders(studies, tmp_path):
    import page

    for seed, (role, moved) in enumerate((("arm", 0.1), ("mdm", 0.3), ("mdm-adapted", 0.05))):
        write_floating(tmp_path / "runs" / "twins" / "traces" / role, moved, seed)
        write_floating(tmp_path / "runs" / "twins" / "traces" / role / "untrained-0", 0.01, seed + 10)
    pages = []
    for runs in ("runs", "none"):
        out = tmp_path / f"{runs}.md"
        page.main(["--out", str(tmp_path / runs), "--results", str(tmp_path / "results"), "--page", str(out)])
        pages.append(out.read_text())
    assert pages[0] == pages[1]
    assert "**supported**" in pages[0]


def test_the_page_is_that_of_the_stored_results(studies, tmp_path):
    import page

    page.main(["--out", str(tmp_path), "--page", str(tmp_path / "claims.md")])
    assert (tmp_path / "claims.md").read_text() == page.PAGE.read_text()


def test_processes_share_a_job(studies, tmp_path, capsys):
    import runs

    import floatscope as fs
    from floatscope.files.locks import acquire_lock
    from floatscope.traces.run import LOCK_FILE

    model, samples = fs.load("twin:arm"), fs.read_samples("twin:reading-1", limit=2)
    options = {"transforms": "typos", "levels": (0, 0.1)}
    busy = tmp_path / "dirty" / "typos-0"
    busy.mkdir(parents=True)
    with acquire_lock(busy / LOCK_FILE):
        runs.stress_once(model, samples, tmp_path / "dirty", "dirty", options, new_tokens=2)
    assert "is being written" in capsys.readouterr().out
    assert runs.is_finished(tmp_path / "dirty" / "typos-0.1")
    assert not runs.is_sweep_finished(tmp_path / "dirty")
    runs.stress_once(model, samples, tmp_path / "dirty", "dirty", options, new_tokens=2)
    assert runs.is_sweep_finished(tmp_path / "dirty")


def test_variance_is_attributed_to_the_factor_that_causes_it(studies):
    from prompt_variance import FACTORS, variance_shares

    columns = pd.MultiIndex.from_product([["a", "b"], ["0", "0.2"], ["arm", "mdm"]], names=FACTORS)
    by_prompt = [1.0 if prompt == "a" else 0.0 for prompt, _, _ in columns]
    by_family = [0.5 if family == "arm" else 0.0 for _, _, family in columns]
    mixed = [p + f for p, f in zip(by_prompt, by_family, strict=True)]
    shares = variance_shares(pd.DataFrame([by_prompt, by_family, mixed], columns=columns))
    assert shares["prompt"].tolist() == pytest.approx([1, 0, 0.8])
    assert shares["family"].tolist() == pytest.approx([0, 1, 0.2])
    assert shares["interactions"].abs().max() == pytest.approx(0, abs=1e-12)


def test_every_earlier_verdict_names_a_claim(studies):
    from earlier_verdicts import EARLIER

    assert all(id in CLAIMS for _, _, _, id, _ in EARLIER)
