"""``hvd-adaptive evaluate`` and ``predict``: a saved model on data."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hvd_adaptive.cli.option_sources import (
    build_configs,
    merge_sources,
    read_config_file,
    read_environment,
    world_config,
)
from hvd_adaptive.cli.train import open_data, use_device
from hvd_adaptive.comm.protocols import Transport, attempt
from hvd_adaptive.xmc.data import SparseDataset
from hvd_adaptive.xmc.evaluation import BLOCK_SIZE, Evaluator
from hvd_adaptive.xmc.metrics import inverse_propensity, top_k_labels
from hvd_adaptive.xmc.run_directory import load_model
from hvd_adaptive.xmc.sparse_mlp import SparseMLP
from hvd_adaptive.xmc.train_config import TrainConfig


def evaluate(options: argparse.Namespace, transport: Transport) -> None:
    """Prints P@k and PSP@k of a saved model on the test split as one JSON object. COLLECTIVE.

    Raises:
        AgreedError: on all ranks, for bad input on any.
    """
    model, (train, test) = _open(options, transport)
    propensity = inverse_propensity(train.label_counts(), num_samples=len(train))
    scores = Evaluator(test, propensity, transport).evaluate(model)
    if transport.rank == 0:
        print(json.dumps({name: round(value, 6) for name, value in scores.items()}))
    transport.close()


@torch.no_grad()
def predict(options: argparse.Namespace, transport: Transport) -> None:
    """Prints the best labels of each test row as JSON lines; rank 0 does the work.

    Raises:
        AgreedError: on all ranks, for bad input on any.
    """
    model, (_, test) = _open(options, transport)
    attempt(transport, lambda: _check_k(options.k, test.num_labels))
    if transport.rank == 0:
        for line in _predictions(model, test, options.k, transport):
            print(json.dumps(line))
        # Whether all could be written is to be known before the ranks part.
        sys.stdout.flush()
    transport.close()


def _predictions(model: SparseMLP, test: SparseDataset, k: int, transport: Transport) -> Iterator[dict[str, Any]]:
    device = next(model.parameters()).device
    names = test.label_names
    for start in range(0, len(test), BLOCK_SIZE):
        rows = range(start, min(start + BLOCK_SIZE, len(test)))
        x, _ = test.get_batch(rows)
        logits = model(x.to(device))
        labels = top_k_labels(logits, k)
        scores = torch.log_softmax(logits, dim=1).gather(1, labels).exp()
        for row, row_labels, row_scores in zip(rows, labels.tolist(), scores.tolist(), strict=True):
            line: dict[str, Any] = {"row": row, "labels": row_labels, "probabilities": [round(s, 6) for s in row_scores]}
            if names:
                line["names"] = [names[label] for label in row_labels]
            yield line
        transport.progress("prediction")


def _open(
    options: argparse.Namespace, transport: Transport
) -> tuple[SparseMLP, tuple[SparseDataset, SparseDataset]]:
    tensors, metadata, directory = attempt(transport, lambda: load_model(Path(options.model)))
    chosen = attempt(transport, lambda: choose_data(vars(options), directory))
    threads = attempt(transport, lambda: world_config(options)).compute_threads
    device = use_device(chosen.device, transport, threads=threads)
    splits = open_data(chosen.data, chosen.test_data, chosen.cache_dir, transport)
    model = attempt(
        transport,
        lambda: build_model(
            tensors, metadata, num_features=splits[0].num_features, num_labels=splits[0].num_labels
        ),
    )
    return model.to(device).eval(), splits


def choose_data(given: Mapping[str, Any], directory: Path) -> TrainConfig:
    """Returns which data to use, on which device: what the command line says, else variables, else the model's own run.

    Args:
        given: options of the command line.
        directory: the model's run directory; only its data and their cache are taken, and only if no others are named.

    Raises:
        ValueError: for a bad option, variable or file.
    """
    names = ("data", "test_data", "cache_dir", "device")
    given, variables = {name: value for name, value in given.items() if value is not None}, read_environment()
    if "data" not in variables:
        # They are not those of the model's own data.
        variables.pop("test_data", None)
    chosen = merge_sources(variables, given)
    own, file = {}, directory / "config.json"
    if "data" not in chosen:
        if not file.exists():
            remedy = "name a model in its run directory, or give --data"
            raise ValueError(f"{file}, which names the model's data, is not there: {remedy}")
        own = read_config_file(str(file), option="the run's")
    _, train = build_configs(
        {name: own[name] for name in names[:-1] if name in own}, {name: chosen[name] for name in names if name in chosen}
    )
    if "cache_dir" not in chosen and train.cache_dir and not os.access(train.cache_dir, os.W_OK | os.X_OK):
        # A folder of the job that trained, say, of another host or of another user.
        train = dataclasses.replace(train, cache_dir=None)
    return train


def build_model(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str], *, num_features: int, num_labels: int
) -> SparseMLP:
    """Returns the model that a file holds.

    Args:
        tensors: from :func:`load_model`.
        metadata: from there, too.
        num_features: of the data.
        num_labels: of the data.

    Raises:
        ValueError: if the file's parts do not fit each other or the data.
    """
    names = ("num_features", "num_labels", "hidden_size")
    if not all(metadata.get(name, "").isdecimal() for name in names):
        raise ValueError(f"the model file does not say its {', '.join(names)}: it was not saved by hvd-adaptive train")
    shape = [int(metadata[name][:20]) for name in names]
    if shape[2] < 1 or not any(shape[2] in tensor.shape for tensor in tensors.values()):
        raise ValueError(f"the model file says hidden_size {shape[2]}, which is not that of its tensors")
    if shape[:2] != [num_features, num_labels]:
        raise ValueError(
            f"the model has {shape[0]} features and {shape[1]} labels, the data {num_features} and {num_labels}: "
            "give the data it was trained on with --data"
        )
    # Files of versions before this option lack it.
    model = SparseMLP(*shape, unit_rows=metadata.get("row_norm") == "l2")
    model.load_state_dict(tensors)
    return model


def _check_k(k: int, num_labels: int) -> None:
    if not 1 <= k <= num_labels:
        raise ValueError(f"-k must be in [1, {num_labels}], the number of labels, got {k}")
