"""training.json of a twin.

read_training(Path("twins/models/mdm"), TwinTraining).recipe.layers
"""

from __future__ import annotations

from floatscope.files.records import Record
from floatscope.lab.training.record import TrainingRecord
from floatscope.lab.twins.train import Recipe


class TrainingText(Record):
    """The text that a twin was trained on."""

    files: dict[str, str]  # name → sha256
    characters: int
    tokens: int
    licence: str


class TwinTraining(TrainingRecord):
    """The type of a twin's training.json."""

    seed: int
    recipe: Recipe
    text: TrainingText
