"""From an image as it is stored to the tensor that a model takes, when a batch needs it.

Whatever comes in (a path to a picture or to a `.npy` file, encoded bytes, a PIL image, an array) becomes a float
tensor in [0, 1] with the model's number of channels and its resolution. A checkpoint that ships a preprocessor
configuration decides resizing and normalisation itself; otherwise images are resized bilinearly with antialiasing.

Prepared examples hold images as they are stored. What was read last is kept, up to `KEPT` bytes in a process, for all
models whose preprocessing is the same: an image of 336 x 336 takes 1.3 MiB as a tensor, and a federation has 350,000.
"""

from __future__ import annotations

import io
import math
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from befit.core.errors import DataError, brief

# Those that PIL reads by itself: PostScript, for one, it would give to an interpreter.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
_RATIO, _PIXELS = 30, 2**24  # pixels for a byte, as no photograph has, in a picture that takes half a second to read
WHOLE = 1000  # images of a split that are all read before training, so that a damaged one is found then
KEPT = 2**30  # bytes of images that one process keeps as tensors
# ITU-R BT.601, the weights that PIL uses for "L", so that an array and the same picture as a file agree.
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


@dataclass(frozen=True)
class ImagePreprocessor:
    """What a model expects of an image.

    channels, height, width  of the model's input
    processor                a transformers image processor, or None where the checkpoint has none
    square                   pad to a square first, see `squared`
    """

    channels: int
    height: int
    width: int
    processor: Any | None = None
    square: bool = False

    def __call__(self, image: Any, where: str = "the image") -> Tensor:
        """(channels, height, width) float32, ready for the model. Raises DataError that begins with `where`.

        An array that already has the model's shape passes through unchanged, unless the checkpoint normalises.
        """
        read = read_image(image, where)
        pixels = with_channels(squared(read, self) if self.square else read, self.channels, where)  # in [0, 1]
        if self.processor is None or (pixels.shape[:2] == (self.height, self.width) and not self._changes_values()):
            return resize(torch.from_numpy(pixels).permute(2, 0, 1), self.height, self.width)
        # Pixels are in [0, 1] here and processors are written for 0..255: scale by 255 times their own factor.
        scale = 255.0 * self._factor
        if np.isin(pixels, (0, 1)).all():  # black and white alone, which processors would take for bytes of 0 and 1
            pixels, scale = (255 * pixels).astype(np.uint8), self._factor
        values = self.processor(
            images=pixels, do_rescale=True, rescale_factor=scale, input_data_format="channels_last", return_tensors="pt"
        )["pixel_values"][0]
        if values.dim() == 4 and len(values) == 1:  # of a processor that can cut an image into pieces, the whole
            values = values[0]
        if values.shape != (self.channels, self.height, self.width):
            raise DataError(
                f"{where}: the checkpoint's image processor gives {tuple(values.shape)}, "
                f"its model wants {(self.channels, self.height, self.width)}; correct preprocessor_config.json"
            )
        return values.float()

    def check(self, image: Any, where: str = "the image", whole: bool = True) -> None:
        """Raise DataError for an image that cannot be read; of a picture only its head is, unless `whole`."""
        image = _stored(image)
        if isinstance(image, (str, PathLike, bytes)) and not _is_array(image):
            with _opened(image, where) as picture:
                _check_grey(picture, where)
                if whole:
                    picture.load()
                if not whole or picture.mode != "F":  # whose values are in no known range
                    return
        with_channels(read_image(image, where), self.channels, where)

    def stack(self, images: Sequence[Any], names: Sequence[str]) -> Tensor:
        """(images, channels, height, width) float32. What is among the last that were read is not read again.

        names  by which errors name each image
        """
        values = torch.empty((len(images), self.channels, self.height, self.width))
        for place, (image, name) in enumerate(zip(images, names, strict=True)):
            values[place] = CACHE.get(self, image, name)
        return values

    @property
    def nbytes(self) -> int:
        """Of one image as a tensor."""
        return 4 * self.channels * self.height * self.width

    @cached_property
    def key(self) -> str:
        """What decides the tensor of a given image: models with the same one share what is read."""
        rules = "" if self.processor is None else f"{type(self.processor).__name__} {self.processor.to_json_string()}"
        return f"{self.channels} {self.height} {self.width} {self.square} {rules}"

    @property
    def _factor(self) -> float:
        """What the processor multiplies 0..255 with."""
        rescales = getattr(self.processor, "do_rescale", True)
        return getattr(self.processor, "rescale_factor", 1 / 255) if rescales else 1.0

    def _changes_values(self) -> bool:
        """Whether values are other than from 0 to 1 after the processor, in a picture of the model's size."""
        return bool(getattr(self.processor, "do_normalize", False)) or not math.isclose(self._factor, 1 / 255)


