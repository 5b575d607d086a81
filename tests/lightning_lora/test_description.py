"""What Trainer and Fabric log once a model is sharded: who holds what, on the first rank alone."""

from __future__ import annotations

import logging

from lightning_utilities.core import rank_zero

from lora_parallel.integration import describe
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Tokens, fabric, loader, tidy, trainer, tuner
from tests.logs import listening

Tuner = tuner()


def logged() -> tuple[list[str], str]:
    """What Fabric and then Trainer log about the same model, and the description of one of the two."""
    with tidy():
        runs = fabric("1x2", precision="64-true"), trainer("1x2", precision="64-true", max_steps=1)
        rank_zero.log.setLevel(logging.INFO)
        with listening(rank_zero.log.name) as told:
            runs[0].setup(m.adapted())
            module = Tuner(m.adapted)
            runs[1].fit(module, loader(Tokens(ROWS), "1x2"))
    return [each for each in told if "bytes of rank" in each], describe(module.model)


def test_trainer_and_fabric_say_who_holds_what(pool):
    (told, description), (silent, _) = pool.run(2, logged)
    assert told == [f"INFO {description}"] * 2
    assert silent == []
