"""P@k and PSP@k over all ranks, equal to one process's for any number of ranks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.xmc import metrics
from hvd_adaptive.xmc.data import SparseDataset

BLOCK_SIZE = 256


class Evaluator:
    """Scores a model on test rows in blocks of a fixed size, which ranks claim from a shared cursor.

    A block's rows do not depend on the number of ranks, and neither do the sums, taken in block order.

    Args:
        dataset: the test split.
        inverse_propensity: of each label, float64, shape (num_labels,), from the training split.
        transport: the world.
    """

    def __init__(
        self, dataset: SparseDataset, inverse_propensity: NDArray[np.float64], transport: Transport
    ) -> None:
        self._dataset = dataset
        self._inverse_propensity = inverse_propensity
        self._transport = transport
        self._count = 0
        self._ks = [k for k in metrics.DEFAULT_KS if k <= dataset.num_labels]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, num_samples: int | None = None) -> dict[str, float]:
        """Returns p1, p3, p5, psp1, psp3, psp5, in [0, 1], as far as there are that many labels. COLLECTIVE.

        Args:
            model: gives logits, shape (num_rows, num_labels), for a batch of the data set.
            num_samples: score the first this many test rows; None: all.
        """
        total = min(num_samples or len(self._dataset), len(self._dataset))
        num_blocks = -(-total // BLOCK_SIZE)
        key = f"evaluate.{self._count}"
        self._count += 1
        scores = np.zeros((num_blocks, 1 + 3 * len(self._ks)))
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        while (block := self._transport.add(key, 1) - 1) < num_blocks:
            x, y = self._dataset.get_batch(np.arange(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, total)))
            top = metrics.top_k_labels(model(x.to(device)), k=max(self._ks)).cpu()
            scores[block] = metrics.block_scores(top, y, self._inverse_propensity, self._ks)
            self._transport.progress("evaluation")
        model.train(was_training)
        self._transport.rendezvous("evaluate")
        if self._transport.rank == 0:
            self._transport.forget(key)
        # Each row is zero on all ranks but one, so the sum over ranks is exact.
        self._transport.allreduce_sum_(torch.from_numpy(scores), name="evaluate")
        return metrics.finalize_scores(scores.sum(axis=0), self._ks)
