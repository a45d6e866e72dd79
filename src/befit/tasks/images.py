"""From an image as it is stored to the tensor that a model takes.

Whatever comes in (a path to a picture or to a `.npy` file, encoded bytes, a PIL image, an array) becomes a float
tensor in [0, 1] with the model's number of channels and its resolution. A checkpoint that ships a preprocessor
configuration decides resizing and normalisation itself; otherwise images are resized bilinearly with antialiasing.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
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
# ITU-R BT.601, the weights that PIL uses for "L", so that an array and the same picture as a file agree.
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


@dataclass(frozen=True)
class ImagePreprocessor:
    """What a model expects of an image.

    channels, height, width  of the model's input
    processor                a transformers image processor, or None where the checkpoint has none
    """

    channels: int
    height: int
    width: int
    processor: Any | None = None

    def __call__(self, image: Any, where: str = "the image") -> Tensor:
        """(channels, height, width) float32, ready for the model. Raises DataError that begins with `where`.

        An array that already has the model's shape passes through unchanged, unless the checkpoint normalises.
        """
        pixels = with_channels(read_image(image, where), self.channels, where)  # (h, w, channels) in [0, 1]
        if self.processor is None or (pixels.shape[:2] == (self.height, self.width) and not self._normalises()):
            return resize(torch.from_numpy(pixels).permute(2, 0, 1), self.height, self.width)
        # Pixels are in [0, 1] here and processors are written for 0..255: scale by 255 times their own factor.
        scale = 255.0 * getattr(self.processor, "rescale_factor", 1 / 255)
        values = self.processor(
            images=pixels, do_rescale=True, rescale_factor=scale, input_data_format="channels_last", return_tensors="pt"
        )["pixel_values"][0]
        if values.shape != (self.channels, self.height, self.width):
            raise DataError(
                f"{where}: the checkpoint's image processor gives {tuple(values.shape)}, "
                f"its model wants {(self.channels, self.height, self.width)}; correct preprocessor_config.json"
            )
        return values.float()

    def _normalises(self) -> bool:
        return bool(getattr(self.processor, "do_normalize", False))


def read_image(image: Any, where: str = "the image") -> np.ndarray:
    """Any accepted form as a float32 array in [0, 1]: (h, w) or (h, w, channels).

    Accepted: a path to a picture or to a `.npy` file, `{"bytes": ..., "path": ...}` as in Parquet files, encoded
    bytes, a PIL image, an array or tensor of uint8, or of floats in [0, 1]. Pictures are turned upright by their EXIF
    orientation; transparency is dropped. Raises DataError for anything else.
    """
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, (str, PathLike)) and Path(image).suffix.lower() == ".npy":
        image = load_array(Path(image), where)
    if isinstance(image, (str, PathLike, bytes)):
        image = load_picture(image, where)
    if isinstance(image, Image.Image):
        image = picture_to_array(image)
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
    low, high = float(image.min()), float(image.max())
    if not (low >= 0.0 and high <= 1.0):  # also false for NaN
        raise DataError(f"{where}: floats must lie in [0, 1], got {low:g} to {high:g}; divide by the largest value")
    return np.ascontiguousarray(image, dtype=np.float32)


def load_array(path: Path, where: str) -> np.ndarray:
    try:
        # Mapped first, which compares the size of the file with what its header says.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # whatever a damaged file makes NumPy raise
        raise DataError(f"{where}: cannot read {path} as a NumPy array: {brief(error)}; save it again") from error


def load_picture(source: str | PathLike[str] | bytes, where: str) -> Image.Image:
    name = "the encoded image" if isinstance(source, bytes) else str(source)
    try:
        with warnings.catch_warnings():
            # A picture so large that PIL warns of an attack is refused rather than resized.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as picture:
                size = len(source) if isinstance(source, bytes) else os.stat(source).st_size
                if picture.width * picture.height > max(_PIXELS, _RATIO * size):
                    raise ValueError(f"{size} bytes unpack to {picture.width} x {picture.height} pixels")
                return ImageOps.exif_transpose(picture).copy()
    except Exception as error:  # whatever a damaged picture makes PIL raise
        raise DataError(f"{where}: cannot read {name} as a picture: {brief(error)}; save it as .png or .jpg") from error


def picture_to_array(picture: Image.Image) -> np.ndarray:
    """uint8 (h, w) or (h, w, 3); 16-bit greyscale keeps its precision as floats."""
    if picture.mode.startswith("I;16"):
        return np.asarray(picture, dtype=np.float32) / 65535.0
    if picture.mode in ("1", "L", "LA"):
        return np.asarray(picture.convert("L"))
    return np.asarray(picture.convert("RGB"))


def with_channels(pixels: np.ndarray, channels: int, where: str) -> np.ndarray:
    """(h, w) or (h, w, c) -> (h, w, channels): grey is repeated, colour becomes luma; nothing else is converted."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    given = pixels.shape[2]
    if given == channels:
        return pixels
    if given == 1:
        return np.repeat(pixels, channels, axis=2)
    if given == 3 and channels == 1:
        return np.clip(pixels @ LUMA, 0.0, 1.0)[:, :, None]
    raise DataError(f"{where}: the model takes {channels} channels and the image has {given} (shape {pixels.shape})")


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """(channels, h, w) -> (channels, height, width), bilinear with antialiasing; values stay in [0, 1]."""
    if pixels.shape[1:] == (height, width):
        return pixels.contiguous()
    resized = F.interpolate(pixels[None], (height, width), mode="bilinear", align_corners=False, antialias=True)[0]
    return resized.clamp(0.0, 1.0)
