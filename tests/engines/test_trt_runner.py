"""The TensorRT runners over a stand-in of the library that sees memory by address alone: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fake_tensorrt import ALIGNMENT, WORKSPACE, FakeEngine, FakeStream, FakeTensorRT, Strategies, fake_runner
from torch import Tensor

from turbovit.engines import trt_runner
from turbovit.engines.bundle import Engine, Manifest, Profile, Source, TensorSpec
from turbovit.engines.errors import BundleError, EngineInputError, EngineRunError
from turbovit.engines.trt_library import LoadedEngine
from turbovit.engines.trt_runner import TensorRTRTXRunner, TensorRTRunner

# Two symbols, as Qwen3-VL has them: rows of a batch, and patches that are four to a token.
MANIFEST = Manifest(
    family="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    source=Source("model", "0" * 64, {}),
    limits={"frames": 8, "merged": 64},
    inputs=(
        TensorSpec("pixels", "uint8", ("frames", "4*merged", 6)),
        TensorSpec("weight", "float32", (2, "4*merged")),
        TensorSpec("position", "int32", ("4*merged", 2)),
    ),
    outputs=(
        TensorSpec("features", "float32", ("frames", "merged", 3)),
        TensorSpec("deepstack_0", "float32", ("frames", "merged", 2)),
    ),
    facts={},
    reference="reference.safetensors",
    engines=(),
    tools={},
)
SMALL, WIDE, LARGE = (
    Profile({"frames": (1, 2, 8), "merged": (1, 4, 9)}),
    Profile({"frames": (1, 2, 3), "merged": (1, 16, 20)}),
    Profile({"frames": (1, 1, 1), "merged": (16, 32, 64)}),
)
ENTRY = Engine("tensorrt", "10.14.1", "fp16", "decomposed", "tensorrt.fp16.engine", ("8.9",), (SMALL, WIDE, LARGE))


def compute(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Something to which every value of every input counts, and rows do not see each other."""
    pixels = inputs["pixels"].float() / 255
    weighted = pixels * inputs["weight"].sum(0)[None, :, None] + inputs["position"].sum(1)[None, :, None] / 1000
    tokens = weighted.unflatten(1, (-1, 4)).sum(2)
    return {"features": tokens[..., :3].half(), "deepstack_0": tokens[..., 3:5].half() - 1}


def given(frames: int, merged: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixels": torch.randint(0, 256, (frames, 4 * merged, 6), generator=generator).to(torch.uint8),
        "weight": torch.rand(2, 4 * merged, generator=generator),
        "position": torch.randint(0, 64, (4 * merged, 2), generator=generator).int(),
    }


def make(runner_class: type[TensorRTRunner] = TensorRTRunner, graphs: int = 0) -> tuple[TensorRTRunner, FakeEngine]:
    return fake_runner(MANIFEST, ENTRY, compute, runner_class, graphs)


def assert_right(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    expected = compute(inputs)
    assert list(outputs) == list(expected)
    assert all(torch.equal(outputs[name], value) for name, value in expected.items())


@pytest.fixture(autouse=True)
def _host_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_runner, "_ALIGNMENT", ALIGNMENT)


@pytest.fixture(params=[0, 3], ids=["no graphs", "graphs"])
def graphs(request: pytest.FixtureRequest) -> int:
    return request.param


# frames, merged -> the profile of each run.
CHOICES = {
    (1, 1): [0],
    (8, 9): [0],
    (3, 10): [1],
    (3, 20): [1],
    (1, 21): [2],
    (1, 64): [2],
    (7, 13): [1, 1, 1],  # 3 + 3 + 1
    (5, 33): [2] * 5,
}


@pytest.mark.parametrize(("shape", "profiles"), CHOICES.items(), ids=[f"{f}x{m}" for f, m in CHOICES])
def test_a_shape_runs_in_the_first_profile_that_holds_it(shape: tuple[int, int], profiles: list[int]) -> None:
    runner, engine = make()
    used: list[int | None] = []
    run = engine.compute
    engine.compute = lambda inputs: used.append(engine.contexts[0].profile) or run(inputs)  # type: ignore[func-returns-value]
    inputs = given(*shape)
    assert_right(runner.run(inputs), inputs)
    assert used == profiles


def test_a_shape_that_no_profile_holds_is_refused_with_the_profiles() -> None:
    entry = replace(ENTRY, profiles=(SMALL, replace(WIDE, ranges={"frames": (1, 2, 3), "merged": (16, 16, 20)})))
    runner, _ = fake_runner(MANIFEST, entry, compute)
    for merged in (10, 21):
        with pytest.raises(
            EngineInputError,
            match=rf"2 frames, {merged} merged: no profile.*frames=1:2:8,merged=1:4:9; frames=1:2:3,merged=16:16:20",
        ):
            runner.run(given(2, merged))


