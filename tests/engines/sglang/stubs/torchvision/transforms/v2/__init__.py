"""Names that SGLang and Transformers import; nothing here works."""

from . import functional

__all__ = ["functional"]
