"""Names that SGLang and Transformers import; nothing here works."""

from enum import Enum


class ImageReadMode(Enum):
    """Modes of a reader."""

    UNCHANGED = 0
    RGB = 3


class VideoReader:
    """A reader of videos."""


def read_image(*_: object, **__: object) -> None:
    """Read nothing."""
    raise NotImplementedError


read_video = decode_jpeg = decode_image = read_image
