"""The contract of a runner, for every runner that this machine has, and for those of GPUs over a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from fake_tensorrt import ALIGNMENT, fake_runner

from turbovit.engines import trt_runner
from turbovit.engines.bundle import Bundle, Engine, Profile
from turbovit.engines.encoder import RUNNERS, TORCH_ENGINE
from turbovit.engines.errors import EngineInputError
from turbovit.engines.families import load
from turbovit.engines.runner import Runner, Tensors, on_device
from turbovit.export.certify import read_reference

FP32_RELATIVE_L2 = 1e-5  # the certificate's bound
AVAILABLE = [
    (name, device)
    for name, device in product(RUNNERS, ("cpu", "cuda"))
    if load(RUNNERS[name]).unavailable(torch.device(device)) is None
]
# The engine computes with the reference tower; for at most 3 images a run, so that larger batches are split.
FAKE = Engine(
    runtime="tensorrt",
    version="10.14.1",
    precision="fp32",
    attention="decomposed",
    file="tensorrt.fp32.engine",
    profiles=(Profile({"images": (1, 1, 1)}), Profile({"images": (1, 2, 3)})),
)
FAKES = {"fake": 0, "fake with graphs": 2}
RUNNERS_HERE = [*AVAILABLE, ("tensorrt", "fake"), ("tensorrt_rtx", "fake with graphs")]


def open_runner(bundle: Bundle, name: str, device: str) -> Runner:
    if device in FAKES:
        tower = open_runner(bundle, "torch", "cpu")
        return fake_runner(bundle.manifest, FAKE, tower.run, load(RUNNERS[name]), FAKES[device])[0]
    engine = TORCH_ENGINE if name == "torch" else bundle.manifest.engine(name, "fp32")
    assert isinstance(engine, Engine)
    return load(RUNNERS[name]).open(bundle, engine, torch.device(device))


@pytest.fixture(autouse=True)
def _host_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_runner, "_ALIGNMENT", ALIGNMENT)


@pytest.fixture(scope="module", params=RUNNERS_HERE, ids=["-".join(pair) for pair in RUNNERS_HERE])
def runner(request: pytest.FixtureRequest, tiny_gemma3_bundle: Bundle) -> Iterator[Runner]:
    with open_runner(tiny_gemma3_bundle, *request.param) as opened:
        yield opened


def pixels(*seeds: int) -> torch.Tensor:
    """One image of noise for each seed, uint8 [images, 3, 896, 896]."""
    rows = [torch.randint(0, 256, (3, 896, 896), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows).to(torch.uint8)


def features(runner: Runner, rows: torch.Tensor) -> torch.Tensor:
    return runner.run({"pixels": rows})["features"]


def relative_l2(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.double().cpu(), expected.double().cpu()
    return float(((got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max())


def test_onnxruntime_and_torch_are_here() -> None:
    assert {("onnxruntime", "cpu"), ("torch", "cpu")} <= set(AVAILABLE)


ONE = torch.zeros(1, 3, 896, 896, dtype=torch.uint8)
WRONG_INPUTS = {
    "no input": ({}, r"inputs are \[\], expected \['pixels'\]"),
    "another name": ({"images": ONE}, r"\['images'\], expected \['pixels'\]"),
    "one too many": ({"pixels": ONE, "mask": ONE}, r"\['mask', 'pixels'\], expected \['pixels'\]"),
    "dtype": ({"pixels": ONE.float()}, "pixels is torch.float32, expected uint8"),
    "rank": ({"pixels": ONE[0]}, "3 dimensions, expected 4"),
    "channels": ({"pixels": ONE[:, :1]}, "1 at axis 1, expected 3"),
    "height": ({"pixels": ONE[:, :, :448]}, "448 at axis 2, expected 896"),
    "no image": ({"pixels": ONE[:0]}, "0 at axis 0, expected a positive"),
    "over the limit": ({"pixels": ONE.expand(9, -1, -1, -1)}, "9 images in one run.* at most 8: send fewer, or build"),
}


@pytest.mark.parametrize(("inputs", "reason"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_wrong_inputs_are_refused_with_the_reason(runner: Runner, inputs: Tensors, reason: str) -> None:
    with pytest.raises(EngineInputError, match=reason):
        runner.run(inputs)


def test_as_many_images_as_the_limit_says_are_taken(runner: Runner) -> None:
    assert features(runner, ONE.expand(8, -1, -1, -1)).shape == (8, 256, 64)


def test_outputs_are_as_the_manifest_says(runner: Runner) -> None:
    outputs = runner.run({"pixels": pixels(0, 1)})
    assert list(outputs) == ["features"]
    assert outputs["features"].shape == (2, 256, 64)
    assert outputs["features"].dtype == torch.float32
    assert outputs["features"].device.type == runner.device.type


def test_outputs_agree_with_the_reference_in_the_bundle(runner: Runner, tiny_gemma3_bundle: Bundle) -> None:
    for sample, expected in read_reference(tiny_gemma3_bundle):
        assert relative_l2(runner.run(sample.inputs)["features"], expected["features"]) <= FP32_RELATIVE_L2


def test_later_runs_leave_earlier_outputs_alone(runner: Runner) -> None:
    first = features(runner, pixels(0))
    before = first.clone()
    other = features(runner, pixels(1))
    again = features(runner, pixels(0))
    assert torch.equal(first, before)
    assert not torch.equal(first, other)
    assert torch.equal(first, again)
    assert first.data_ptr() != again.data_ptr()


def test_the_caller_owns_the_outputs(runner: Runner) -> None:
    first = features(runner, pixels(0))
    before = first.clone()
    with torch.inference_mode():  # torch's own outputs are inference tensors
        first.zero_()
    assert torch.equal(features(runner, pixels(0)), before)


def test_inputs_are_left_alone_and_need_not_be_contiguous(runner: Runner) -> None:
    rows = pixels(0, 1)
    expected = features(runner, rows)
    strided = rows.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # channels last in memory
    assert not strided.is_contiguous()
    assert torch.equal(features(runner, strided), expected)
    assert torch.equal(rows, pixels(0, 1))


def test_a_batch_gives_what_its_rows_give_alone(runner: Runner) -> None:
    together = features(runner, pixels(0, 1, 2))
    for seed in range(3):
        assert relative_l2(together[seed : seed + 1], features(runner, pixels(seed))) <= FP32_RELATIVE_L2


def test_eight_threads_get_their_own_images_features(runner: Runner) -> None:
    expected = [features(runner, pixels(seed)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda seed: features(runner, pixels(seed)), range(8)))
    for result, own in zip(got, expected, strict=True):
        assert relative_l2(result, own) <= FP32_RELATIVE_L2


def test_the_runners_agree(tiny_gemma3_bundle: Bundle) -> None:
    results = []
    for name, device in RUNNERS_HERE:
        with open_runner(tiny_gemma3_bundle, name, device) as opened:
            assert name in opened.description
            results.append(features(opened, pixels(3)))
    assert all(relative_l2(result, results[0]) <= FP32_RELATIVE_L2 for result in results)


@pytest.mark.parametrize(("name", "device"), RUNNERS_HERE, ids=["-".join(pair) for pair in RUNNERS_HERE])
def test_a_runner_is_closed_at_the_end_of_its_block(
    name: str, device: str, tiny_gemma3_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_runner(tiny_gemma3_bundle, name, device)
    closed = []
    monkeypatch.setattr(opened, "close", lambda: closed.append(True))
    with opened as inside:
        assert inside is opened
        assert not closed
    assert closed == [True]
    with pytest.raises(EngineInputError), opened:
        opened.run({})
    assert closed == [True, True]


class FakeHostTensor:
    """What `on_device` asks of a tensor in host memory, recorded; its copies are tensors of the same kind."""

    device = torch.device("cpu")

    def __init__(self, events: list[Any]):
        self.events = events

    def contiguous(self) -> FakeHostTensor:
        self.events.append("contiguous")
        return self

    def pin_memory(self) -> FakeHostTensor:
        self.events.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> FakeHostTensor:
        self.events.append((device, non_blocking))
        return self


def test_host_tensors_go_to_cuda_through_pinned_memory_without_waiting() -> None:
    events: list[Any] = []
    cuda = torch.device("cuda", 1)
    on_device(FakeHostTensor(events), cuda)  # type: ignore[arg-type]
    assert events == ["contiguous", "pinned", (cuda, True)]


def test_tensors_that_are_there_are_not_copied() -> None:
    tensor = torch.zeros(3)
    assert on_device(tensor, torch.device("cpu")) is tensor
    assert on_device(torch.zeros(2, 3).T, torch.device("cpu")).is_contiguous()
