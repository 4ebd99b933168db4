"""Accuracy of filling masks on held-out text, by the share of tokens that is masked: a job that resumes.

    job = plan_scores(base, folder, text_ids, context=…, vocab_size=…, device=…)    # of the base, and of the adapter
    for event in job: print(event)
    write_scores(folder)                           # adapter/scores.json
    read_typed(folder / "adapter" / SCORES, AdapterScores).masked[0].accuracy

A mask counts as correct if the most likely token of one forward is the right one; intervals are 95 % CIs from a
BCa bootstrap over rows of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from msgspec import field, to_builtins
from torch import Tensor

from floatscope.analysis.evaluations import read_predictions
from floatscope.analysis.statistics import estimate
from floatscope.canvas import CanvasState
from floatscope.errors import UserError
from floatscope.files.atomic import explain_write_errors
from floatscope.files.digests import sha256_file, sha256_json
from floatscope.files.json_files import write_json
from floatscope.files.records import Record
from floatscope.models.adapter import Adapter, adapt_model, read_adapter, tensors_file
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.pipelines.job import Job
from floatscope.pipelines.prediction_part import Lines, PredictionPart
from floatscope.schema import Paradigm, State
from floatscope.traces import open_run

ADAPTER, SCORES = "adapter", "scores.json"
SCORES_RUN = "scores"
"""The folder of the job."""
BASE, ADAPTED = "base", "adapted"
RATIOS = (0.15, 0.3, 0.5, 0.7, 0.85)
ROWS, LENGTH, BATCH = 128, 512, 16


class MaskedAccuracy(Record):
    """Accuracy at one share of masks, with its 95 % CI."""

    ratio: float
    accuracy: float
    low: float
    high: float
    n: int  # rows
    length: int = LENGTH  # tokens per row


class AdapterScores(Record, omit_defaults=True):
    """The type of an adapter's scores.json; a control and an adapter without held-out text have no accuracies."""

    adapter: str  # sha256 of the tensors
    masked: list[MaskedAccuracy] = field(default_factory=list)
    masked_base: list[MaskedAccuracy] = field(default_factory=list)  # with the same mask token; none if it is new


def plan_scores(
    base: str, folder: Path, ids: np.ndarray, *, context: int | None, vocab_size: int, device: torch.device
) -> Job:
    """Return the job that scores `folder`/adapter on the held-out text; it has no parts if there is nothing to score.

    Args:
        base: The model that was adapted, as `load` opens it.
        folder: That of the adaptation.
        ids: The tokens of the held-out text.
        context: The context of the base.
        vocab_size: The number of tokens of the base: a mask beyond them cannot be given to it.
        device: Where the models run.
    """
    adapter, path = read_adapter(folder / ADAPTER), folder / SCORES_RUN
    if not len(ids) or adapter.mask_id is None:
        return Job(path, ())
    variants = (BASE, ADAPTED) if adapter.mask_id < vocab_size else (ADAPTED,)
    text = split_text(ids, min(LENGTH, context or LENGTH))
    digest = sha256_file(tensors_file(folder / ADAPTER))
    return Job(path, (MaskedTextPart(path, base, adapter, digest, text, variants, device),))


def write_scores(folder: Path) -> None:
    """Write the scores.json of `folder`/adapter from the results of the job."""
    scores = AdapterScores(adapter=sha256_file(tensors_file(folder / ADAPTER)))
    if lines := read_predictions(folder / SCORES_RUN):
        length = open_run(folder / SCORES_RUN).settings["length"]
        table = pd.DataFrame([line["id"].split() for line in lines], columns=["variant", "ratio", "sample"])
        table["accuracy"] = [line["measures"]["accuracy"] for line in lines]
        scores.masked = estimate_accuracies(table[table["variant"] == ADAPTED], length)
        scores.masked_base = estimate_accuracies(table[table["variant"] == BASE], length)
    with explain_write_errors("the scores", folder / ADAPTER):
        write_json(folder / ADAPTER / SCORES, to_builtins(scores))


