"""Tokens of a running forward: padding, positions, requests, modality, and who generates."""
