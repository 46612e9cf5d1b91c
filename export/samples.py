"""Synthetic checkpoints: real geometry, random weights, a tokenizer of our own. What the families share."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from turbovit.engines.errors import BuildError, UnsupportedModelError
from turbovit.engines.families import family_from_name, load
from turbovit.export.atomic import folder_in_one_step
from turbovit.export.checkpoint import INDEX, SINGLE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Size = Literal["tiny", "small", "full"]
Shape = tuple[int, ...]
Merge = tuple[str, str]

SPACE = "▁"
LONGEST_RUN = 31
SHARD_BYTES = 1 << 28

# The most common first: of two merges that overlap the earlier wins.
_WORD_LIST = """
the of and to in is that it he was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if a about after also
animal answer any back because been before behind big black blue bus car cat child city color come could day
describe did different dog door down eat end even every example find first five flower food four front get
give go good green group hand has her here him house image into its just know large left letter light like
line little long look made make man many may middle model more most mountain much my name new no now number
object old only open other our out over paper people person photo picture place please read red right river
road round same say scene see sentence short show side sign six sky small so some square stand street table
take tell text than them then these thing think three time tree two under up user very wall water way well
where white who will window work would write year yellow yes you
"""
_WORDS = _WORD_LIST.split()


def write_sample(
    family: str,
    folder: Path,
    size: str = "tiny",
    seed: int = 0,
    layers: int | None = None,
    language: str | None = None,
) -> None:
    """Write a synthetic Hugging Face checkpoint. `folder` appears whole or not at all.

    Args:
        family: a name of the table of families.
        folder: must not exist yet, or be empty.
        size: ``tiny`` and ``small`` have a narrow tower, ``full`` the family's real one, in several shards.
        seed: other seeds give other weights; the same seed gives the same bytes.
        layers: of the vision tower, where not as many as the size has: a full-width tower that is quick to measure.
        language: another language half, of the families that have several.

    Raises:
        UnsupportedModelError: unknown family, size or language half, or no layers.
        BuildError: something stands at `folder` already, or it cannot be written (disk full, no permission).
    """
    from safetensors import SafetensorError

    if size not in get_args(Size):
        raise UnsupportedModelError(f"unknown sample size {size!r}; available: {', '.join(get_args(Size))}")
    if layers is not None and layers < 1:
        raise UnsupportedModelError(f"a vision tower of {layers} layers, expected at least 1")
    write = load(family_from_name(family).sample)
    options = {"layers": layers, "language": language}
    if language is not None and "language" not in inspect.signature(write).parameters:
        raise UnsupportedModelError(f"{family} has one language half, got {language!r}: leave it out")
    try:
        with folder_in_one_step(folder.resolve()) as temporary:
            write(temporary, size, seed, **{name: value for name, value in options.items() if value is not None})
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise BuildError(f"the sample could not be written to {folder}: {error}") from error


def write_json(path: Path, data: Any) -> None:
    """Write `data` as a Hugging Face checkpoint's JSON files are written."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def random_tensor(name: str, shape: Shape, seed: int, mean: float = 0.0, std: float | None = None) -> Tensor:
    """A float32 tensor that depends on nothing but the arguments.

    Without `std`, matrices keep the variance of their input (``fan_in ** -0.5``, the input being all axes but
    the first) and vectors get 0.1. Uniform rather than normal: normal ones depend on the CPU's vector width.
    """
    if std is None:
        std = prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.rand(shape, generator=generator).sub_(0.5).mul_(12**0.5 * std).add_(mean)


def save_tensors(
    folder: Path,
    shapes: Mapping[str, Shape],
    make: Callable[[str, Shape], Tensor],
    *,
    sharded: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Make and save tensors: one file, or shards with an index; one shard at a time is in memory."""
    from safetensors.torch import save_file

    files = {SINGLE: list(shapes)}
    if sharded:
        shards = list(_shards(shapes))
        files = {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}
    for file, names in files.items():
        # A metadata entry without which transformers refuses the file.
        save_file({name: make(name, shapes[name]).to(dtype) for name in names}, folder / file, {"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes 0600
    if sharded:
        size = sum(map(prod, shapes.values())) * dtype.itemsize
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)


def _shards(shapes: Mapping[str, Shape]) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * torch.float32.itemsize
        if names and filled + size > SHARD_BYTES:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def byte_fallback_bpe(first: Iterable[str], last: Iterable[str], unknown: str) -> Tokenizer:
    """A BPE tokenizer made as SentencePiece-born ones are, over printable ASCII and a few English words.

    Spaces become ``▁``; runs of spaces are one token each, up to 31; characters outside the vocabulary become
    byte tokens. There is neither a post-processor nor an added token yet.

    Args:
        first: vocabulary entries that get the ids from 0 on; may hold entries that the words need too.
        last: those after all others.
        unknown: the unknown token, one of `first`.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    # Longest first: (a run, one more) must win over starting another run of two.
    merges = [(SPACE * length, SPACE) for length in range(LONGEST_RUN - 1, 0, -1)] + word_merges(SPACE)
    entries = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    entries += [chr(code) for code in range(ord("!"), ord("~") + 1)]
    entries += [left + right for left, right in merges]
    model = models.BPE(
        vocab={entry: index for index, entry in enumerate(dict.fromkeys([*entries, *last]))},
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level_bpe(*pieces: str, first: Iterable[str] = (), joined: Iterable[Merge] = ()) -> Tokenizer:
    """A BPE tokenizer over bytes, with merges for a few English words and for runs of spaces and of newlines.

    A mark and the newlines after it are one token too, so that a text tokenised in parts may get other ids. There
    is neither a normalizer nor a post-processor nor an added token yet.

    Args:
        pieces: regular expressions; one after the other, their matches become pieces that no merge reaches across.
        first: vocabulary entries that get the ids from 0 on.
        joined: merges besides, the last of all, of entries that are there.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    space, newline = "Ġ", "Ċ"  # what the alphabet of bytes has for them
    # Longest first, as above.
    merges = [(mark * length, mark) for mark in (space, newline) for length in range(LONGEST_RUN - 1, 0, -1)]
    merges += [(mark, newline * length) for mark in ".:?!>" for length in (1, 2)] + word_merges(space)
    merges += joined
    entries = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary = {entry: index for index, entry in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    splits = [pre_tokenizers.Split(Regex(piece), "isolated") for piece in pieces]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], special: Collection[str]) -> None:
    """Add tokens that are never normalised; those of `special` are skipped on decoding."""
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(token, normalized=False, special=token in special) for token in tokens])


def added_tokens_decoder(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The added tokens as tokenizer_config.json lists them."""
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return {str(index): {flag: getattr(token, flag) for flag in flags} for index, token in added}


def word_merges(space: str) -> list[Merge]:
    """Merges that build English words letter by letter, then put `space` before each, the longest first."""
    letters = dict.fromkeys((word[:end], word[end]) for word in _WORDS for end in range(1, len(word)))
    return [*letters, *((space, word) for word in sorted(_WORDS, key=len, reverse=True))]
