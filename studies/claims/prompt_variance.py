"""Prompt or family? How much of the variation of the RAG gain comes from the prompt, and how much from the model.

    table = read_gains(Path("runs/claims/smollm2"))    # a row per question, a column per prompt, temperature and model
    variance_shares(table.mean().to_frame().T)         # prompt, temperature, family, and the rest

The paper used one prompt for LLaDA and another for the other models, and another temperature for Dream: in its Table 1,
prompt and temperature are confounded with the family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from markdown_tables import markdown_table
from runs import is_finished

from floatscope.analysis.evaluations import open_predictions
from floatscope.analysis.statistics import bootstrap

FACTORS = ("prompt", "temperature", "family")


def read_gains(folder: Path) -> pd.DataFrame:
    """Return the gain from the gold passage, a row per question; columns are prompt, temperature and family."""
    gains = {}
    for setting in sorted((folder / "prompts").glob("*")):
        prompt, _, temperature = setting.name.rpartition("-")
        for role in ("arm", "mdm"):
            paths = {choice: setting / choice / role for choice in ("closed", "gold")}
            if all(is_finished(path) for path in paths.values()):
                acc = {
                    choice: open_predictions(path).table.set_index("sample")["acc"] for choice, path in paths.items()
                }
                gains[prompt, temperature, role] = acc["gold"] - acc["closed"]
    return pd.DataFrame(gains).rename_axis(columns=FACTORS) if gains else pd.DataFrame()


def variance_shares(means: pd.DataFrame) -> pd.DataFrame:
    """Return the share of the variance between cells that the main effect of each factor explains, for each row."""
    cells = means.columns
    values = means.to_numpy(float)
    total = ((values - values.mean(1, keepdims=True)) ** 2).sum(1)
    shares = {}
    for factor in FACTORS:
        labels = cells.get_level_values(factor)
        effect = np.zeros_like(values)
        for label in labels.unique():
            effect[:, labels == label] = values[:, labels == label].mean(1, keepdims=True)
        shares[factor] = ((effect - values.mean(1, keepdims=True)) ** 2).sum(1) / total
    table = pd.DataFrame(shares, index=means.index)
    return table.assign(interactions=1 - table.sum(axis=1))


def write_prompt_variance(folder: Path) -> Iterator[str]:
    """Yield the section, if all cells were run."""
    table = read_gains(folder)
    if table.empty or len(table.columns) != math.prod(table.columns.get_level_values(f).nunique() for f in FACTORS):
        return
    yield INTRODUCTION.format(n=len(table.dropna()))
    rows = [["prompt", "temperature", "ARM, gain", "MDM, gain", "MDM − ARM"]]
    for prompt, temperature in dict.fromkeys((p, t) for p, t, _ in table.columns):
        arm, mdm = table[prompt, temperature, "arm"], table[prompt, temperature, "mdm"]
        estimate = bootstrap(pd.DataFrame({"arm": arm, "mdm": mdm}), lambda m: m["mdm"] - m["arm"])
        difference = f"{100 * estimate.mean:+.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
        rows.append([prompt, temperature, f"{100 * arm.mean():.1f}", f"{100 * mdm.mean():.1f}", difference])
    yield markdown_table(rows)
    rows = [["source of variation", "share of the variance between cells"]]
    for factor in (*FACTORS, "interactions"):
        estimate = bootstrap(table, lambda m, factor=factor: variance_shares(m)[factor])
        rows.append([factor, f"{100 * estimate.mean:.0f} % [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"])
    yield markdown_table(rows)


INTRODUCTION = """## Prompt or family?

The paper's RAG gains were measured with one prompt for LLaDA and another for the other models, and with another
temperature for Dream. Here both models of the SmolLM2 pair get every prompt at both temperatures: the paper's prompt
for LLaDA, its prompt for the others (both in our own words), ours, and ours in the chat format. The gain is that of the
gold passage over none, on {n} questions of NQ, in points.
"""
