"""The reference tower as a runner: only from the checkpoint that the bundle was built from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import TORCH_ENGINE
from turbovit.engines.errors import CheckpointError
from turbovit.export.certify import read_reference
from turbovit.export.torch_runner import TorchRunner


def open_from(bundle: Bundle, model: Path) -> TorchRunner:
    source = replace(bundle.manifest.source, name=str(model))
    moved = Bundle(bundle.path, replace(bundle.manifest, source=source))
    return TorchRunner.open(moved, TORCH_ENGINE, torch.device("cpu"))


def test_it_gives_the_reference_outputs(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle) -> None:
    runner = open_from(tiny_gemma3_bundle, tiny_gemma3)
    sample, expected = read_reference(tiny_gemma3_bundle)[1]
    got = runner.run(sample.inputs)["features"]
    assert (got - expected["features"]).norm() <= 1e-6 * expected["features"].norm()
    assert runner.description == f"torch {torch.__version__} on cpu"


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": "multi_modal_projector.mm_soft_emb_norm.weight"},
        {"preprocessor_config": {"image_mean": [0.4] * 3}},
    ],
    ids=["weights", "settings"],
)
def test_another_checkpoint_is_refused(
    tiny_gemma3_bundle: Bundle, changed_model: Callable[..., Path], change: dict[str, Any]
) -> None:
    model = changed_model(**change)
    with pytest.raises(CheckpointError, match=f"{model} are no longer those of .*: turbovit build {model}"):
        open_from(tiny_gemma3_bundle, model)


def test_changed_sizes_are_refused(tiny_gemma3_bundle: Bundle, changed_model: Callable[..., Path]) -> None:
    model = changed_model()
    config = json.loads((model / "config.json").read_text())
    config["vision_config"]["layer_norm_eps"] = 1e-5
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weights or settings .* are no longer"):
        open_from(tiny_gemma3_bundle, model)


def test_a_checkpoint_that_is_gone_is_an_error_that_names_it(
    tiny_gemma3_bundle: Bundle, changed_model: Callable[..., Path]
) -> None:
    model = changed_model()
    shutil.rmtree(model)
    with pytest.raises(CheckpointError, match=f"no folder '{model}'"):
        open_from(tiny_gemma3_bundle, model)
