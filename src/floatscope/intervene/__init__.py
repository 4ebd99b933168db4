"""Interventions: edits of the attention, the recipes they are written as, and their matched controls.

edits = edits_of("mask_anchors(k=5)")
controlled(edits, "random", draw=0)          # the same on as many random keys
Intervention(edits, model, samples)          # at work in one decoding
"""

from floatscope.intervene.intervention import Intervention
from floatscope.intervene.recipes import RECIPES, controlled, edits_of

__all__ = ["RECIPES", "Intervention", "controlled", "edits_of"]
