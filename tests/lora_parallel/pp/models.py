"""Models of one's own, some of which cannot be divided into stages."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.oracle import fill_adapters


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = self.norm(x) if extra is None else self.norm(x) + extra
        return x + self.down(torch.tanh(self.up(y)))


class Own(nn.Module):
    """Token ids [rows, tokens] to logits [rows, tokens, 11]."""

    _no_split_modules = ("Block",)

    def __init__(self, width: int = 12, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class WithSideOutput(Own):
    """The embedding goes to every block, beside the hidden states."""

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x, first)
        return self.head(self.norm(x))


class WithLayerBetween(Own):
    """A layer that no block holds is called between blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.norm(block(x))
        return self.head(x)


class WithOneBlockTwice(Own):
    """One block is called in two places."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.norm(x))


class WithUncalledLayer(Own):
    """A layer is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(12, 12)


class WithHeadByHand(Own):
    """The weight of the embedding is used without calling it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T + self.head(x)


class WithScalar(Own):
    """Something without rows is returned."""

    def forward(self, ids: Tensor) -> Any:
        logits = super().forward(ids)
        return {"logits": logits, "loss": logits.square().mean()}


def adapted(kind: type[Own], **lora: Any) -> nn.Module:
    torch.manual_seed(3)
    model = get_peft_model(kind().double(), LoraConfig(**{"r": 3, "target_modules": ["up", "down"], **lora}))
    model = model.double()
    fill_adapters(model)
    return model.train()
