"""A whole job of transformers' Trainer: a tiny model with one head, on tokens of its own.

    torchrun --nproc-per-node 2 trainer_job.py HEAD [SETTING=VALUE ...]

A SETTING is one of TrainingArguments.
"""

import ast
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor

SMALL = {"vocab_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SMALL, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16, "num_labels": 4}  # fmt: skip
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "num_labels": 4,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
      "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
HEADS = {
    "bert-sequence": ("BertForSequenceClassification", "BertConfig", BERT, "one"),
    "bert-token": ("BertForTokenClassification", "BertConfig", BERT, "each"),
    "bert-masked": ("BertForMaskedLM", "BertConfig", BERT, "tokens"),
    "bert-choice": ("BertForNextSentencePrediction", "BertConfig", BERT, "two"),
    "distilbert-sequence": ("DistilBertForSequenceClassification", "DistilBertConfig",
                            {"vocab_size": 32, "dim": 16, "n_layers": 1, "n_heads": 2,
                             "hidden_dim": 32, "dropout": 0.0, "attention_dropout": 0.0,
                             "seq_classif_dropout": 0.0, "num_labels": 4}, "one"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "tokens"),
    "gpt2-sequence": ("GPT2ForSequenceClassification", "GPT2Config", GPT2, "one"),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, "tokens"),
}  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    """64 sequences of 8 tokens, all of which count."""

    def __init__(self, labels: str) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.inputs = torch.randint(3, 32, (64, 8), generator=drawn)
        self.labels = {
            "one": torch.randint(0, 4, (64,), generator=drawn),
            "two": torch.randint(0, 2, (64,), generator=drawn),
            "each": torch.randint(0, 4, (64, 8), generator=drawn),
            "tokens": self.inputs.roll(1, 1),
        }[labels]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.labels[index]}


def main() -> None:
    """Trains."""
    head, *settings = sys.argv[1:]
    name, config, sizes, labels = HEADS[head]
    transformers.set_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    given = dict(word.split("=", 1) for word in settings)
    values = {key: ast.literal_eval(value) for key, value in given.items()}
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=6, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=2, learning_rate=0.01,
        optim="sgd", disable_tqdm=True, **values,
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(labels)).train()


if __name__ == "__main__":
    main()
