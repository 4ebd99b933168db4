"""Files of floatscope 0.6 opened under today's names: one table per kind of file, old name → new name.

Run folders and traces carry a format number; those of format 1 go through these tables when they are read. The files on
the disk stay as they are, so a digest is always checked over the original bytes.

    upgrade_settings({"family": "mdm", "template": None})    # {"paradigm": "mdm", "chat": False}
    upgrade_field("seen")                                    # "visible_rows"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from floatscope.schema import MaskKind, MaskStructure

SETTINGS = {
    "family": "paradigm",
    "layout": "architecture",
    "keep": "level",
    "what": "kind",
    "judged": "confidence_from",
    "forced": "teacher_forcing",
    "prompt": "template",
    "prompt_sha256": "template_sha256",
    "template": "chat",  # "chat" or null; now true or false
}
"""Settings in run.json, and the meta of a trace."""

FIELDS = {"seen": "visible_rows", "turned": "score_at_mean_direction"}
"""Arrays of a trace, and the names in the setting `fields`."""

STRESS = {"told": "notes"}
STRESS_POINT = {"asked": "folder"}
"""stress.json and each of its `points`."""

EXPERIMENT = {"told": "notes", "arms": "conditions"}
EXPERIMENT_CONDITION = {"condition": "subset"}
"""experiment.json and each of its `conditions`."""

UNKNOWN_MASK = MaskStructure(MaskKind.MASK)

DEFAULT_TEMPLATE = "Document {number}: {passage}\n… Question: {question}\nAnswer:"
"""What a run of traces stored for the template "default"."""


def rename_keys(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the record with its keys renamed by a table; other keys stay."""
    return {names.get(key, key): value for key, value in record.items()}


def upgrade_field(name: str) -> str:
    """Return today's name of a stored array."""
    return FIELDS.get(name, name)


def upgrade_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, or the meta of a trace, that 0.6 wrote under today's names."""
    upgraded = rename_keys(settings, SETTINGS)
    if "chat" in upgraded:
        upgraded["chat"] = upgraded["chat"] == "chat"
    if upgraded.get("template") == DEFAULT_TEMPLATE:
        upgraded["template"] = "default"
    if isinstance(upgraded.get("fields"), list):
        upgraded["fields"] = [upgrade_field(name) for name in upgraded["fields"]]
    return upgraded


def infer_masks(
    visible_rows: Int[np.ndarray, "step visibility key"], keys: Int[np.ndarray, " step"], rows: Int[np.ndarray, " step"]
) -> tuple[MaskStructure, ...]:
    """Return the masks of a trace that does not store them, from how many of its rows see each key."""
    key = np.arange(visible_rows.shape[-1])
    later_rows = (keys[:, None] - key).clip(0)  # [step, key]: the rows at and after a key
    expected = {
        MaskKind.FULL: np.where(later_rows > 0, rows[:, None], 0),
        MaskKind.CAUSAL: np.minimum(later_rows, rows[:, None]),
    }
    on_canvas = later_rows > 0
    return tuple(
        next((MaskStructure(kind) for kind, n in expected.items() if (n == seen)[on_canvas].all()), UNKNOWN_MASK)
        for seen in np.moveaxis(visible_rows, 1, 0)
    )


def upgrade_stress(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a stress.json of any version under today's names."""
    upgraded = rename_keys(record, STRESS)
    return {**upgraded, "points": [rename_keys(point, STRESS_POINT) for point in upgraded["points"]]}


def upgrade_experiment(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of an experiment.json of any version under today's names."""
    upgraded = rename_keys(record, EXPERIMENT)
    conditions = [rename_keys(condition, EXPERIMENT_CONDITION) for condition in upgraded["conditions"]]
    return {**upgraded, "conditions": conditions}
