"""What TensorRT-RTX makes of attention whose softmax is in float32: one kernel, at the towers' real widths."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tower_checks import tower_of, write_base_graph

from turbovit.engines.bundle import Profile
from turbovit.engines.families import distinct_families
from turbovit.export.islands import islands_from_file
from turbovit.export.memory import estimate
from turbovit.export.plan import ATTENTION_FORMS
from turbovit.export.precision import in_precision
from turbovit.export.profiles import shapes_from_profile
from turbovit.export.samples import write_sample
from turbovit.export.to_onnx import derive_graph
from turbovit.export.tower import Tower

pytest.importorskip("tensorrt_rtx")

FAMILIES = [row.name for row in distinct_families()]
LAYERS = 1
FUSED, SOFTMAX = "_mha_", "Exp"  # in the names of the layers
CHILD = Path(__file__).with_name("rtx_layers.py")


@dataclass
class Compiled:
    """A graph, and what the compiler says of it for some profiles."""

    graph: Path
    tower: Tower
    profiles: tuple[Profile, ...]
    layers: list[str]
    activations: list[int]

    def named(self, part: str) -> int:
        return sum(part in name for name in self.layers)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for checkpoints of full width; hundreds of megabytes each."""
    return tmp_path_factory.mktemp("full-width")


def compiled(folder: Path, family: str, precision: str, capability: str, raised: tuple[str, ...] = ()) -> Compiled:
    """A tower of full width, in the form of attention that a build takes first, compiled for its own profiles."""
    if not (folder / family / "config.json").exists():
        write_sample(family, folder / family, "full", 0, LAYERS)
    tower = in_precision(tower_of(folder / family), precision, raised)
    base, graph = (folder / f"{family}.{precision}.{kind}.onnx" for kind in ("base", "form"))
    write_base_graph(tower, base, precision)
    derive_graph(base, graph, ATTENTION_FORMS["tensorrt_rtx"][precision][0])
    profiles = tower.default_profiles(tower.default_limits())
    job = {
        "graph": str(graph),
        "capability": capability,
        "shapes": [shapes_from_profile(profile, tower.inputs()) for profile in profiles],
    }
    result = subprocess.run([sys.executable, CHILD], input=json.dumps(job), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return Compiled(graph, tower, profiles, **json.loads(result.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "capability"), [("fp16", "86"), ("bf16", "120")])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_one_kernel_and_its_softmax_in_float32(
    checkpoints: Path, family: str, precision: str, capability: str
) -> None:
    found = compiled(checkpoints, family, precision, capability)
    islands = islands_from_file(found.graph)
    assert (len(islands.softmaxes), islands.hidden) == (LAYERS, ())
    assert found.named(FUSED) == LAYERS * len(found.profiles)
    assert found.named(SOFTMAX) == 0
    # The compiler's own count is below ours, which has no scores.
    ours = [estimate(found.tower, profile, precision).activations for profile in found.profiles]
    assert len(found.activations) == len(found.profiles)
    assert all(theirs <= careful for theirs, careful in zip(found.activations, ours, strict=True))


@pytest.mark.slow
def test_attention_in_float32_is_not_fused_and_its_scores_are_counted(checkpoints: Path) -> None:
    raised = ("blocks.0.attention",)
    found = compiled(checkpoints, "gemma3", "fp16", "89", raised)
    assert (found.named(FUSED), found.named(SOFTMAX)) == (0, LAYERS * len(found.profiles))
    for profile, theirs in zip(found.profiles, found.activations, strict=True):
        careful = estimate(found.tower, profile, "fp16", raised).activations
        assert estimate(found.tower, profile, "fp16").activations < theirs <= careful
