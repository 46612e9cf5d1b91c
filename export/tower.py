"""The base class of the towers: a spec from the config, strict loading, and what an export needs to know."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from turbovit.engines.bundle import Profile, Source, TensorSpec
from turbovit.engines.errors import CheckpointError
from turbovit.engines.shapes import bind
from turbovit.export.checkpoint import Checkpoint, image_processor_config, video_processor_config
from turbovit.export.weights import INDEX, SINGLE, vision_files

T = TypeVar("T", bound="Tower")
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Sample:
    """Engine inputs of one certified shape.

    Attributes:
        label: how the shape is called in the certificate.
    """

    label: str
    inputs: dict[str, Tensor]

    def within(self, specs: Iterable[TensorSpec], limits: Mapping[str, int]) -> bool:
        """Whether every symbol of the inputs' shapes keeps to its limit."""
        symbols: dict[str, int] = {}
        for spec in specs:
            bind(spec.shape, self.inputs[spec.name].shape, symbols)
        return all(symbols[symbol] <= limit for symbol, limit in limits.items())


@dataclasses.dataclass(frozen=True)
class LimitOption:
    """How a limit that users give becomes one of a symbol: value // divisor.

    Attributes:
        symbol: of the engine's inputs.
    """

    symbol: str
    divisor: int


class Tower(nn.Module, ABC):
    """A vision encoder with its projector, from uint8 pixels to features.

    A subclass has a frozen spec (`spec`), takes it as its only constructor argument, and maps checkpoint tensors
    to its own parameters by a pure function.

    Attributes:
        limit_options: what a user may limit, by name.
        spellings: how the names of vision tensors may begin in a checkpoint, and how they begin for us.
        unused: names of tensors, as they are for us, that a checkpoint may have besides; nothing reads them.
        dtype: of the outputs; see `turbovit.export.precision.in_precision`.
    """

    limit_options: ClassVar[Mapping[str, LimitOption]]
    spellings: ClassVar[Mapping[str, str]]
    unused: ClassVar[frozenset[str]] = frozenset()

    spec: Any
    dtype: torch.dtype = torch.float32

    @classmethod
    def image_processor(cls, folder: Path) -> dict[str, Any]:
        """The image processor's settings in a checkpoint's folder.

        Raises:
            CheckpointError: there are none.
        """
        return image_processor_config(folder)

    @classmethod
    def video_processor(cls, folder: Path) -> dict[str, Any] | None:
        """The video processor's settings in a checkpoint's folder; None where there are none.

        Raises:
            CheckpointError: the family takes videos, and they are missing or cannot be used.
        """
        return video_processor_config(folder)

    @classmethod
    @abstractmethod
    def spec_from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Any:
        """Every size that the tower needs, as a frozen dataclass.

        Args:
            config: the checkpoint's config.json.
            preprocessor: its image processor's settings.

        Raises:
            CheckpointError: an entry is missing or makes no sense.
            UnsupportedModelError: an entry asks for what the tower cannot do.
        """

    @classmethod
    @abstractmethod
    def is_vision(cls, name: str) -> bool:
        """Whether a tensor, by its canonical name, belongs to the vision side."""

    @classmethod
    def is_checkpoint_vision(cls, name: str) -> bool:
        """As `is_vision`, for a name as it stands in a checkpoint."""
        return cls.is_vision(cls.canonical_name(name))

    @classmethod
    @abstractmethod
    def tensor_shapes(cls, spec: Any) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the vision tensors that a checkpoint of this spec has, exactly."""

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """A checkpoint's tensor name, spelt in one way: as in the released checkpoints."""
        prefix = max(filter(name.startswith, cls.spellings), key=len, default="")
        return cls.spellings[prefix] + name.removeprefix(prefix) if prefix else name

    @classmethod
    @abstractmethod
    def state_from_tensors(cls, spec: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tower's own parameters from the checkpoint's: renaming, and the value transforms it documents."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """In the order of `forward`'s arguments."""
        return tuple(spec.name for spec in self.inputs())

    @property
    def output_names(self) -> tuple[str, ...]:
        """In the order of `forward`'s results."""
        return tuple(spec.name for spec in self.outputs("float32"))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tower's outputs by name, for its inputs by name; no gradients."""
        with torch.no_grad():  # outputs of inference_mode could not be changed in place by who gets them
            results = self(*(inputs[name] for name in self.input_names))
        return dict(zip(self.output_names, results if isinstance(results, tuple) else (results,), strict=True))

    def release(self) -> None:
        """Free the weights, also where an exported graph still holds the parameters. The tower is of no use then."""
        for parameter in self.parameters():
            parameter.data = torch.empty(0)

    @abstractmethod
    def facts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What the family's preprocessor and glue need to know, for the manifest."""

    def extra_tensors(self) -> dict[str, Tensor]:
        """Small tensors that the preprocessor puts between the engine's features, for the bundle."""
        return {}

    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The engine's inputs, batch first, in the order of `forward`'s arguments."""

    @abstractmethod
    def outputs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """The engine's outputs, all batch first, in the order of `forward`'s results."""

    @abstractmethod
    def default_limits(self) -> dict[str, int]:
        """The largest value of every symbol that `build` sets unless told otherwise."""

    def default_profiles(self, limits: Mapping[str, int]) -> tuple[Profile, ...]:
        """What compiled engines are optimised for unless a user says otherwise: together, everything within `limits`.

        One row alone, and any number of them; families that know their images better say so.
        """
        (batch, limit), *others = limits.items()
        rest = {symbol: (1, max(1, most // 2), most) for symbol, most in others}
        rows = dict.fromkeys([(1, 1, 1), (1, max(1, limit // 2), limit)])
        return tuple(Profile({batch: sizes, **rest}) for sizes in rows)

    def tokens(self, sizes: Mapping[str, int]) -> int:
        """How many patches (and class tokens) of a row attend to each other, by the values of the symbols."""
        grid: int = self.spec.grid
        return grid**2

    @abstractmethod
    def samples(self, seed: int) -> list[Sample]:
        """Inputs for export and certification: several shapes, none special, each inside the default limits."""


def source_from_checkpoint(tower: type[Tower], spec: Any, checkpoint: Checkpoint) -> Source:
    """What makes a bundle of this checkpoint another than that of the next: weights, sizes, image processor.

    Raises:
        CheckpointError: vision tensors are missing, unknown or of another shape than the config says; or there are two
            sets of weights, and they differ.
    """
    digest = checkpoint.tensors_sha256(checked_names(tower, spec, checkpoint), tower.canonical_name)
    second = checkpoint.second_set(tower.is_checkpoint_vision)
    if second is not None and second.tensors_sha256(_used_names(tower, second), tower.canonical_name) != digest:
        shards = vision_files(second.weight_map, tower.is_checkpoint_vision)
        raise CheckpointError(
            f"{checkpoint.folder} holds two sets of weights with different vision tensors: {SINGLE}, which "
            f"transformers and LMDeploy's PyTorch engine read, and {INDEX} with {', '.join(shards)}, which TurboMind "
            f"reads: delete {SINGLE}, or the index and its shards, whichever is not the model"
        )
    return Source(
        name=checkpoint.name,
        tensors_sha256=digest,
        config=config_for_source(tower, spec, checkpoint.folder),
    )


def config_for_source(tower: type[Tower], spec: Any, folder: Path) -> dict[str, Any]:
    """Sizes, and the settings of the image and video processor in a folder, as a manifest keeps them."""
    processors = {"image_processor": tower.image_processor(folder), "video_processor": tower.video_processor(folder)}
    config = dataclasses.asdict(spec) | {name: settings for name, settings in processors.items() if settings}
    read: dict[str, Any] = json.loads(json.dumps(config))
    return read


def require_same_config(tower: type[Tower], checkpoint: Checkpoint, folder: Path, source: Source) -> None:
    """Make sure that a copy of a checkpoint's processor files is of what `source` was made from.

    Raises:
        CheckpointError: they changed in between.
    """
    spec = tower.spec_from_config(checkpoint.config, tower.image_processor(folder))
    if config_for_source(tower, spec, folder) != source.config:
        raise CheckpointError(
            f"the checkpoint changed while it was read: the processor files in {checkpoint.folder} are not those of a "
            f"moment ago; leave it alone, and run this again"
        )


def described_tower(tower: type[T], checkpoint: Checkpoint) -> T:
    """The checkpoint's tower without weights, on the meta device: it knows its inputs, outputs and facts."""
    with torch.device("meta"):
        return tower(tower.spec_from_config(checkpoint.config, tower.image_processor(checkpoint.folder)))


def load_tower(tower: type[T], spec: Any, checkpoint: Checkpoint) -> T:
    """A tower with the checkpoint's weights in float32, in eval mode.

    Raises:
        CheckpointError: vision tensors are missing, unknown or of another shape than the config says, hold NaN or
            infinity, or are no longer those that `source_from_checkpoint` hashed.
    """
    names = checked_names(tower, spec, checkpoint)
    tensors = {name: tensor.float() for name, tensor in checkpoint.hashed_tensors(names, tower.canonical_name)}
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"the checkpoint holds NaN or infinity in {', '.join(broken[:_SHOWN])} ({len(broken)} of the "
            f"{len(tensors)} vision tensors of {checkpoint.name}): no engine can be built of it; get the weights again"
        )
    with torch.device("meta"):
        model = tower(spec)
    model.load_state_dict(tower.state_from_tensors(spec, tensors), assign=True)
    return model.eval().requires_grad_(False)


