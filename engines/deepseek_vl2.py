"""DeepSeek-VL2: images to 384x384 uint8 views, and their features to rows of tokens with newlines and a separator.

Reference: the original's ``deepseek_vl2/models/processing_deepseek_vl_v2.py`` and ``modeling_deepseek_vl_v2.py``
(github.com/deepseek-ai/DeepSeek-VL2); arXiv:2412.10302. transformers has no such processor.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from turbovit.engines.images import ImageLike, rgb_from_image
from turbovit.engines.options import ENCODE, LABELS, SWITCH, Option
from turbovit.engines.preprocessor import Encoded, Pixels, Preprocessor

PROCESSOR_FILE = "processor_config.json"
MOST_CROPPED = 2  # a conversation with more images has none of them cut into tiles
DEFAULT_MEAN = (0.5, 0.5, 0.5)

Resolution = tuple[int, int]  # width, height


class DeepseekVL2Preprocessor(Preprocessor):
    """One row a view: the whole image first, then its tiles row by row.

    `grid` of an image is (1, rows of tiles, columns of tiles). Its tokens are one run: ``side`` rows of the global
    view, a separator, and the tiles put together, each row of tokens with a newline behind it.
    """

    alpha = "drop"
    # In requests the number of a conversation's images decides.
    options: ClassVar[tuple[Option, ...]] = (*LABELS, Option((ENCODE, "cropping"), False, SWITCH))

    def __init__(self, processor_folder: Path, facts: Mapping[str, Any]):
        config = json.loads((processor_folder / PROCESSOR_FILE).read_text(encoding="utf-8"))
        self._resolutions: list[Resolution] = [(width, height) for width, height in config["candidate_resolutions"]]
        self._colour = tuple(int(value * 255) for value in config.get("image_mean") or DEFAULT_MEAN)
        self._tile, self._side = int(facts["tile"]), int(facts["tokens_per_side"])
        self._global_first = facts["global_view_pos"] == "head"

    def pixels_from_image(  # type: ignore[override]  # options are each family's own
        self, image: ImageLike, *, cropping: bool = True
    ) -> Pixels:
        """The views of one image.

        Args:
            cropping: whether it may have several tiles. The original never cuts the images of a conversation that
                holds more than two; what looks at one image alone cannot know that.
        """
        rgb = rgb_from_image(image, self.alpha)
        width, height = best_resolution(rgb.size, self._resolutions) if cropping else (self._tile, self._tile)
        local = self._padded(rgb, (width, height))
        corners = [(x, y) for y in range(0, height, self._tile) for x in range(0, width, self._tile)]
        tiles = [local.crop((x, y, x + self._tile, y + self._tile)) for x, y in corners]
        views = [self._padded(rgb, (self._tile, self._tile)), *tiles]
        grid = (1, height // self._tile, width // self._tile)
        rows = torch.from_numpy(np.stack([np.asarray(view) for view in views])).permute(0, 3, 1, 2).contiguous()
        return Pixels(rows, group=None, runs=(self.tokens(*grid[1:]),), grid=grid)

    def tokens(self, rows: int, columns: int) -> int:
        """Tokens of an image of so many rows and columns of tiles."""
        side = self._side
        return side * (side + 1) + 1 + side * rows * (side * columns + 1)

    def inputs_from_rows(self, rows: Tensor, group: Hashable) -> dict[str, Tensor]:
        return {"pixels": rows}

    def encoded_from_rows(self, outputs: Mapping[str, Tensor], pixels: Pixels) -> Encoded:
        assert pixels.grid is not None
        _, rows, columns = pixels.grid
        features = outputs["features"].unflatten(1, (self._side, self._side))  # [views, side, side, hidden]
        newline, separator = (self._tensor(name, features) for name in ("image_newline", "view_seperator"))
        tiles = features[1:].unflatten(0, (rows, columns)).transpose(1, 2)  # [rows, side, columns, side, hidden]
        whole, local = _lines(features[0], newline), _lines(tiles.flatten(2, 3).flatten(0, 1), newline)
        first, last = (whole, local) if self._global_first else (local, whole)
        return Encoded(torch.cat([first, separator[None], last]), pixels.runs, grid=pixels.grid)

    def _padded(self, rgb: Image.Image, size: Resolution) -> Image.Image:
        """The image at its own proportions in the middle of a canvas."""
        width, height = rgb.size
        if min(round(width / height * size[1]), round(height / width * size[0])) == 0:
            return Image.new("RGB", size, self._colour)  # as Pillow 13: of less than half a pixel nothing is left
        return ImageOps.pad(rgb, size, color=self._colour)

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        """One of the bundle's extra tensors [hidden]; copied to a device once."""
        placed = self.tensors[name].to(like)
        if placed is not self.tensors[name]:
            self.tensors = {**self.tensors, name: placed}
        return placed


def best_resolution(size: Resolution, candidates: Sequence[Resolution]) -> Resolution:
    """Where most of an image's own pixels are kept, and of equals the one with the least canvas left over.

    The original's ``select_best_resolution``, in double arithmetic: the first of equals stays.
    """
    width, height = size

    def fit(candidate: Resolution) -> tuple[int, int]:
        scale = min(candidate[0] / width, candidate[1] / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        return effective, effective - candidate[0] * candidate[1]

    return max(candidates, key=fit)


def _lines(grid: Tensor, newline: Tensor) -> Tensor:
    """[rows, columns, hidden] to [rows * (columns + 1), hidden], a newline at the end of each row."""
    return torch.cat([grid, newline.expand(len(grid), 1, -1)], dim=1).flatten(0, 1)
