"""Errors of others are told in whole words."""

from __future__ import annotations

from lora_parallel.tracing.inputs import brief


def test_the_first_line_in_whole_words():
    assert brief(ValueError("it is short\nand has another line")) == "ValueError: it is short"
    assert brief(KeyError()) == "KeyError: "
    words = ["embedding", "would", "compute", "with", "a", "weight"] * 20
    told = brief(RuntimeError(" ".join(words))).removeprefix("RuntimeError: ").split()
    assert told.pop() == "..."
    assert told == words[: len(told)]
    assert len(" ".join(told)) > 200
