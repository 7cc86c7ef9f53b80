"""Trains a small model of transformers as a plain Horovod script does, and compares its weights with those of another run.

    pip install transformers
    mpirun -np 2 python benchmarks/library_models.py --model gpt2 --out plain.pt
    hvd-adaptive run -np 2 --shares 1,2 benchmarks/library_models.py --model gpt2 --compare plain.pt

In float64, but for what a model computes in float32 by itself. Models are made from configurations: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WORDS, BLOCK = 100, 16
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


class Text(Dataset[dict[str, Any]]):
    """Sequences in which a word mostly follows from the one before; ``padded``: of any length up to a block.

    Labels are a class ("bert"), every third word or so ("bert-mlm"), or the words.
    """

    def __init__(self, num_rows: int, *, padded: bool, model: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = []
        for _ in range(num_rows):
            words = [int(torch.randint(WORDS, (), generator=generator))]
            length = int(torch.randint(4, BLOCK + 1, (), generator=generator)) if padded else BLOCK
            for noise in torch.randint(3, (length - 1,), generator=generator).tolist():
                words.append((7 * words[-1] + noise) % WORDS)
            masked = [word if (word + place) % 3 == 0 else -100 for place, word in enumerate(words)]
            labels = {"bert": words[0] % 3, "bert-mlm": masked}.get(model, words)
            self._rows.append({"input_ids": words, "labels": labels})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[row]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads as transformers' collators do: labels with -100."""
    length = max(len(row["input_ids"]) for row in rows)
    pad = lambda words, value: words + [value] * (length - len(words))  # noqa: E731
    batch = {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
    }
    labels = [row["labels"] if isinstance(row["labels"], int) else pad(row["labels"], -100) for row in rows]
    return {**batch, "labels": torch.tensor(labels)}


def make_model(name: str) -> Any:
    if name == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=64, **no_dropout)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SMALL))
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=WORDS, dropout_rate=0.0, **sizes))
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=3, **SMALL, **no_dropout)
    return transformers.BertForMaskedLM(config) if name == "bert-mlm" else transformers.BertForSequenceClassification(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama", "bert", "bert-mlm", "t5"], required=True)
    parser.add_argument("--padded", action="store_true", help="sequences of unequal lengths")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the weights")
    parser.add_argument("--compare", type=Path, help="the weights of another run")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    data = Text(301, padded=options.padded, model=options.model)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler, collate_fn=collate)
    model = make_model(options.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 5, len(loader) * options.epochs)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model.train()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if hvd.rank() == 0:
        if options.out is not None:
            torch.save(weights, options.out)
        if options.compare is not None:
            other = torch.load(options.compare)
            difference = (weights - other).norm() / other.norm()
            print(f"{options.model}: relative difference of the weights {difference:.1e}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
