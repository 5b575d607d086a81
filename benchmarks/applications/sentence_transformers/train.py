"""Train an adapter of a sentence encoder, as the documentation of sentence-transformers does: train.py ROWS OUTPUT."""

import sys

from datasets import load_dataset
from peft import LoraConfig, TaskType
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import set_seed

set_seed(7)
rows, output = sys.argv[1:]
words = Transformer("../made/bert")
model = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())])
targets = ["query", "key", "value", "dense"]
model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=8, lora_alpha=16, target_modules=targets))
args = SentenceTransformerTrainingArguments(
    output,
    per_device_train_batch_size=int(rows),
    max_steps=6,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_steps=6,
    report_to="none",
    seed=7,
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=args,
    train_dataset=load_dataset("json", data_files="../made/pairs/train.jsonl", split="train"),
    loss=losses.CosineSimilarityLoss(model),
)
trainer.train()
model.save_pretrained(f"{output}/final")
