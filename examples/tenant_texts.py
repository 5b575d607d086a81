"""Four fine-tunes' worth of text, as different as four customers': the same questions and answers in four styles."""

from __future__ import annotations

import re

import torch
from tiny_base import train_and_validation_rows
from torch import Tensor, nn
from torch.utils.data import Dataset

STYLES = {
    "plain": str,
    "loud": str.upper,
    "quiet": str.lower,
    "brief": lambda text: re.sub("[aeiou]", "", text),
}


class MixedRows(Dataset):
    """Rows of all tenants, shuffled: each item is token ids and the number of the tenant that they are of."""

    def __init__(self, seed: int = 0) -> None:
        self.items = [
            (row, number)
            for number, style in enumerate(STYLES.values())
            for row in train_and_validation_rows(seed, style=style)[0]
        ]
        order = torch.randperm(len(self.items), generator=torch.Generator().manual_seed(seed)).tolist()
        self.items = [self.items[index] for index in order]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index]


def held_out(rows: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Rows that nobody trains on, of each tenant."""
    return {name: train_and_validation_rows(seed, style=style)[1][:rows] for name, style in STYLES.items()}


def losses(logits: Tensor, ids: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Each tenant's mean over its own rows: their sum is what is minimised."""
    found = {}
    for name in dict.fromkeys(names):
        mine = torch.tensor([each == name for each in names], device=ids.device)
        predicted, wanted = logits[mine][:, :-1], ids[mine][:, 1:]
        found[name] = nn.functional.cross_entropy(predicted.flatten(0, 1).float(), wanted.flatten())
    return found
