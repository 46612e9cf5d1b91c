"""Llama 4: images to 336x336 uint8 tiles and a global view, and features back to images.

Reference: `transformers.models.llama4` (processor and image processor), 5.24.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from turbovit.engines.images import ImageLike, rgb_from_image
from turbovit.engines.preprocessor import Encoded, Pixels, Preprocessor


class Llama4Preprocessor(Preprocessor):
    """One row a tile, row by row, then the global view where there is more than one tile.

    `grid` of an image is (1, rows of tiles, columns of tiles).
    """

    def __init__(self, processor_folder: Path, facts: Mapping[str, Any]):
        from transformers import AutoImageProcessor

        self._processor = AutoImageProcessor.from_pretrained(processor_folder)
        self._tokens = int(facts["tokens_per_tile"])

    def pixels_from_image(self, image: ImageLike, **options: Any) -> Pixels:
        rgb = rgb_from_image(image, self.alpha)
        output = self._processor(rgb, do_rescale=False, do_normalize=False, return_tensors="pt")
        rows = output["pixel_values"].flatten(0, -4)  # uint8 [tiles, 3, 336, 336]
        ((tile_rows, tile_columns),) = output["aspect_ratios"].tolist()
        return Pixels(rows, group=None, runs=(self._tokens,) * len(rows), grid=(1, tile_rows, tile_columns))

    def inputs_from_rows(self, rows: torch.Tensor, group: Hashable) -> dict[str, torch.Tensor]:
        return {"pixels": rows}

    def encoded_from_rows(self, outputs: Mapping[str, torch.Tensor], pixels: Pixels) -> Encoded:
        return Encoded(outputs["features"].flatten(0, 1), pixels.runs, grid=pixels.grid)
