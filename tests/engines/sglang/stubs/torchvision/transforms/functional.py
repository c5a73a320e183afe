"""Names that SGLang and Transformers import; nothing here works."""

from enum import Enum


class InterpolationMode(Enum):
    """Modes of a resize."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(*_: object, **__: object) -> None:
    """Resize nothing."""
    raise NotImplementedError


pil_to_tensor = to_pil_image = normalize = pad = crop = resize