def test_an_engine_without_profiles_takes_all_within_the_limits() -> None:
    runner, engine = fake_runner(MANIFEST, replace(ENTRY, profiles=()), compute)
    inputs = given(8, 64)
    assert_right(runner.run(inputs), inputs)
    assert engine.contexts[0].profiles_set == [0]


def test_the_profile_is_switched_only_when_it_changes() -> None:
    runner, engine = make()
    for merged in (1, 2, 12, 13, 2):
        inputs = given(1, merged)
        assert_right(runner.run(inputs), inputs)
    assert engine.contexts[0].profiles_set == [0, 1, 0]


def test_many_shapes_give_what_each_gives_alone(graphs: int) -> None:
    runner, _ = make(graphs=graphs)
    generator = torch.Generator().manual_seed(1)
    for step in range(60):
        frames, merged = torch.randint(1, 4, (2,), generator=generator).tolist()
        inputs = given(frames, merged, step)
        assert_right(runner.run(inputs), inputs)


def test_outputs_are_the_callers_own(graphs: int) -> None:
    runner, _ = make(graphs=graphs)
    kept = []
    for step in range(6):
        inputs = given(2, 3, step)
        kept.append((runner.run(inputs), inputs))
    for outputs, inputs in kept:
        assert_right(outputs, inputs)
    kept[0][0]["features"].zero_()
    assert_right(runner.run(kept[1][1]), kept[1][1])
    assert len({outputs["features"].data_ptr() for outputs, _ in kept}) == len(kept)


def test_inputs_are_left_alone_and_may_be_freed_or_changed_afterwards(graphs: int) -> None:
    runner, _ = make(graphs=graphs)
    for step in range(4):
        inputs = given(2, 3, step)
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        outputs = runner.run(inputs)
        assert all(torch.equal(inputs[name], before[name]) for name in inputs)
        for tensor in inputs.values():
            tensor.zero_()
        assert_right(outputs, before)


def test_unaligned_inputs_are_copied(graphs: int) -> None:
    runner, _ = make(graphs=graphs)
    inputs = given(3, 3)
    offset = {
        **inputs,
        "pixels": inputs["pixels"][1:],
        "weight": torch.cat([inputs["weight"][:1], inputs["weight"]])[1:],
    }
    assert offset["pixels"].data_ptr() % ALIGNMENT
    assert offset["pixels"].is_contiguous()
    for _ in range(3):
        assert_right(runner.run(offset), offset)


def test_sixteen_threads_get_their_own_results(graphs: int) -> None:
    runner, engine = make(graphs=graphs)

    def encode(step: int) -> None:
        inputs = given(1 + step % 3, 1 + step % 5, step)
        for _ in range(3):
            assert_right(runner.run(inputs), inputs)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(encode, range(48)))
    assert sum(context.runs for context in engine.contexts) >= 3 * 48


def test_every_run_takes_one_turn_in_the_callers_stream() -> None:
    runner, _ = make()
    runner.run(given(1, 2))
    runner.run(given(7, 13))  # three runs
    assert runner._stream.events == ["turn", "end of turn"] * 4  # type: ignore[attr-defined]


def test_activations_have_the_memory_that_the_largest_shape_so_far_needs() -> None:
    runner, engine = make()
    context = engine.contexts[0]
    runner.run(given(1, 2))
    assert context.memory[1] == 2 * WORKSPACE
    runner.run(given(2, 5))
    assert context.memory[1] == 10 * WORKSPACE
    first = context.memory
    runner.run(given(1, 1))
    assert context.memory == first


def test_a_failed_run_says_what_the_library_says_and_the_next_one_works() -> None:
    runner, engine = make()
    engine.contexts[0].fails_with = "an illegal memory access was encountered"
    with pytest.raises(EngineRunError, match=r"tensorrt\.fp16\.engine on tensorrt 10\.14\.1 on cpu failed: an illegal"):
        runner.run(given(1, 2))
    assert runner._stream.events[-1] == "end of turn"  # type: ignore[attr-defined]
    engine.contexts[0].fails_with = ""
    inputs = given(1, 2)
    assert_right(runner.run(inputs), inputs)


def test_an_engine_whose_output_is_larger_than_its_buffer_does_not_run() -> None:
    runner, engine = make()
    engine.manifest = replace(MANIFEST, outputs=(TensorSpec("features", "float32", ("frames", "4*merged", 3)),) * 2)
    with pytest.raises(EngineRunError, match=r"gives features \(1, 8, 3\), expected \(1, 2, 3\)"):
        runner.run(given(1, 2))
    assert engine.contexts[0].runs == 0


