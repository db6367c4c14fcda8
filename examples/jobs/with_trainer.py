"""A script on Hugging Face's Trainer: a small language model with dropout, texts of unlike lengths.

torchrun --nproc-per-node 2 with_trainer.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Texts(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 24, (96,), generator=drawn).tolist()
        self.texts = [torch.randint(1, 41, (n,), generator=drawn) for n in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": self.texts[index]}


def pad(examples):
    width = max(len(one["input_ids"]) for one in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, one in enumerate(examples):
        size = len(one["input_ids"])
        ids[row, :size], labels[row, :size], mask[row, :size] = (
            one["input_ids"],
            one["input_ids"],
            1,
        )
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class OwnMasks(TrainerCallback):
    """Trainer gives all ranks one seed, so without this their dropout masks would be copies."""

    def on_train_begin(self, args, state, control, **kwargs):
        torch.manual_seed(args.seed + args.process_index)


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=41, n_positions=32, n_embd=24, n_layer=1, n_head=2,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=4, max_steps=10,
            gradient_accumulation_steps=2, learning_rate=1e-3, max_grad_norm=0.5,
            average_tokens_across_devices=True, save_strategy="no", report_to=[],
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Texts(), data_collator=pad, callbacks=[OwnMasks()]
        )
        trainer.train()


if __name__ == "__main__":
    main()