def estimate_accuracies(table: pd.DataFrame, length: int) -> list[MaskedAccuracy]:
    """Return the mean over the rows of text at each ratio, from a table with a row for each of them."""
    accuracies = []
    for ratio, rows in table.groupby("ratio", sort=False):
        mean, low, high = (round(float(x), 4) for x in estimate(rows, "accuracy").iloc[0][["mean", "low", "high"]])
        accuracies.append(
            MaskedAccuracy(ratio=float(str(ratio)), accuracy=mean, low=low, high=high, n=len(rows), length=length)
        )
    return accuracies


@dataclass(frozen=True, eq=False)
class MaskedTextPart(PredictionPart):
    """The accuracy on every row of text, at every ratio, of the base and then of the adapted model."""

    path: Path
    base: str
    adapter: Adapter
    adapter_sha256: str
    text: Int[Tensor, "row token"]
    variants: tuple[str, ...]
    device: torch.device

    @property
    def sample_ids(self) -> list[str]:
        """Variant, ratio and row: "base 0.15 7"."""
        return [sample for ids in self.batch_plan for sample in ids]

    @property
    def batch_plan(self) -> list[list[str]]:
        """Batches of the same variant and ratio."""
        rows = range(len(self.text))
        batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        return [
            [f"{variant} {ratio} {row}" for row in batch]
            for variant, ratio, batch in product(self.variants, RATIOS, batches)
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the accuracies depend on."""
        text = sha256_json({"text": self.text.tolist()})
        return {
            "kind": "masked accuracy",
            "base_sha256": self.adapter.base_sha256,
            "adapter_sha256": self.adapter_sha256,
            "text_sha256": text,
            "length": self.text.shape[1],
        }

    def predict(self, batches: Sequence[Sequence[str]]) -> Iterator[Lines]:
        """Measure each batch; the adapter is merged into the base when the first batch needs it."""
        plain = load(self.base, device=self.device)
        spec = replace(plain.spec, paradigm=Paradigm.MDM, mask_id=self.adapter.mask_id)
        model, current = replace(plain, spec=spec), BASE
        for ids in batches:
            keys = [sample.split() for sample in ids]
            variant, ratio, rows = keys[0][0], float(keys[0][1]), [int(row) for *_, row in keys]
            if variant != current:
                model, current = adapt_model(plain, self.adapter), variant
            shares = row_accuracies(model, self.text[rows], draw_masks(self.text, ratio)[rows]).tolist()
            yield [{"id": sample, "measures": {"accuracy": x}} for sample, x in zip(ids, shares, strict=True)]


def split_text(ids: np.ndarray, length: int, rows: int = ROWS) -> Int[Tensor, "row token"]:
    """Return at most `rows` rows of `length` tokens, spread evenly over the text."""
    rows = min(rows, len(ids) // length)
    if not rows:
        raise UserError(f"the held-out text has {len(ids):,} tokens, but measuring needs at least {length}; give more")
    starts = np.linspace(0, len(ids) - length, rows).astype(int)
    return torch.from_numpy(np.stack([ids[s : s + length] for s in starts]).astype("int64"))


def draw_masks(text: Int[Tensor, "row token"], ratio: float) -> Bool[Tensor, "row token"]:
    """Return which tokens are masked: the same for every model."""
    masked = torch.rand(text.shape, generator=torch.Generator().manual_seed(round(1000 * ratio))) < ratio
    masked[:, 0] = False  # no row predicts the first position if the model has a shift
    return masked


@torch.inference_mode()
def row_accuracies(
    model: Model, tokens: Int[Tensor, "row token"], masked: Bool[Tensor, "row token"]
) -> Float[Tensor, " row"]:
    """Return the share of masks of each row whose most likely token is the original one."""
    states = torch.where(masked, int(State.MASKED), int(State.PROMPT))
    canvas = CanvasState(torch.where(masked, model.spec.mask_id or 0, tokens), states).to(model.device)
    predictions = model.forward(canvas).argmax(-1).cpu()
    if model.spec.shift:
        predictions = torch.cat([tokens[:, :1], predictions[:, :-1]], 1)
    return ((predictions == tokens) & masked).sum(1) / masked.sum(1).clamp_min(1)