def test_a_closed_runner_refuses() -> None:
    runner, _ = make(graphs=2)
    for _ in range(3):
        runner.run(given(1, 2))
    runner.close()
    runner.close()
    assert len(runner._graphs) == 0
    with pytest.raises(EngineRunError, match="was closed"):
        runner.run(given(1, 2))


# CUDA graphs


def test_a_shape_gets_a_graph_when_it_comes_again() -> None:
    runner, engine = make(graphs=4)
    inputs = given(1, 2)
    for count in (0, 1, 1, 1):
        assert_right(runner.run(inputs), inputs)
        assert len(runner._graphs) == count
    main, captured = engine.contexts
    assert (main.runs, captured.runs) == (1, 4)  # one to warm up, three replays


def test_equal_token_totals_are_not_one_shape() -> None:
    runner, engine = make(graphs=4)
    for _ in range(3):
        for step, shape in enumerate([(2, 6), (3, 4), (1, 12), (4, 3)]):
            inputs = given(*shape, step)
            assert_right(runner.run(inputs), inputs)
    assert len(runner._graphs) == 4
    assert len(engine.contexts) == 5  # one for each graph, which nothing else changes


def test_only_so_many_graphs_are_kept_the_last_used() -> None:
    runner, engine = make(graphs=2)

    def run(merged: int) -> None:
        inputs = given(1, merged, merged)
        assert_right(runner.run(inputs), inputs)

    for merged in (1, 1, 2, 2, 1, 3, 3):  # 3 drives 2 out
        run(merged)
    assert len(runner._graphs) == 2
    assert runner._stream.events.count("synchronise") == 1  # type: ignore[attr-defined]
    contexts = len(engine.contexts)
    run(1)
    run(3)
    assert len(engine.contexts) == contexts
    run(2)
    run(2)
    assert len(engine.contexts) == contexts + 1


def test_a_graph_keeps_its_activation_memory_when_larger_shapes_come() -> None:
    runner, engine = make(graphs=2)
    for _ in range(2):
        runner.run(given(1, 2))
    captured = engine.contexts[1]
    before = captured.memory
    runner.run(given(3, 20))
    assert runner._memory.data_ptr() != before[0]
    inputs = given(1, 2, 9)
    assert_right(runner.run(inputs), inputs)
    assert captured.memory == before


def test_a_capture_that_fails_is_logged_and_runs_go_on_without(caplog: pytest.LogCaptureFixture) -> None:
    runner, _ = make(graphs=2)

    def fails(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner._stream.captured = fails  # type: ignore[method-assign]
    inputs = given(1, 2)
    for _ in range(3):
        assert_right(runner.run(inputs), inputs)
    assert caplog.text.count("CUDA graphs are off from here on") == 1
    assert "not permitted when stream is capturing" in caplog.text


def test_rtx_makes_a_graphs_kernels_for_its_shape_at_once() -> None:
    runner, engine = make(TensorRTRTXRunner, graphs=1)
    for _ in range(2):
        runner.run(given(1, 2))
    strategies = [context.config.dynamic_shapes_kernel_specialization_strategy for context in engine.contexts]
    assert strategies == [None, Strategies.EAGER]


# What an engine says of itself, against the manifest


def test_a_wrong_dtype_is_found_at_opening() -> None:
    with pytest.raises(BundleError, match=r"has features as HALF, expected torch\.float32"):
        opened_as(replace(ENTRY, precision="fp32"))


def test_a_missing_output_is_found_at_opening() -> None:
    manifest = replace(MANIFEST, outputs=MANIFEST.outputs[:1])
    with pytest.raises(BundleError, match=r"inputs and outputs \['deepstack_0', .* expected \['features', 'pixels'"):
        opened_as(ENTRY, manifest)


def test_another_number_of_profiles_is_found_at_opening() -> None:
    with pytest.raises(BundleError, match="has 3 optimisation profiles, expected 2"):
        opened_as(replace(ENTRY, profiles=(SMALL, WIDE)))


def opened_as(entry: Engine, manifest: Manifest = MANIFEST) -> TensorRTRunner:
    """The engine of `ENTRY` and `MANIFEST`, opened as if it were another."""
    library = FakeTensorRT(FakeEngine(MANIFEST, ENTRY, compute))
    return TensorRTRunner(manifest, entry, LoadedEngine(library, b"", entry.file), FakeStream())  # type: ignore[arg-type]
