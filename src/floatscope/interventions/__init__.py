"""Interventions: edits of the attention, the recipes that name them, and their matched controls.

edits = parse_edits("mask_anchors(k=5)")             # recipes
build_control(edits, "random", draw=0)               # the same edit on the same number of random keys
Intervention(edits, model, samples)                  # applies the edits during one decoding
"""
