"""sentence-transformers' trainer, as in its documentation: questions and answers as vectors. Needs `[dev]`.

    python examples/embeddings.py
    LORA_PARALLEL=examples/fsdp2_tp.yaml torchrun --nproc-per-node 4 examples/embeddings.py --batch-size 16

The first is stock sentence-transformers in one process, the second runs on four; both take batches of 32 pairs and log
the same losses. The folder is the one that sentence-transformers itself writes: `SentenceTransformer(folder)` loads it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_base import BASE_MODEL, questions_and_answers
from transformers import set_seed


def pairs(seed: int) -> Dataset:
    """Return each question with its own answer (score 1) and with the answer to another question (score 0)."""
    texts = [text.strip().split("\nA: ") for text in questions_and_answers()]
    others = random.Random(seed).sample(texts, len(texts))
    rows = [{"question": question, "answer": answer, "score": 1.0} for question, answer in texts]
    rows += [{"question": q, "answer": wrong, "score": 0.0} for (q, _), (_, wrong) in zip(texts, others, strict=True)]
    return Dataset.from_list(rows)


def main(arguments: argparse.Namespace) -> None:
    set_seed(arguments.seed)
    words = Transformer(str(BASE_MODEL), max_seq_length=96)
    pooling = Pooling(words.get_embedding_dimension(), pooling_mode="mean")
    model = SentenceTransformer(modules=[words, pooling])
    model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="FEATURE_EXTRACTION"))
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(arguments.output),
            per_device_train_batch_size=arguments.batch_size,
            max_steps=60,
            learning_rate=1e-2,
            logging_steps=10,
            save_steps=20,
            report_to=[],
            seed=arguments.seed,
        ),
        train_dataset=pairs(arguments.seed),
        loss=CosineSimilarityLoss(model),
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    trainer.save_model(str(arguments.output / "embeddings"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/embeddings"))
    parser.add_argument("--batch-size", type=int, default=32, help="pairs of one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    main(parser.parse_args())
