"""Interventions: edits of the attention, the recipes that name them, and their matched controls.

edits = parse_edits("mask_anchors(k=5)")             # recipes
build_control(edits, "mass", draw=0)                 # the same edit on random keys that hold as much attention
Intervention(edits, model, samples)                  # applies the edits during one decoding
"""
