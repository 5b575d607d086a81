"""Train a language model in blocks of tokens, as transformers' example run_clm.py does, with PEFT."""

from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class Arguments:
    model_name_or_path: str = field()
    train_file: str = field()
    block_size: int = 64


def main():
    given, args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(given.model_name_or_path)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = load_dataset("json", data_files=given.train_file, split="train")

    def blocks(batch):
        ids = [*chain(*tokenizer(batch["text"])["input_ids"])]
        cut = [ids[at : at + given.block_size] for at in range(0, len(ids), given.block_size)]
        return {"input_ids": cut[:-1], "labels": cut[:-1]}

    with args.main_process_first(desc="tokenizing"):
        data = rows.map(blocks, batched=True, remove_columns=rows.column_names)
    collator = default_data_collator
    trainer = Trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer, data_collator=collator)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
