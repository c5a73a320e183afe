"""Stand for torchvision, which SGLang imports even for text models and has no CPU build on PyPI."""

__version__ = "0.28.0"
