"""Names that SGLang and Transformers import; nothing here works."""

from ..functional import InterpolationMode, resize

__all__ = ["InterpolationMode", "resize"]
