"""Layers that the towers share, written for export: plain, static control flow, float32 statistics.

In half precision a layer computes in the dtype of its own weights: `Linear` casts what it is given, a norm returns the
dtype it was given, and sums take the wider dtype. So a layer whose weights are kept in float32 needs nothing around it,
and what it adds to the residual stream stays in float32 from there on.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gelu = Literal["tanh", "none"]
Rope = tuple[Tensor, Tensor]  # cos and sin, float32, broadcast over [batch, tokens, heads, head size]


class PixelNorm(nn.Module):
    """uint8 pixels to the floats that the reference's processor gives: its fused rescale and normalise.

    The fused form is ``(x - mean * (1 / scale)) / (std * (1 / scale))`` in float32, bit for bit as in
    `transformers.image_processing_backends.TorchvisionBackend.rescale_and_normalize`.
    """

    def __init__(self, mean: float, std: float, scale: float):
        super().__init__()
        with torch.device("cpu"):  # towers are made on the meta device, and these are numbers
            self.shift = float(torch.tensor(mean) * (1.0 / scale))
            self.divisor = float(torch.tensor(std) * (1.0 / scale))

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self.shift) / self.divisor


class PixelScaleThenNorm(nn.Module):
    """uint8 pixels to the floats of torchvision's ToTensor and Normalize: to 0 to 1 first, bit for bit."""

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / 255 - self.mean) / self.std


class PixelTable(nn.Module):
    """uint8 pixels to floats by a table of 256 values, for rules that arithmetic in float32 would not reproduce."""

    def __init__(self, values: list[float]):
        super().__init__()
        self.values = values

    def forward(self, pixels: Tensor) -> Tensor:
        table = torch.tensor(self.values, device=pixels.device)[:, None]
        # The cast comes first, as TensorRT takes uint8 for nothing else.
        return F.embedding(pixels.int(), table).squeeze(-1)


class LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in float32 whatever the dtype, and returns the dtype it was given."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm in float32; `weight` is the whole factor (families that store ``w`` for ``1 + w`` add it on loading)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its weights, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class ScaledDotProduct(nn.Module):
    """Attention over [batch, heads, tokens, head size]. A module of its own, so that hooks see queries and keys."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Attention(nn.Module):
    """Bidirectional self-attention over all tokens of a row, with one fused projection for q, k and v."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.head_size = hidden // heads
        self.qkv = Linear(hidden, 3 * hidden)
        self.scores = ScaledDotProduct()
        self.out = Linear(hidden, hidden)

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, self.head_size)) for part in self.qkv(x).chunk(3, dim=-1))
        if rope is not None:
            query, key = rotated(query, rope), rotated(key, rope)
        # [batch, tokens, heads, head_size] -> [batch, heads, tokens, head_size]
        mixed = self.scores(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, hidden: int, inner: int, gelu: Gelu):
        super().__init__()
        self.up = Linear(hidden, inner)
        self.down = Linear(inner, hidden)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.gelu))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, hidden: int, heads: int, inner: int, eps: float, gelu: Gelu):
        super().__init__()
        self.norm1 = LayerNorm(hidden, eps=eps)
        self.attention = Attention(hidden, heads)
        self.norm2 = LayerNorm(hidden, eps=eps)
        self.mlp = Mlp(hidden, inner, gelu)

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


def rotated(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding, computed in float32: the pairs are (i, i + half) of the head size."""
    cos, sin = rope
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def patches_from_pixels(pixels: Tensor, patch: int) -> Tensor:
    """[batch, 3, height, width] to [batch, patches, 3 * patch * patch], patches row-major, values (channel, y, x).

    Takes normalised pixels: TensorRT moves no uint8 about, it only casts it.
    """
    x = pixels.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [batch, 3, rows, patch, columns, patch]
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
