"""Resizing as the Hugging Face image processors do it, on the bytes as PIL has them.

torch's uint8 kernel works on pixels whose channels lie side by side, which is PIL's order. The processors bring an
image into planes first, and torch brings it back: two copies of the whole image, for the same values. Here only what
is left after resizing is brought into planes, by the one copy that puts it where the engine wants it. numpy makes
that copy on one thread, which takes less time than torch needs to wake its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from turbovit.engines.images import array_from_rgb


def pixels_from_rgb(image: Image.Image) -> Tensor:
    """uint8 [1, 3, height, width] in channels-last memory."""
    return torch.from_numpy(array_from_rgb(image)).permute(2, 0, 1)[None]


def resized(processor: Any, pixels: Tensor, size: Mapping[str, int], **options: Any) -> np.ndarray:
    """uint8 [3, height, width], in channels-last memory: `pixels` resized by a processor's `resize`, with its filter.

    Args:
        processor: a Hugging Face image processor of the torchvision backend.
        pixels: uint8 [1, 3, height, width].
        size: ``height`` and ``width``, or what else the processor's `resize` takes.
        options: its other arguments.

    Raises:
        ValueError: the processor refuses the image's shape.
    """
    from transformers.image_utils import SizeDict

    return processor.resize(pixels, size=SizeDict(**size), resample=processor.resample, **options)[0].numpy()
