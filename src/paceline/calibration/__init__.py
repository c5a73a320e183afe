"""Calibration: fit stand-ins of a model's experts in a short run on a user's texts."""
