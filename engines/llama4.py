"""Llama 4: images to 336x336 uint8 tiles and a global view, and features back to images.

Reference: `transformers.models.llama4` (processor and image processor), 5.24.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbovit.engines.images import ImageLike, readable_rgb
from turbovit.engines.preprocessor import Encoded, Pixels, Preprocessor
from turbovit.engines.resizing import pixels_from_rgb, resized

Size = tuple[int, int]


class Llama4Preprocessor(Preprocessor):
    """One row a tile, row by row, then the global view where there is more than one tile.

    `grid` of an image is (1, rows of tiles, columns of tiles).
    """

    def __init__(self, processor_folder: Path, facts: Mapping[str, Any]):
        from transformers import AutoImageProcessor

        self._processor = AutoImageProcessor.from_pretrained(processor_folder)
        self._tokens = int(facts["tokens_per_tile"])
        self._side = int(self._processor.size["height"])
        # The functions with which the processor's class plans its tiles; each version keeps them beside the class.
        self._planning = import_module(type(self._processor).__module__)

    def pixels_from_image(self, image: ImageLike) -> Pixels:  # type: ignore[override]  # it has no options
        whole = pixels_from_rgb(readable_rgb(image, self.alpha))
        side = self._side
        canvas, (height, width) = self._fit((whole.shape[2], whole.shape[3]))
        tile_rows, tile_columns = canvas[0] // side, canvas[1] // side
        tiles = tile_rows * tile_columns
        rows = np.zeros((tiles + (tiles > 1), 3, side, side), dtype=np.uint8)  # black where the image ends
        fitted = resized(self._processor, whole, {"height": height, "width": width})
        for number, (top, left) in enumerate(product(range(0, canvas[0], side), range(0, canvas[1], side))):
            part = fitted[:, top : top + side, left : left + side]
            rows[number, :, : part.shape[1], : part.shape[2]] = part
        if tiles > 1:
            rows[tiles] = resized(self._processor, whole, {"height": side, "width": side})
        runs = (self._tokens,) * len(rows)
        return Pixels(torch.from_numpy(rows), group=None, runs=runs, grid=(1, tile_rows, tile_columns))

    def _fit(self, size: Size) -> tuple[Size, Size]:
        """The canvas of whole tiles for an image of `size`, and the size that the image has on it, at its top left.

        As `Llama4ImageProcessor._preprocess`; heights come first.
        """
        from transformers.image_utils import SizeDict

        processor, planning, side = self._processor, self._planning, self._side
        tile = SizeDict(height=side, width=side)
        canvases = planning.find_supported_resolutions(max_num_chunks=processor.max_patches, patch_size=tile)
        largest = processor.resize_to_max_canvas
        best = planning.get_best_fit(size, torch.tensor(canvases), resize_to_max_canvas=largest)
        # Small images are enlarged to one tile at most. Where the canvas is the limit it stays a tensor, as there:
        # what is divided by a side is float32 then, and one pixel less for many a photo of 3:4.
        target = best if largest else tuple(min(max(a, side), b) for a, b in zip(size, best, strict=True))
        height, width = planning.get_max_res_without_distortion(size, target)
        return (int(best[0]), int(best[1])), (max(int(height), 1), max(int(width), 1))

    def inputs_from_rows(self, rows: torch.Tensor, group: Hashable) -> dict[str, torch.Tensor]:
        return {"pixels": rows}

    def encoded_from_rows(self, outputs: Mapping[str, torch.Tensor], pixels: Pixels) -> Encoded:
        return Encoded(outputs["features"].flatten(0, 1), pixels.runs, grid=pixels.grid)
