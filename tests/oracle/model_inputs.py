"""Make a batch for a small model of any class of transformers: text, and the smallest image or sound that it takes.

What a model takes is read off its forward's parameters; what its processor would make of an image is in `_image` by the
parameters that stand beside `pixel_values`. The number of image or sound tokens in the text is the number of features
that the model's own `get_image_features` or `get_audio_features` returns. Every tensor has the rows of the batch along
dim 0, or equally many entries for each row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS, LAST_WORD = 4, 12, 99

Batch = dict[str, Tensor]


def make_batch(model: nn.Module, inputs: str, dtype: torch.dtype) -> Batch:
    """Return a batch for a model: text alone ("text"), or everything that the class takes and we can make ("full")."""
    given = Inputs(model)
    batch = given.text() if inputs == "text" else given.full()
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def own_or_mean_square(outputs: Any) -> Tensor:
    """Return the model's own loss, or the mean square of its outputs if it has none."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss.mean()
    # Similarities of each image of a batch with each text of it are no values of a row.
    kept = [value for key, value in outputs.items() if not key.startswith("logits_per")]
    values = [value for value in kept if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([value.square().mean() for value in values]).sum()


class Inputs:
    """What one model takes."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.config: Any = model.config
        self.known = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(5)

    # ------------------------------------------------------------------ text

    def ids(self, tokens: int = TOKENS, last: int = LAST_WORD) -> Tensor:
        return torch.randint(4, last + 1, (ROWS, tokens), generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def text(self) -> Batch:
        """Return token ids and labels, for an encoder-decoder those of the decoder."""
        batch: Batch = {}
        if "input_ids" in self.known:
            batch["input_ids"] = self.ids()
        return self.with_targets(batch)

    def with_targets(self, batch: Batch) -> Batch:
        """Add labels, or the decoder's inputs where a class takes no labels."""
        name = type(self.model).__name__
        if name.endswith("ForImageClassification") or name.endswith("ForSequenceClassification"):
            return {**batch, "labels": torch.arange(ROWS) % self.config.num_labels}
        if name.endswith("ForCTC"):
            return {**batch, "labels": self.ids(3, min(LAST_WORD, self.config.vocab_size - 1))}
        is_double = "decoder_input_ids" in self.known and self.config.is_encoder_decoder
        if "labels" in self.known:
            own = self.ids(7) if is_double or "input_ids" not in batch else batch["input_ids"].clone()
            if is_double and getattr(self.config, "decoder_start_token_id", None) is None:
                batch = {**batch, "decoder_input_ids": self.ids(7)}
            return {**batch, "labels": own}
        return {**batch, "decoder_input_ids": self.ids(7)} if is_double else batch

    # ------------------------------------------------------------------ all

    def full(self) -> Batch:
        """Return images or sound with the text that has a place for each of their features."""
        parts: list[tuple[str, Batch, Callable[..., Any] | None]] = []
        if "pixel_values" in self.known:
            parts.append(("image", self.image(), getattr(self.model, "get_image_features", None)))
        elif sound := self.sound():
            parts.append(("audio", sound, getattr(self.model, "get_audio_features", None)))
        if not parts:
            return self.text()
        (kind, batch, features), *_ = parts
        if "input_ids" not in self.known:
            return self.with_targets(batch)
        token = self.token(kind)
        inner = features or getattr(getattr(self.model, "model", None), f"get_{kind}_features", None)
        count = self.count(inner, batch) if token is not None and inner is not None else 0
        ids = self.ids(TOKENS + -count % 4)
        if count:
            place = torch.full((ROWS, count), token)
            ids = torch.cat([ids[:, :4], place, ids[:, 4:]], dim=1)
            is_place = (ids == token).long()
            if "mm_token_type_ids" in self.known:
                batch["mm_token_type_ids"] = is_place * (3 if kind == "audio" else 1)
            if "token_type_ids" in self.known:
                batch["token_type_ids"] = is_place
        return self.with_targets({"input_ids": ids, **batch})

    def token(self, kind: str) -> int | None:
        """Return the id that stands for a feature of an image or of sound in the text."""
        names = (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id", "media_placeholder_token_id")
        return next((value for name in names if isinstance(value := getattr(self.config, name, None), int)), None)

    @torch.no_grad()
    def count(self, features: Callable[..., Any], batch: Batch) -> int:
        """Return the number of features of a row: of what the model's own function returns."""
        parameter = next(p for p in self.model.parameters() if p.is_floating_point())
        takes = inspect.signature(features).parameters
        inputs = {
            key: value.to(parameter.dtype) if value.is_floating_point() else value
            for key, value in batch.items()
            if key in takes or any(one.kind == inspect.Parameter.VAR_KEYWORD for one in takes.values())
        }
        found = features(**inputs)
        if not isinstance(found, (Tensor, list, tuple)):
            pooled = found.get("pooler_output")
            found = found.last_hidden_state if pooled is None else pooled
        tensors = [found] if isinstance(found, Tensor) else list(found)
        return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors) // ROWS

    # ------------------------------------------------------------------ images

    def vision(self) -> Any:
        """Return the config of what reads images."""
        return next(
            (
                found
                for name in ("vision_config", "vision_tower_config", "sam_config", "vq_config", "encoder")
                if (found := getattr(self.config, name, None)) is not None
            ),
            self.config,
        )

    def image(self) -> Batch:
        """Return the tensors of one image a row."""
        vision = self.vision()
        size = _pair(getattr(vision, "image_size", None) or getattr(vision, "resolution", None) or 16)
        patch = _pair(getattr(vision, "patch_size", None) or 4)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        grid_key = next((key for key in ("image_grid_thw", "grid_thws", "image_grid_hws") if key in self.known), None)
        if grid_key:
            time = getattr(vision, "temporal_patch_size", None) or 1
            merge = _pair(getattr(vision, "spatial_merge_size", None) or 2)[0]
            side = 2 * merge
            values = self.normal(ROWS * side * side, channels * time * patch[0] * patch[1])
            made = {"pixel_values": values, grid_key: torch.tensor([[1, side, side]] * ROWS)}
            if "image_merge_sizes" in self.known:
                made["image_merge_sizes"] = torch.tensor([merge] * ROWS)
            return made
        if "spatial_shapes" in self.known:
            values = self.normal(ROWS, 16, channels * patch[0] * patch[1])
            shapes = torch.tensor([[4, 4]] * ROWS)
            return {
                "pixel_values": values,
                "spatial_shapes": shapes,
                "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long),
            }
        if "aspect_ratio_ids" in self.known:
            tiles = vision.max_num_tiles
            return {
                "pixel_values": self.normal(ROWS, 1, tiles, channels, *size),
                "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
                "aspect_ratio_mask": torch.tensor([1, *[0] * (tiles - 1)]).expand(ROWS, 1, tiles).contiguous(),
                "cross_attention_mask": torch.ones(ROWS, TOKENS, 1, tiles, dtype=torch.long),
            }
        if "pixel_attention_mask" in self.known:  # images of a row in a dim of their own
            return {"pixel_values": self.normal(ROWS, 1, channels, *size)}
        if hasattr(self.config, "image_grid_pinpoints"):  # a small image and one part of it
            return {
                "pixel_values": self.normal(ROWS, 2, channels, *size),
                "image_sizes": torch.tensor([list(size)] * ROWS),
            }
        made = {"pixel_values": self.normal(ROWS, channels, *size)}
        if "image_sizes" in self.known and "vision_feature_layer" not in self.known:
            made["image_sizes"] = torch.tensor([list(size)] * ROWS)
        return made

    # ------------------------------------------------------------------ sound

    def sound(self) -> Batch:
        """Return the tensors of one sound a row, or nothing."""
        inner = next(
            (
                found
                for name in ("audio_config", "encoder_config", "audio_encoder_config")
                if (found := getattr(self.config, name, None)) is not None
            ),
            self.config,
        )
        if "input_features" in self.known:
            names = ("num_mel_bins", "input_feat_size", "input_dim", "input_feat_per_channel", "feature_size")
            bands = next((value for name in names if isinstance(value := getattr(inner, name, None), int)), 16)
            frames = 2 * (getattr(inner, "max_source_positions", None) or 12)
            turned = type(inner).__name__.startswith(("Parakeet", "Granite", "Speech2Text", "CohereAsr", "FunAsr"))
            made = {"input_features": self.normal(ROWS, *((frames, bands) if turned else (bands, frames)))}
            for key in ("input_features_mask", "feature_attention_mask"):
                if key in self.known:
                    made[key] = torch.ones(ROWS, frames, dtype=torch.long)
            return made
        if "input_values" in self.known and "input_ids" not in self.known:
            return {"input_values": self.normal(ROWS, 1600)}
        return {}


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
