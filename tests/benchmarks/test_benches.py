"""The smaller benchmarks: each checks that what it compares is equal, and measures something."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from turbovit.benchmarks import bench_build, bench_glue, bench_preprocess, bench_serve
from turbovit.benchmarks.bench_serve import growth, resident_over_images
from turbovit.benchmarks.child import in_child
from turbovit.benchmarks.report import Report, Skipped, Target
from turbovit.benchmarks.subjects import Subject, noise_image
from turbovit.benchmarks.timing import Spread
from turbovit.engines.bundle import read_manifest
from turbovit.engines.errors import BuildError, CertificationError, RuntimeUnavailableError

SIZE = (320, 200)


@pytest.fixture(autouse=True)
def _session_subjects(subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_preprocess, bench_glue, bench_serve):
        monkeypatch.setattr(module, "subject", lambda row, *rest: subjects[row.name])


def test_preprocessing_is_measured_beside_the_processor(tmp_path: Path) -> None:
    options = bench_preprocess.Options(("gemma3", "llama4", "qwen3_vl"), [SIZE], 2, tmp_path)
    found = bench_preprocess.bench_preprocess(options)
    assert {one.family for one in found.measurements} == {"decode", *options.families}
    assert len(found.targets) == 3
    assert len(found.equal) == 3
    assert any("torchvision.io differs from PIL" in note for note in found.notes)


def test_other_pixels_than_the_processors_are_not_timed(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor = subjects["qwen3_vl"].encoder().preprocessor
    theirs = bench_preprocess.transformers_pixels(subjects["qwen3_vl"])
    assert theirs is not None
    original = preprocessor.pixels_from_image

    def off_by_one(image: Any) -> Any:
        pixels = original(image)
        pixels.rows[0, 0, 0] ^= 1
        return pixels

    monkeypatch.setattr(preprocessor, "pixels_from_image", off_by_one)
    with pytest.raises(CertificationError, match=r"1 of \d+ pixel values are not the processor's"):
        bench_preprocess.require_equal_pixels("f", "c", preprocessor, theirs, noise_image(SIZE), Report("x", {}))


@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_vl"])
def test_the_stages_of_a_request(family: str, tmp_path: Path) -> None:
    pytest.importorskip("lmdeploy")
    found = bench_glue.bench_glue(bench_glue.Options((family,), "tiny", None, [SIZE], 2, 2, tmp_path))
    assert [one.facts["stage"] for one in found.measurements] == list(bench_glue.STAGES)
    assert all(sample > 0 for one in found.measurements for sample in one.spread.samples)
    assert len(found.equal) == len(found.targets) == 1


def test_the_glue_bench_fails_where_features_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmdeploy")
    original = bench_glue.request_of

    def swapped(side: Any, messages: Any) -> Any:
        request = original(side, messages)
        return {**request, "input_embeddings": request["input_embeddings"][::-1]}

    monkeypatch.setattr(bench_glue, "request_of", swapped)
    with pytest.raises(CertificationError, match="embeddings are not the engine's features"):
        bench_glue.bench_glue(bench_glue.Options(("gemma3",), "tiny", None, [SIZE], 2, 1, tmp_path))


def test_requests_by_several_clients(tmp_path: Path) -> None:
    pytest.importorskip("lmdeploy")
    found = bench_serve.bench_serve(bench_serve.Options(("llama4",), "tiny", None, SIZE, [1, 2], 2, 10, tmp_path))
    assert [one.case for one in found.measurements] == ["1 clients, 320x200", "2 clients, 320x200", "long run"]
    assert found.targets[0].met


@pytest.mark.slow
def test_memory_stays_flat_over_2000_different_images_of_many_sizes(subjects: dict[str, Subject]) -> None:
    encoder = subjects["qwen3_vl"].encoder()
    resident = resident_over_images(encoder, 2000)
    encoder.close()
    assert growth(resident) <= bench_serve.GROWTH_BYTES


def test_growth_is_seen() -> None:
    flat, leak = [500_000_000] * 100, [500_000_000 + 100_000 * number * 20 for number in range(100)]
    assert growth(flat) == 0
    assert growth(leak) > bench_serve.GROWTH_BYTES


@pytest.fixture
def gemma3_home(tiny_gemma3: Path, tmp_path: Path) -> Path:
    """Where the benchmark of builds finds the shared checkpoint, and puts its bundle."""
    home = tmp_path / "gemma3-tiny-all"
    home.mkdir()
    (home / "checkpoint").symlink_to(tiny_gemma3)
    return home


@pytest.mark.usefixtures("gemma3_home")
def test_a_build_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    options = bench_build.Options(("gemma3",), "tiny", None, ["onnxruntime"], [], [SIZE], 1, tmp_path)
    found = bench_build.bench_build(options)
    peaks = {one.case: one.spread.median for one in found.measurements if one.unit == "B"}
    assert set(peaks) == {"build", "load", f"load and run {SIZE[0]}x{SIZE[1]}"}
    assert all(1e8 < peak < 6e9 for peak in peaks.values())
    assert len(found.targets) == 3


def test_a_build_for_gpus_elsewhere_is_measured_and_what_cannot_run_is_told(gemma3_home: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    options = bench_build.Options(("gemma3",), "tiny", None, ["tensorrt_rtx"], ["8.9", "12.0"], [SIZE], 1, tmp_path)
    found = bench_build.bench_build(options)
    cases = [one.case for one in found.measurements if one.unit == "s"]
    assert cases[0] == "build"
    if not torch.cuda.is_available():
        assert (cases[1:], [one.contender for one in found.skipped]) == ([], ["tensorrt_rtx"])
    engine = read_manifest(gemma3_home / "bundle").engine("tensorrt_rtx", "fp16")
    assert engine is not None
    assert engine.architectures == ("8.9", "12.0")


def test_a_step_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"^load failed in a process of its own: BundleError: .* is not a turbovit bundle"
    ) as raised:
        in_child("load", bundle=tmp_path, runtime="onnxruntime")
    assert "\n" not in str(raised.value)
    with pytest.raises(BuildError, match=r"^fly ended with status 1 in a process of its own: .*KeyError: 'fly'$"):
        in_child("fly")


def test_a_report_is_written_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from turbovit.benchmarks.plots import write_plots

    found = Report("encoder", {"rounds": 3})
    for images in (1, 2):
        for patches in (256, 1024) if images == 1 else (256,):
            spreads = {name: Spread((1.0, 1.5, 2.0, 2.5, 3.0)) for name in ("a", "b")}
            found.add("f", f"{images} x {patches}", "s", spreads, patches=patches, images=images, flops=1)
    found.add("g", "one", "s", {"decode": Spread((1.0,))}, stage="decode")
    found.targets.append(Target("time", 0.9, 0.8))
    names = {path.name for path in [*found.write(tmp_path), *write_plots(found, tmp_path)]}
    plots = {"side-by-side", "by-patches", "by-batch"}
    assert names == {"encoder.json", "encoder.md", "encoder-g-stages.png", *(f"encoder-f-{name}.png" for name in plots)}
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") if name.endswith("png") else data
    markdown = (tmp_path / "encoder.md").read_text()
    assert "| f | 1 x 256 | b | 2000 ms | 1500 to 2500 | 1.00 |" in markdown
    assert "MISSED" in markdown
    assert str(found.machine["cpu"]) in markdown


def test_figures_are_in_units_that_people_read_and_no_path_of_the_machine_is_published(tmp_path: Path) -> None:
    found = Report("build", {}, folder=tmp_path / "work")
    for case, unit, value in (("a", "s", 9.99), ("b", "s", 165.8), ("c", "B", 5.13e9), ("d", "B", 1.8e10)):
        found.add("f", case, unit, {"x": Spread((value,))})
    rows = [line for line in found.markdown().splitlines() if line.startswith("| f |")]
    assert [row.split(" | ")[3] for row in rows] == ["9990 ms", "165.8 s", "5130 MB", "18 GB"]
    reason = f"{tmp_path}/work/gemma3/bundle cannot run"
    found.skipped.append(Skipped("f", "y", reason))
    assert found.to_json()["skipped"][0]["reason"] == "$WORK/gemma3/bundle cannot run"
    assert found.skipped[0].reason == reason  # what is shown here can be typed here


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbovit.benchmarks.plots import require_matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'turbovit\[bench\]'"):
        require_matplotlib()


def test_the_embeddings_of_a_request_are_tensors_of_their_own(subjects: dict[str, Subject]) -> None:
    """One part, one item: nothing is copied, and still nothing is shared between calls."""
    encoder = subjects["qwen3_vl"].encoder()
    pixels = [encoder.preprocessor.pixels_from_image(noise_image(SIZE))]
    first = encoder.encode_pixels(pixels)[0].features
    kept = first.clone()
    second = encoder.encode_pixels(pixels)[0].features
    assert first.data_ptr() != second.data_ptr()
    second.zero_()
    assert torch.equal(first, kept)
    encoder.close()
