"""The plans of transformers' classes that are known: `planning/proven_plans.json`, and their page of the documentation.

    python -m benchmarks.classes                       # an hour; writes both
    python -m benchmarks.classes --classes 'Llama*'    # writes the entries of these classes, and prints the page

A class is among them if what two blocks of each kind show equals what all of eight blocks show:
styles, rows, cut parameters, sizes and shares of experts, on 2 tp ranks, and on 4 with sequence parallelism if it can.
Models are made from the default values of the class's own config, without weights.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from benchmarks.tables import RESULTS, run_table
from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.planning import plan as planner
from lora_parallel.planning.plan import Plan, resolve_plan
from lora_parallel.planning.proven_plans import FILE
from lora_parallel.tracing.prove_feature_slices import find_structure

PAGE = RESULTS / "known_plans.md"
MARK = "<!-- written by make table NAME=classes -->"
TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT")
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 8),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"), 512),
    "vocab_size": 1000,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
}


def smaller(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings with which a config describes fewer blocks, experts and words, by name."""
    values = vars(config)
    inner = {key: smaller(value) for key, value in values.items() if isinstance(value, PretrainedConfig)}
    return {key: size for key, size in SIZES.items() if isinstance(values.get(key), int)} | inner


def model_of(name: str) -> nn.Module:
    """Return a model of a class of transformers, on meta."""
    kind: Any = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class(**smaller(kind.config_class())))


def found(model: nn.Module, known: Mapping[str, str] | None) -> list[Plan]:
    """Return the plan on 2 tp ranks, and on 4 with sequence parallelism, unless that is refused."""
    plans = []
    with patch.object(planner, "proven_plan", lambda inner: known):
        for tp, sequence_parallel in ((2, False), (4, True)):
            with suppress(ValueError):
                plan = resolve_plan(model, None, tp, sequence_parallel)
                # In another order of modules the same tokens are gathered.
                sequences: Any = [replace(each, modules=set(each.modules)) for each in plan.sequences]  # type: ignore[arg-type]
                plans.append(replace(plan, sequences=sequences))
    return plans


def differing(one: list[Plan], other: list[Plan]) -> list[str]:
    """Return the names of the parts in which plans differ."""
    if len(one) != len(other):
        return ["sequences"]
    pairs = list(zip(one, other, strict=True))
    return [part.name for part in fields(Plan) for a, b in pairs if getattr(a, part.name) != getattr(b, part.name)]


def classes() -> dict[str, None]:
    """Return the names of the classes for the tasks, in alphabetical order."""
    names = {name for task in TASKS for name in vars(modeling_auto)[f"MODEL_FOR_{task}_MAPPING_NAMES"].values()}
    return dict.fromkeys(sorted(name for name in names if isinstance(name, str) and hasattr(transformers, name)))


def known_plan(name: str) -> dict[str, str] | str:
    """Return the plan of a class as few blocks show it, or why it is not known."""
    try:
        model: Any = model_of(name)
        names = clean_names(model)
        known = find_structure(model, names, 2).plan("")
        if not find_structure(model, names, 2, known=known).tracer.blocks.left_out:
            return "few blocks do not show its plan"
        if parts := differing(found(model, None), found(model, known)):
            return f"few blocks show other {', '.join(parts)}"
    except Exception as error:  # a class may raise anything on such a config
        return f"{type(error).__name__}: {error}"
    return known or "none of its layers is cut"


def table(chosen: list[str]) -> tuple[str, bool]:
    """Put the plans of classes into the file, and return all that it has as text, classes with equal plans together."""
    logging.disable(logging.WARNING)
    plans = {name: known_plan(name) for name in tqdm(chosen)}
    known = {name: plan for name, plan in plans.items() if isinstance(plan, dict)}
    for name, plan in plans.items():
        if isinstance(plan, str):
            print(f"{name}: {plan.splitlines()[0][:160]}")
    versions = json.loads(FILE.read_text())
    earlier = versions.get(transformers.__version__, {})
    known = {name: plan for name, plan in earlier.items() if name not in plans} | known
    FILE.write_text(json_lines(versions | {transformers.__version__: known}))
    alike: dict[str, list[str]] = {}
    for name, plan in sorted(known.items()):
        alike.setdefault(json.dumps(plan), []).append(f"`{name}`")
    rows = [f"{', '.join(names)} | {styles(json.loads(text))}" for text, names in alike.items()]
    return "classes | layers\n--- | ---\n" + "\n".join(rows), True


def styles(plan: Mapping[str, str]) -> str:
    """Return a plan as text: the layers of each style."""
    by_style: dict[str, list[str]] = {}
    for glob, style in plan.items():
        by_style.setdefault(style, []).append(f"`{glob}`")
    return "; ".join(f"{style}: {', '.join(globs)}" for style, globs in by_style.items())


def json_lines(versions: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """Return the plans as JSON with one line a class."""
    text = ",\n".join(
        f' "{version}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(plan)}' for name, plan in sorted(plans.items()))
        + "\n }"
        for version, plans in sorted(versions.items())
    )
    return f"{{\n{text}\n}}\n"


if __name__ == "__main__":
    raise SystemExit(run_table(__doc__, classes(), table, PAGE, MARK, option="classes"))