def checked_names(tower: type[Tower], spec: Any, checkpoint: Checkpoint) -> list[str]:
    """The names of the checkpoint's vision tensors, once they are known to be what the config says.

    Only headers are read. Tensors that are known as unused are not among them.

    Raises:
        CheckpointError: vision tensors are missing, unknown or of another shape than the config says.
    """
    names = _used_names(tower, checkpoint)
    found = checkpoint.shapes(names)
    actual = {tower.canonical_name(name): shape for name, shape in found.items()}
    expected = tower.tensor_shapes(spec)
    counts = Counter(map(tower.canonical_name, names))
    problems = [
        _problem("there twice", [name for name, count in counts.items() if count > 1]),
        _problem("missing", [name for name in expected if name not in actual]),
        _problem("unknown", [name for name in actual if name not in expected]),
        _problem(
            "of another shape",
            [
                f"{n} {list(s)}, expected {list(expected[n])}"
                for n, s in actual.items()
                if n in expected and s != expected[n]
            ],
        ),
    ]
    if any(problems):
        raise CheckpointError(
            f"the vision tensors of {checkpoint.name} do not fit its config.json: {'; '.join(filter(None, problems))}"
        )
    return names


def _used_names(tower: type[Tower], checkpoint: Checkpoint) -> list[str]:
    names = checkpoint.vision_names(tower.is_checkpoint_vision)
    return [name for name in names if tower.canonical_name(name) not in tower.unused]


def _problem(kind: str, entries: list[str]) -> str | None:
    if not entries:
        return None
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return f"{len(entries)} {kind} ({', '.join(entries[:_SHOWN])}{more})"
