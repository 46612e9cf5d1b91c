"""Images in, features out, whatever the entry, the batch and the runtime."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from turbovit.engines import encoder as encoder_module
from turbovit.engines.bundle import Bundle, Engine
from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.engines.errors import BundleError, CheckpointError, InputError, RuntimeUnavailableError, TurbovitError
from turbovit.engines.preprocessor import Encoded
from turbovit.engines.runner import Tensors
from turbovit.export.samples import write_sample

FP32_RELATIVE_L2 = 1e-5  # the certificate's bound


@pytest.fixture(scope="module")
def encoder(tiny_gemma3_bundle: Bundle) -> Encoder:
    return open_encoder(tiny_gemma3_bundle, device="cpu")


def picture(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def equal(a: Encoded, b: Encoded) -> bool:
    return a.runs == b.runs and torch.equal(a.features, b.features)


def close(a: Encoded, b: Encoded) -> bool:
    difference = (a.features.double() - b.features.double()).norm() / b.features.double().norm()
    return a.runs == b.runs and float(difference) <= FP32_RELATIVE_L2


def test_no_image_gives_no_result(encoder: Encoder) -> None:
    assert encoder.encode([]) == []


def test_an_image_gives_its_tokens(encoder: Encoder) -> None:
    (encoded,) = encoder.encode([picture(0)])
    assert encoded.features.shape == (256, 64)
    assert encoded.runs == (256,)
    assert [part.shape for part in encoded.embeddings] == [(256, 64)]


def test_every_entry_gives_the_same(encoder: Encoder, tmp_path: Path) -> None:
    image = picture(0)
    path = tmp_path / "image.png"
    image.save(path)
    from_object, *others = encoder.encode([image, np.asarray(image), path, str(path)])
    assert all(close(other, from_object) for other in others)


def test_images_keep_their_order_however_they_are_batched(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOVIT_PAN_AND_SCAN", "1")
    images = [picture(0), picture(1, 600, 300), picture(2)]
    alone = [encoder.encode([image])[0] for image in images]
    assert [len(encoded.runs) for encoded in alone] == [1, 3, 1]
    items = [encoder.preprocessor.pixels_from_image(image) for image in images]
    for max_batch in (None, 1, 2, 100):
        got = encoder.encode_pixels(items, max_batch)
        assert all(close(a, b) for a, b in zip(got, alone, strict=True))


def test_no_run_is_larger_than_the_bundle_and_the_caller_allow(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = encoder.runner.run

    def counting(inputs: Tensors) -> dict[str, torch.Tensor]:
        sizes.append(len(inputs["pixels"]))
        return run(inputs)

    monkeypatch.setattr(encoder.runner, "run", counting)
    items = [encoder.preprocessor.pixels_from_image(picture(seed)) for seed in range(9)]
    encoder.encode_pixels(items, 100)
    encoder.encode_pixels(items[:3], 2)
    assert sizes == [8, 1, 2, 1]


def test_images_of_several_groups_never_share_a_run(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, object]] = []
    items = [replace(encoder.preprocessor.pixels_from_image(picture(seed)), group=seed % 2) for seed in range(4)]

    def inputs_from_rows(rows: torch.Tensor, group: object) -> dict[str, torch.Tensor]:
        asked.append((len(rows), group))
        return {"pixels": rows}

    expected = encoder.encode([picture(seed) for seed in range(4)])
    monkeypatch.setattr(encoder.preprocessor, "inputs_from_rows", inputs_from_rows)
    got = encoder.encode_pixels(items)
    assert asked == [(2, 0), (2, 1)]
    assert all(close(a, b) for a, b in zip(got, expected, strict=True))


def test_eight_threads_get_their_own_images_features(encoder: Encoder) -> None:
    expected = [encoder.encode([picture(seed)])[0] for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda seed: encoder.encode([picture(seed)])[0], range(8)))
    assert all(close(a, b) for a, b in zip(got, expected, strict=True))


def test_features_stay_as_they_are_while_others_are_encoded(encoder: Encoder) -> None:
    (kept,) = encoder.encode([picture(0)])
    before = kept.features.clone()
    (again,) = encoder.encode([picture(1), picture(0)])[1:]
    assert torch.equal(kept.features, before)
    assert close(again, kept)


def test_the_error_for_an_unusable_image_says_which(encoder: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes(b"no image")
    with pytest.raises(InputError, match=r"image 2 of 3: .*cut\.png.*no known format"):
        encoder.encode([picture(0), path, picture(1)])
    encoder.encode([picture(0)])


@dataclass
class Machine:
    """Which runtimes seem to be away, and why; which fail to open, and how; which engines were opened."""

    unavailable: dict[tuple[str, str], str] = field(default_factory=dict)
    failing: dict[tuple[str, str], TurbovitError] = field(default_factory=dict)
    opened: list[Engine] = field(default_factory=list)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with CUDA where every rung opens, until a test says otherwise."""
    state = Machine()

    def fake(runtime: str) -> type:
        class Fake:
            def __init__(self, device: torch.device):
                self.description = f"{runtime} on {device}"

            @classmethod
            def unavailable(cls, device: torch.device) -> str | None:
                return state.unavailable.get((runtime, device.type))

            @classmethod
            def open(cls, bundle: Bundle, engine: Engine, device: torch.device) -> Fake:
                if (runtime, device.type) in state.failing:
                    raise state.failing[runtime, device.type]
                state.opened.append(engine)
                return cls(device)

        return Fake

    fakes = {path: fake(runtime) for runtime, path in encoder_module.RUNNERS.items()}
    real = encoder_module.load
    monkeypatch.setattr(encoder_module, "load", lambda path: fakes.get(path) or real(path))
    return state


