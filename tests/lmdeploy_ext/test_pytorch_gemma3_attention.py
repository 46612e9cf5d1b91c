"""Gemma 3's masks and attention are transformers', for batches and chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from turbovit.lmdeploy_ext.pytorch_engine.gemma3 import _windowed, image_masks, masked_attention

T, X = False, True  # a text token, an image token
SEQUENCES = {
    "one image": [T, X, X, X, T],
    "image first and last": [X, X, T, T, X, X, X],
    "two images": [T, X, X, T, X, X, X, T, T],
    "images alone": [X, X, X],
    "one token of an image": [T, X, T],
}


def sees(is_image: list[bool], window: int | None = None) -> torch.Tensor:
    """transformers' rule (masking_utils.blockwise_overlay): causal, or of one block; and within the window."""
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    block = get_block_sequence_ids_for_mask(torch.tensor([is_image]).long())[0].tolist()
    count = range(len(block))
    return torch.tensor(
        [
            [
                (key <= query or (block[query] == block[key] >= 0)) and (window is None or query - key < window)
                for key in count
            ]
            for query in count
        ]
    )


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("window", [1, 2, 4, 100])
def test_masks_are_transformers(name: str, window: int) -> None:
    is_image = SEQUENCES[name]
    (mask,) = image_masks(torch.tensor(is_image), torch.arange(len(is_image)))
    assert mask is not None
    assert torch.equal(mask, sees(is_image))
    assert torch.equal(_windowed(mask, window), sees(is_image, window))


def test_a_batch_has_masks_for_the_sequences_with_images_alone() -> None:
    parts = [[T, T], SEQUENCES["two images"], [T], SEQUENCES["one image"]]
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    masks = image_masks(torch.tensor([token for part in parts for token in part]), positions)
    assert [mask is None for mask in masks] == [True, False, True, False]
    for mask, part in zip(masks, parts, strict=True):
        assert mask is None or torch.equal(mask, sees(part))


def test_what_continues_an_earlier_chunk_is_left_to_lmdeploy() -> None:
    assert image_masks(torch.tensor([T, X, X]), torch.arange(7, 10)) == [None]


def test_attention_is_computed_for_sequences_with_a_mask_alone() -> None:
    heads, kv_heads, size, lengths = 4, 2, 8, [3, 9, 5]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), count, size, generator=generator) for count in (heads, kv_heads, kv_heads))
    layer = SimpleNamespace(head_dim=size, scaling=0.3)
    mask = sees(SEQUENCES["two images"])
    before = torch.randn(1, sum(lengths), heads * size, generator=generator)
    out = masked_attention(layer, q, k, v, before.clone(), [None, mask, None], torch.tensor(lengths))
    own = slice(3, 12)
    query, key, value = (tensor[own].transpose(0, 1) for tensor in (q, k, v))
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    expected = scaled_dot_product_attention(query, key, value, mask, scale=0.3).transpose(0, 1).flatten(1)
    assert torch.allclose(out[0, own], expected, atol=1e-6)
    assert torch.equal(out[0, :3], before[0, :3])
    assert torch.equal(out[0, 12:], before[0, 12:])
