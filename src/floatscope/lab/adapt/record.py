"""training.json of an adapter.

read_training(Path("sibling/adapter"), AdapterTraining).recipe.rank
"""

from __future__ import annotations

from floatscope.lab.adapt.corpus import CorpusFacts
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.training.record import TrainingRecord


class AdapterTraining(TrainingRecord):
    """The type of an adapter's training.json."""

    base_name: str
    base_sha256: str
    mask_id: int | None
    mask_token: str | None
    recipe: Recipe
    corpus: CorpusFacts
    licence: str