RUNGS = [
    ("tensorrt", "cuda"),
    ("tensorrt_rtx", "cuda"),
    ("onnxruntime", "cuda"),
    ("torch", "cuda"),
    ("onnxruntime", "cpu"),
]


def with_all_runtimes(bundle: Bundle) -> Bundle:
    """A bundle that seems to have an engine for every rung."""
    (engine,) = bundle.manifest.engines
    others = (replace(engine, runtime=name) for name in ("tensorrt", "tensorrt_rtx"))
    return Bundle(bundle.path, replace(bundle.manifest, engines=(engine, *others)))


@pytest.mark.parametrize("how", ["unavailable", "fails as unavailable", "graph does not load", "no checkpoint"])
@pytest.mark.parametrize("rung", range(len(RUNGS)))
def test_auto_takes_the_best_rung_that_works_and_logs_why(
    rung: int, how: str, machine: Machine, tiny_gemma3_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"graph does not load": BundleError, "no checkpoint": CheckpointError}
    for above in RUNGS[:rung]:
        if how == "unavailable":
            machine.unavailable[above] = f"reason of {above}"
        else:
            machine.failing[above] = kinds.get(how, RuntimeUnavailableError)(f"reason of {above}")
    with caplog.at_level(logging.INFO, "turbovit"):
        opened = open_encoder(with_all_runtimes(tiny_gemma3_bundle))
    name, device = RUNGS[rung]
    assert opened.runner.description == f"{name} on {device}"
    reasons = "; ".join(f"{n} on {d}: reason of {(n, d)}" for n, d in RUNGS[:rung])
    expected = f"gemma3-tiny runs on {name} on {device}" + (f" (not {reasons})" if reasons else "")
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_a_rung_without_an_engine_is_passed_over_in_few_words(
    machine: Machine, tiny_gemma3_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    machine.unavailable["tensorrt_rtx", "cuda"] = "it is not installed"
    with caplog.at_level(logging.INFO, "turbovit"):
        open_encoder(tiny_gemma3_bundle)
    reasons = "tensorrt on cuda: no engine in the bundle; tensorrt_rtx on cuda: it is not installed"
    assert caplog.messages == [f"gemma3-tiny runs on onnxruntime on cuda (not {reasons})"]


def test_where_no_rung_works_all_reasons_are_given(machine: Machine, tiny_gemma3_bundle: Bundle) -> None:
    machine.unavailable.update({rung: f"reason {number}" for number, rung in enumerate(RUNGS)})
    with pytest.raises(RuntimeUnavailableError, match=r"run here: .*reason 0.*reason 1.*reason 4.*turbovit build"):
        open_encoder(tiny_gemma3_bundle)


@pytest.mark.parametrize(
    ("runtime", "device", "expected"),
    [
        ("auto", "cpu", "onnxruntime on cpu"),
        ("auto", "cuda:1", "onnxruntime on cuda:1"),
        ("torch", "auto", "torch on cuda"),
        ("torch", "cpu", "torch on cpu"),
        ("onnxruntime", "cuda", "onnxruntime on cuda"),
    ],
)
def test_runtime_and_device_can_be_chosen(
    runtime: str, device: str, expected: str, machine: Machine, tiny_gemma3_bundle: Bundle
) -> None:
    assert open_encoder(tiny_gemma3_bundle, runtime, device).runner.description == expected


def test_a_chosen_runtime_falls_back_to_the_cpu_only_where_the_device_is_auto(
    machine: Machine, tiny_gemma3_bundle: Bundle
) -> None:
    machine.failing["onnxruntime", "cuda"] = RuntimeUnavailableError("no cuDNN")
    assert open_encoder(tiny_gemma3_bundle, "onnxruntime").runner.description == "onnxruntime on cpu"
    with pytest.raises(RuntimeUnavailableError, match="onnxruntime on cuda: no cuDNN"):
        open_encoder(tiny_gemma3_bundle, "onnxruntime", "cuda")


@pytest.mark.parametrize("error", [BundleError("does not load"), CheckpointError("is gone")])
def test_the_error_of_a_chosen_runtime_is_raised_as_it_is(
    error: TurbovitError, machine: Machine, tiny_gemma3_bundle: Bundle
) -> None:
    machine.failing["torch", "cpu"] = error
    with pytest.raises(type(error), match=f"^{error}$"):
        open_encoder(tiny_gemma3_bundle, "torch", "cpu")


def test_a_chosen_runtime_without_an_engine_names_the_build(machine: Machine, tiny_gemma3_bundle: Bundle) -> None:
    empty = replace(tiny_gemma3_bundle, manifest=replace(tiny_gemma3_bundle.manifest, engines=()))
    with pytest.raises(BundleError, match=r"no engine for onnxruntime .*none.*turbovit build .* --runtime onnxruntime"):
        open_encoder(empty, "onnxruntime", "cpu")
    assert open_encoder(empty).runner.description == "torch on cuda"


@pytest.mark.parametrize(
    ("device", "there", "taken"),
    [("cuda", ("fp32", "bf16", "fp16"), "fp16"), ("cuda", ("fp32", "bf16"), "bf16"), ("cpu", ("fp16", "fp32"), "fp32")],
)
def test_the_precision_suits_the_device(
    device: str,
    there: Sequence[str],
    taken: str,
    machine: Machine,
    tiny_gemma3_bundle: Bundle,
) -> None:
    engine = tiny_gemma3_bundle.manifest.engines[0]
    engines = tuple(replace(engine, precision=precision) for precision in there)
    bundle = replace(tiny_gemma3_bundle, manifest=replace(tiny_gemma3_bundle.manifest, engines=engines))
    open_encoder(bundle, "onnxruntime", device)
    assert [engine.precision for engine in machine.opened] == [taken]


@pytest.mark.parametrize("runtime", ["", "tensorflow", "Auto"])
def test_an_unknown_runtime_is_refused_with_the_known(runtime: str, tiny_gemma3_bundle: Bundle) -> None:
    with pytest.raises(RuntimeUnavailableError, match=rf"'{runtime}'; available: auto, tensorrt, tensorrt_rtx, onnx"):
        open_encoder(tiny_gemma3_bundle, runtime)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:x", "mps", "meta"])
def test_an_unknown_device_is_refused_with_the_known(device: str, tiny_gemma3_bundle: Bundle) -> None:
    with pytest.raises(RuntimeUnavailableError, match=rf"'{device}'; expected auto, cpu, cuda or cuda:N"):
        open_encoder(tiny_gemma3_bundle, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("runtime", ["auto", "onnxruntime", "torch"])
def test_cuda_on_a_machine_without_it_is_refused(runtime: str, tiny_gemma3_bundle: Bundle) -> None:
    with pytest.raises(RuntimeUnavailableError, match="torch sees no CUDA device"):
        open_encoder(tiny_gemma3_bundle, runtime, "cuda")


def test_a_folder_is_checked_when_it_is_opened(tiny_gemma3_bundle: Bundle, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "bundle"))
    open_encoder(str(copy), device="cpu")
    (copy / "weights.fp32.bin").unlink()
    with pytest.raises(BundleError, match=r"weights\.fp32\.bin"):
        open_encoder(copy, device="cpu")


def from_checkpoint(bundle: Bundle, folder: Path) -> Bundle:
    source = replace(bundle.manifest.source, name=str(folder))
    return replace(bundle, manifest=replace(bundle.manifest, source=source))


def test_torch_gives_the_same_features_from_the_checkpoint(
    encoder: Encoder, tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(tiny_gemma3, tmp_path / "moved"))
    torch_encoder = open_encoder(from_checkpoint(tiny_gemma3_bundle, moved), "torch", "cpu")
    assert close(torch_encoder.encode([picture(0)])[0], encoder.encode([picture(0)])[0])


def test_torch_refuses_a_checkpoint_whose_weights_have_changed(tiny_gemma3_bundle: Bundle, tmp_path: Path) -> None:
    write_sample("gemma3", tmp_path / "other", "tiny", 1)
    with pytest.raises(CheckpointError, match=r"other are no longer those of .*sha256 .*, expected .*turbovit build"):
        open_encoder(from_checkpoint(tiny_gemma3_bundle, tmp_path / "other"), "torch", "cpu")


def test_torch_refuses_a_checkpoint_that_is_gone(tiny_gemma3_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*gone"):
        open_encoder(from_checkpoint(tiny_gemma3_bundle, tmp_path / "gone"), "torch", "cpu")
