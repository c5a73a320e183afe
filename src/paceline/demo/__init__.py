"""A small real MoE model with held-out text, so that the main job works with no download."""
