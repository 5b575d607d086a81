"""Make a batch for a small model of any class of transformers: text, and the smallest image or sound that it takes.

What a model takes is read off its forward's parameters. What its processor would make of an image is in `images` by
the parameters that stand beside `pixel_values`; the first form is taken that the model computes with. The number of
image or sound tokens in the text is the number of features that the model's own `get_image_features` or
`get_audio_features` returns. Every tensor has the rows of the batch along dim 0, or equally many entries for each row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS, LAST_WORD = 4, 12, 99

Batch = dict[str, Tensor]

BOOKS = {"csm": 0, "kyutai_speech_to_text": 1}
"""Types of models whose tokens are sound of several codebooks: what stands beside those."""


def make_batch(model: nn.Module, inputs: str, dtype: torch.dtype) -> Batch:
    """Return a batch for a model: text alone ("text"), or everything that the class takes and we can make ("full")."""
    given = Inputs(model)
    batch = given.text() if inputs == "text" else given.full()
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def own_or_mean(outputs: Any) -> Tensor:
    """Return the model's own loss, or a mean over its outputs if it has none: of a function that is no plain norm."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss.mean()
    # Similarities of each image of a batch with each text of it are no values of a row.
    kept = [value for key, value in outputs.items() if not key.startswith("logits_per")]
    values = [value for value in kept if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([value.sin().mean() for value in values]).sum()


class Inputs:
    """Describe what one model takes."""

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
        if self.config.model_type in (
            "musicgen_decoder",
            "musicgen_melody_decoder",
        ):  # a row's codebooks follow each other
            books = self.config.num_codebooks
            return {
                "input_ids": torch.cat([self.ids()] * books),
                "labels": self.ids(books * TOKENS).view(ROWS, TOKENS, books),
            }
        if self.config.model_type in BOOKS:  # a token of each codebook, or of all but the text's
            books = self.config.num_codebooks + BOOKS[self.config.model_type]
            ids = self.ids(TOKENS * books, 60).view(ROWS, TOKENS, books)
            return {"input_ids": ids, "labels": ids[..., 0] if BOOKS[self.config.model_type] else ids}
        if self.config.model_type == "dia":
            channels = self.config.decoder_config.num_channels
            return {"input_ids": self.ids(), "decoder_input_ids": self.ids(7 * channels).view(ROWS, 7, channels)}
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
        if "bbox" in self.known:
            batch["bbox"] = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(ROWS, TOKENS, -1).contiguous()
        is_double = "decoder_input_ids" in self.known and self.config.is_encoder_decoder
        if "labels" in self.known:
            own = self.ids(7) if is_double or "input_ids" not in batch else batch["input_ids"].clone()
            no_start = getattr(self.config, "decoder_start_token_id", None) is None
            if is_double and (no_start or self.config.model_type == "fsmt"):  # which shifts no labels
                batch = {**batch, "decoder_input_ids": self.ids(7)}
            return {**batch, "labels": own}
        return {**batch, "decoder_input_ids": self.ids(7)} if is_double else batch

    # ------------------------------------------------------------------ all

    def full(self) -> Batch:
        """Return images or sound with text around them, in the first form that the model computes with.

        Raises:
            Exception: Of the first form, if the model computes with none.
        """
        forms = [("image", form) for form in self.images()] or [("audio", form) for form in self.sounds()]
        problem: Exception | None = None
        for kind, form in forms:
            try:
                batch = self.around(kind, form)
                self.run(self.model, batch)
                return batch
            except Exception as error:  # whatever a class raises on what it does not take
                problem = problem or error
        if problem is not None:
            raise problem
        return self.text()

    def around(self, kind: str, form: Batch) -> Batch:
        """Return a batch of text that has a place for each feature of an image or of sound."""
        self.generator.manual_seed(6)
        if "input_ids" not in self.known:
            return self.with_targets(form)
        token = self.token(kind)
        if "qformer_input_ids" in self.known:
            form = {**form, "qformer_input_ids": self.ids(6)}
        kinds = (kind, "video") if kind == "image" else (kind,)  # a class may know images as frames of a video
        places = (self.model, getattr(self.model, "model", None))
        found = (getattr(place, f"get_{each}_features", None) for place in places for each in kinds)
        features = next(filter(None, found), None)
        count = self.count(features, form) if token is not None and features is not None else 0
        ids = self.ids(TOKENS + -count % 4)
        batch = dict(form)
        if count:
            ids = torch.cat([ids[:, :4], torch.full((ROWS, count), token), ids[:, 4:]], dim=1)
            is_place = (ids == token).long()
            if "mm_token_type_ids" in self.known:
                batch["mm_token_type_ids"] = is_place * (3 if kind == "audio" else 1)
            if "token_type_ids" in self.known:
                batch["token_type_ids"] = is_place
        if kind == "audio":
            batch["attention_mask"] = torch.ones_like(ids)
        if "image_embeds_position_mask" in self.known:
            batch["image_embeds_position_mask"] = (
                torch.arange(ids.shape[1]).expand(ROWS, -1) < self.config.latent_query_num
            )
        return self.with_targets({"input_ids": ids, **batch})

    def token(self, kind: str) -> int | None:
        """Return the id that stands for a feature of an image or of sound in the text."""
        names = [f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id", "media_placeholder_token_id"]
        names += ["video_token_id", "video_token_index"] if kind == "image" else []
        return next((value for name in names if isinstance(value := getattr(self.config, name, None), int)), None)

    @torch.no_grad()
    def run(self, function: Callable[..., Any], batch: Batch) -> Any:
        """Call the model, or a function of it, with the part of a batch that it takes."""
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        takes = inspect.signature(getattr(function, "forward", function)).parameters
        is_open = any(one.kind == inspect.Parameter.VAR_KEYWORD for one in takes.values())
        inputs = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in batch.items()
            if key in takes or (is_open and key != "labels")
        }
        return function(**inputs)

    def count(self, features: Callable[..., Any], batch: Batch) -> int:
        """Return the number of features of a row: of what the model's own function returns."""
        found = self.run(features, batch)
        if not isinstance(found, (Tensor, list, tuple)):
            pooled = found.get("pooler_output")
            found = found.last_hidden_state if pooled is None else pooled
        tensors = [found] if isinstance(found, Tensor) else list(found)
        return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors) // ROWS

    # ------------------------------------------------------------------ images

    def images(self) -> Iterator[Batch]:
        """Yield the tensors of one image a row, in the forms that the names of the forward's parameters allow."""
        names = ("vision_config", "vision_tower_config", "sam_config", "vq_config", "encoder")
        vision = next((one for name in names if (one := getattr(self.config, name, None)) is not None), self.config)
        size = _pair(getattr(vision, "image_size", None) or getattr(vision, "resolution", None) or 16)
        patch = _pair(getattr(vision, "patch_size", None) or 4)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        values = channels * patch[0] * patch[1]
        ones = partial(torch.ones, dtype=torch.long)
        grid = next((key for key in ("image_grid_thw", "grid_thws", "image_grids") if key in self.known), None)
        if "flattened_patches" in self.known:  # the row and the column of each patch, then its values
            width = getattr(vision, "patch_embed_hidden_size", values)
            places = torch.tensor([[row + 1, column + 1] for row in range(2) for column in range(2)])
            yield {
                "flattened_patches": torch.cat([places.double().expand(ROWS, -1, -1), self.normal(ROWS, 4, width)], 2)
            }
        elif "pixel_values" not in self.known:
            return
        elif grid:
            merge = _pair(getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 2)[0]
            side = 2 * merge
            more = {grid: torch.tensor([[1, side, side]] * ROWS)}
            if "image_merge_sizes" in self.known:
                more["image_merge_sizes"] = torch.tensor([merge] * ROWS)
            time = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
            patches = ROWS * side * side
            yield {"pixel_values": self.normal(patches, time * values), **more}
            yield {"pixel_values": self.normal(patches, channels, *patch), **more}
            yield {"pixel_values": self.normal(ROWS, side * side, channels, *patch), **more}
        elif "spatial_shapes" in self.known:
            more = {"spatial_shapes": torch.tensor([[4, 4]] * ROWS), "pixel_attention_mask": ones(ROWS, 16)}
            yield {"pixel_values": self.normal(ROWS, 16, values), **more}
        elif "image_position_ids" in self.known:
            places = torch.tensor([[column, row] for row in range(4) for column in range(4)]).expand(ROWS, -1, -1)
            yield {"pixel_values": self.normal(ROWS, 16, values), "image_position_ids": places.contiguous()}
        elif "aspect_ratio_ids" in self.known:
            tiles = vision.max_num_tiles
            yield {
                "pixel_values": self.normal(ROWS, 1, tiles, channels, *size),
                "aspect_ratio_ids": ones(ROWS, 1),
                "aspect_ratio_mask": torch.tensor([1, *[0] * (tiles - 1)]).expand(ROWS, 1, tiles).contiguous(),
                "cross_attention_mask": ones(ROWS, TOKENS, 1, tiles),
            }
        elif "pixel_attention_mask" in self.known:  # the images of a row in a dim of their own
            yield {"pixel_values": self.normal(ROWS, 1, channels, *size)}
        elif hasattr(self.config, "image_grid_pinpoints"):  # a small image and one part of it
            sizes = torch.tensor([list(size)] * ROWS)
            yield {"pixel_values": self.normal(ROWS, 2, channels, *size), "image_sizes": sizes}
        else:
            pixels = {"pixel_values": self.normal(ROWS, channels, *size)}
            yield pixels
            yield {**pixels, "image_sizes": torch.tensor([list(size)] * ROWS)}
            yield {"pixel_values": self.normal(ROWS, 2, channels, *size)}  # frames
            yield {**pixels, "high_res_pixel_values": self.normal(ROWS, channels, *size)}
            yield {**pixels, "target_sizes": torch.tensor([[4, 4]] * ROWS)}

    # ------------------------------------------------------------------ sound

    def sounds(self) -> Iterator[Batch]:
        """Yield the tensors of one sound a row, in the forms that the names of the forward's parameters allow."""
        names = ("audio_config", "encoder_config", "audio_encoder_config")
        inner = next((one for name in names if (one := getattr(self.config, name, None)) is not None), self.config)
        if "input_features" in self.known:
            sizes = (
                "num_mel_bins",
                "input_feat_size",
                "input_dim",
                "input_feat_per_channel",
                "feature_size",
                "input_size",
            )
            bands = next((value for name in sizes if isinstance(value := getattr(inner, name, None), int)), 16)
            frames = 2 * (getattr(inner, "max_source_positions", None) or 12)
            masks = [
                key for key in ("input_features_mask", "feature_attention_mask", "padding_mask") if key in self.known
            ]
            mask = {key: torch.ones(ROWS, frames, dtype=torch.long) for key in masks}
            for shape in ((bands, frames), (frames, bands)):
                features = {"input_features": self.normal(ROWS, *shape)}
                yield features
                if stacked := getattr(inner, "num_stacked_frames", None):
                    yield {"input_features": self.normal(ROWS, frames, bands * stacked), **mask}
                if mask:
                    yield {**features, **mask}
        elif "input_values" in self.known and "input_ids" not in self.known:
            yield {"input_values": self.normal(ROWS, 1600)}


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
