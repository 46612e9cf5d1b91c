"""Gemma 3: images to 896x896 uint8 crops, and features back to images.

Reference: `transformers.models.gemma3` (processor and image processor), Gemma 3 report arXiv:2503.19786 section 2
(pan and scan).
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from turbovit.engines.errors import InputError
from turbovit.engines.images import ImageLike, readable_rgb
from turbovit.engines.options import ENCODE, LABELS, SWITCH, Option
from turbovit.engines.preprocessor import Encoded, Pixels, Preprocessor
from turbovit.engines.resizing import pixels_from_rgb, resized

PAN_AND_SCAN_VARIABLE = "TURBOVIT_PAN_AND_SCAN"
# What Gemma3Processor passes to its image processor at every call: it wins over preprocessor_config.json. A test
# compares it with the installed transformers, which keeps it in another place in each version.
PROCESSOR_OPTIONS: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
_PAN_AND_SCAN = {name: value for name, value in PROCESSOR_OPTIONS.items() if name.startswith("pan_and_scan_")}
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


class Gemma3Preprocessor(Preprocessor):
    """One row a crop: the whole image first, then the pan-and-scan crops where that is on.

    Pan and scan is off, as in `Gemma3Processor`, whose defaults win over what the processor files say;
    ``TURBOVIT_PAN_AND_SCAN=1`` turns it on, and a request's own option wins over both.
    """

    options: ClassVar[tuple[Option, ...]] = (
        *LABELS,
        Option(("mm_processor_kwargs", "do_pan_and_scan"), True, SWITCH),
        Option((ENCODE, "do_pan_and_scan"), True, SWITCH),
    )

    def __init__(self, processor_folder: Path, facts: Mapping[str, Any]):
        from transformers import Gemma3ImageProcessor

        self._processor = Gemma3ImageProcessor.from_pretrained(processor_folder)
        self._tokens = int(facts["tokens_per_crop"])

    @property
    def pan_and_scan(self) -> bool:
        """Whether elongated images are cut into crops besides being shrunk whole."""
        configured = os.environ.get(PAN_AND_SCAN_VARIABLE)
        if configured is None:
            return bool(PROCESSOR_OPTIONS["do_pan_and_scan"])
        if configured.lower() not in _SWITCH:
            raise InputError(f"{PAN_AND_SCAN_VARIABLE}={configured!r}, expected one of {', '.join(_SWITCH)}")
        return _SWITCH[configured.lower()]

    def pixels_from_image(  # type: ignore[override]  # options are each family's own
        self, image: ImageLike, do_pan_and_scan: bool | None = None
    ) -> Pixels:
        """One image, whole and in crops.

        Args:
            do_pan_and_scan: None is what `pan_and_scan` says.
        """
        whole = pixels_from_rgb(readable_rgb(image, self.alpha))
        cuts = self.pan_and_scan if do_pan_and_scan is None else do_pan_and_scan
        crops = self._processor.pan_and_scan_batched(whole, **_PAN_AND_SCAN) if cuts else []
        size = {side: self._processor.size[side] for side in ("height", "width")}
        rows = np.empty((1 + len(crops), 3, size["height"], size["width"]), dtype=np.uint8)  # the whole image first
        for row, crop in zip(rows, (whole, *crops), strict=True):
            row[:] = resized(self._processor, crop, size)
        return Pixels(rows=torch.from_numpy(rows), group=None, runs=(self._tokens,) * len(rows))

    def inputs_from_rows(self, rows: torch.Tensor, group: Hashable) -> dict[str, torch.Tensor]:
        return {"pixels": rows}

    def encoded_from_rows(self, outputs: Mapping[str, torch.Tensor], pixels: Pixels) -> Encoded:
        return Encoded(outputs["features"].flatten(0, 1), pixels.runs)
