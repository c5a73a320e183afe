"""Checkpoints on disk: which tensors belong to which expert, and experts in another order."""