class Cache:
    """The images that were read last, as tensors, up to `limit` bytes of them.

    A file is known by its path, size and time of change; everything else is known as the object that it is.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self.limit, self.held = limit, 0
        self._kept: OrderedDict[tuple[str, Hashable], tuple[Any, Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, preprocessor: ImagePreprocessor, image: Any, where: str) -> Tensor:
        """The image as `preprocessor` makes it, which nobody may change."""
        place = preprocessor.key, _identity(image)
        with self._lock:
            if place in self._kept:
                self._kept.move_to_end(place)
                return self._kept[place][1]
        values = preprocessor(image, where)
        with self._lock:
            if place not in self._kept and values.nbytes <= self.limit:
                self._kept[place] = image, values  # with the image, so that no other can have its id
                self.held += values.nbytes
            while self.held > self.limit:
                self.held -= self._kept.popitem(last=False)[1][1].nbytes
        return values

    def __len__(self) -> int:
        return len(self._kept)


CACHE = Cache()


def read_image(image: Any, where: str = "the image") -> np.ndarray:
    """Any accepted form as a float32 array in [0, 1]: (h, w) or (h, w, channels).

    Accepted: a path to a picture or to a `.npy` file, `{"bytes": ..., "path": ...}` as in Parquet files, encoded
    bytes, a PIL image, an array or tensor of uint8, or of floats in [0, 1]. Pictures are turned upright by their EXIF
    orientation; transparency is dropped. Raises DataError for anything else.
    """
    image = _stored(image)
    if _is_array(image):
        image = load_array(Path(image), where)
    if isinstance(image, (str, PathLike, bytes)):
        image = load_picture(image, where)
    elif isinstance(image, Image.Image):
        image = _turned(image, where)
    if isinstance(image, Image.Image):
        image = picture_to_array(image, where)
    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        raise DataError(
            f"{where}: an image must be a path, bytes, a PIL image or an array, got {type(image).__name__}; "
            "give a picture file (.png, .jpg, ...) or a .npy file"
        )
    if image.ndim not in (2, 3) or not image.size:
        raise DataError(
            f"{where}: an image must have shape (height, width) or (height, width, channels), got {image.shape}"
        )
    if image.dtype == np.uint8:
        return image.astype(np.float32) / 255.0
    if not np.issubdtype(image.dtype, np.floating):
        raise DataError(f"{where}: an array must hold uint8 or floats in [0, 1], got {image.dtype}")
    if not np.isfinite(image).all():
        raise DataError(f"{where}: an image has numbers that are not finite")
    low, high = float(image.min()), float(image.max())
    if not (low >= 0.0 and high <= 1.0):
        raise DataError(f"{where}: floats must lie in [0, 1], got {low:g} to {high:g}; divide by the largest value")
    return np.ascontiguousarray(image, dtype=np.float32)


def load_array(path: Path, where: str) -> np.ndarray:
    try:
        # Mapped first, which compares the size of the file with what its header says.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # whatever a damaged file makes NumPy raise
        raise DataError(f"{where}: cannot read {path} as a NumPy array: {brief(error)}; save it again") from error


def load_picture(source: str | PathLike[str] | bytes, where: str) -> Image.Image:
    with _opened(source, where) as picture:
        return _upright(picture)


def _turned(picture: Image.Image, where: str) -> Image.Image:
    """A picture that a caller opened, which has read its head alone."""
    try:
        return _upright(picture)
    except Exception as error:  # whatever a damaged picture makes PIL raise
        raise DataError(f"{where}: cannot read the PIL image: {brief(error)}; save it as .png or .jpg") from error


def _upright(picture: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(picture)
    upright.format = picture.format  # which says what 32-bit values mean
    return upright


@contextmanager
def _opened(source: str | PathLike[str] | bytes, where: str) -> Iterator[Image.Image]:
    """A picture of which only the head has been read. What fails while it is used raises DataError too."""
    name = "the encoded image" if isinstance(source, bytes) else str(source)
    try:
        with warnings.catch_warnings():
            # A picture so large that PIL warns of an attack is refused rather than resized.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as picture:
                size = len(source) if isinstance(source, bytes) else os.stat(source).st_size
                if picture.width * picture.height > max(_PIXELS, _RATIO * size):
                    raise Image.DecompressionBombWarning
                yield picture
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"{where}: there is no file {name}; correct the path, which counts from the data file"
        ) from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(
            f"{where}: cannot read {name}: it has more than {_PIXELS:,} pixels and more than {_RATIO} for each of its "
            "bytes, as no photograph has; save it smaller"
        ) from error
    except Exception as error:  # whatever a damaged picture makes PIL raise
        raise DataError(f"{where}: cannot read {name} as a picture: {brief(error)}; save it as .png or .jpg") from error


def stored_bytes(image: Any) -> int:
    """Of an image that a record holds in memory; 0 of a path."""
    image = _stored(image)
    if isinstance(image, Image.Image):
        return image.width * image.height * len(image.getbands())
    return len(image) if isinstance(image, bytes) else getattr(image, "nbytes", 0)


def _identity(image: Any) -> Hashable:
    if not isinstance(image, (str, PathLike)):
        return id(image)
    try:
        file = os.stat(image)
    except (OSError, ValueError):  # reading it says what is wrong
        return os.fspath(image)
    return os.fspath(image), file.st_size, file.st_mtime_ns


def _stored(image: Any) -> Any:
    """The bytes or the path of an image as Parquet files have it; anything else as it is."""
    return image.get("bytes") or image.get("path") if isinstance(image, Mapping) else image


def _is_array(image: Any) -> bool:
    return isinstance(image, (str, PathLike)) and Path(image).suffix.lower() == ".npy"


def picture_to_array(picture: Image.Image, where: str) -> np.ndarray:
    """uint8 (h, w) or (h, w, 3); greyscale of 16 bits and of floats in [0, 1] keeps its precision, as floats."""
    _check_grey(picture, where)
    if picture.mode == "F":
        return np.asarray(picture, dtype=np.float32)
    if picture.mode.startswith("I"):
        return np.asarray(picture, dtype=np.float32) / 65535.0
    if picture.mode in ("1", "L", "LA"):
        return np.asarray(picture.convert("L"))
    return np.asarray(picture.convert("RGB"))


def _check_grey(picture: Image.Image, where: str) -> None:
    """Raise DataError for greyscale of 32-bit integers, of which nothing says how large they may be. PGM files of more
    than 8 bits are read as such, from 0 to 65535."""
    if picture.mode == "I" and picture.format != "PPM":
        raise DataError(
            f"{where}: greyscale of 32-bit integers has no known largest value; save it with 16 bits, or as .npy of "
            "floats in [0, 1]"
        )


def with_channels(pixels: np.ndarray, channels: int, where: str) -> np.ndarray:
    """(h, w) or (h, w, c) -> (h, w, channels): grey is repeated, colour becomes luma; nothing else is converted."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    count = pixels.shape[2]
    if count == channels:
        return pixels
    if count == 1:
        return np.repeat(pixels, channels, axis=2)
    if count == 3 and channels == 1:
        return np.clip(pixels @ LUMA, 0.0, 1.0)[:, :, None]
    raise DataError(f"{where}: the model takes {channels} channels and the image has {count} (shape {pixels.shape})")


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """(channels, h, w) -> (channels, height, width), bilinear with antialiasing; values stay in [0, 1]."""
    if pixels.shape[1:] == (height, width):
        return pixels.contiguous()
    resized = F.interpolate(pixels[None], (height, width), mode="bilinear", align_corners=False, antialias=True)[0]
    return resized.clamp(0.0, 1.0)


def squared(image: np.ndarray, wanted: ImagePreprocessor) -> np.ndarray:
    """Padded to a square on both sides, in the mean colour that the checkpoint's processor takes off, else black.

    LLaVA does so, that nothing of an image is cropped away.
    """
    height, width = image.shape[:2]
    side = max(height, width)
    if height == width:
        return image
    mean = getattr(wanted.processor, "image_mean", None) if getattr(wanted.processor, "do_normalize", False) else None
    depth = image.shape[2] if image.ndim == 3 else 1
    colour = np.asarray(mean if mean is not None and len(mean) == depth else [np.mean(mean or 0.0)] * depth)
    padded = np.broadcast_to(colour.astype(np.float32), (side, side, depth)).copy()
    top, left = (side - height) // 2, (side - width) // 2
    padded[top : top + height, left : left + width] = image.reshape(height, width, depth)
    return padded
