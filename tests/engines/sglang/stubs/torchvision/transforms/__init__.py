"""Names that SGLang and Transformers import; nothing here works."""

from . import functional, v2
from .functional import InterpolationMode

__all__ = [
    "Compose",
    "InterpolationMode",
    "Lambda",
    "Normalize",
    "Resize",
    "ToTensor",
    "functional",
    "v2",
]


class Compose:
    """Transforms one after the other."""


Lambda = Normalize = Resize = ToTensor = Compose
