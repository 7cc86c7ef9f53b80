"""P@k and propensity-scored P@k (PSP@k), summed over fixed blocks of rows.

Block i holds the rows [i * size, (i + 1) * size) of the test set, whichever rank computes it. Each block
gives one float64 vector (`block_scores`); the vectors added in block order give the same bits for any number
of ranks.

Shapes: b = rows of a block, L = labels, K = predicted labels of a row, nnz = stored labels of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_adaptive.xmc.rows import SparseRows

DEFAULT_KS = (1, 3, 5)
# Of propensities, in that paper: those of most XMC data sets. It has others for Wikipedia (0.5, 0.4) and Amazon (0.6, 2.6).
_A, _B = 0.55, 1.5


def top_k_labels(logits: Tensor, k: int) -> Tensor:
    """Ranks each row's k best labels: by descending score, ties to the lowest label, NaN after every number.

    Args:
        logits: (b, L), any floating dtype and device.
        k: labels a row, in [1, L].

    Returns:
        Labels int64 (b, k), on the device of logits. A row of nothing but NaN gives 0 .. k - 1.
    """
    num_labels = logits.shape[1]
    logits = logits.detach()
    # One more than asked for shows whether the choice at the boundary was arbitrary. topk puts NaN first.
    scores, labels = logits.topk(min(k + 1, num_labels), dim=1)
    ambiguous = scores[:, 0].isnan()
    if k < num_labels:
        ambiguous |= scores[:, k - 1] == scores[:, k]
    labels = labels[:, :k].contiguous()
    rows = ambiguous.nonzero().squeeze(1)
    if rows.numel():
        labels[rows] = _choose_k(logits[rows], k)
    labels = labels.sort(dim=1).values
    order = logits.gather(1, labels).neg_().sort(dim=1, stable=True).indices
    return labels.gather(1, order)


def _choose_k(logits: Tensor, k: int) -> Tensor:
    """The set of `top_k_labels`, in no particular order, for rows with ties at the boundary or NaN."""
    num_labels = logits.shape[1]
    kth = logits.masked_fill(logits.isnan(), -torch.inf).topk(k, dim=1).values[:, -1:]
    # Above the k-th score: 2; equal to it: 1; below or NaN: 0. Inside a group the lowest label wins. Where a
    # row has fewer than k numbers, its k-th score is -inf, so that group 0 holds only NaN.
    group = (logits > kth).long().mul_(2).add_(logits == kth)
    return group.mul_(num_labels).sub_(torch.arange(num_labels, device=logits.device)).topk(k, dim=1).indices


def inverse_propensity(label_counts: NDArray[np.integer], num_samples: int) -> NDArray[np.float64]:
    """Computes 1 / p_l = 1 + C (N_l + B)^-A with C = (ln N - 1) (B + 1)^A (Jain, Prabhu, Varma, KDD 2016).

    Deviation: C is not below 0, so that no propensity passes 1 for N < 3.

    Args:
        label_counts: N_l, training rows that carry each label, shape (L,), >= 0.
        num_samples: N, training rows, >= 1.

    Returns:
        Inverse propensities, float64 (L,), >= 1.
    """
    c = max(np.log(num_samples) - 1, 0) * (_B + 1) ** _A
    return 1 + c * (np.asarray(label_counts, dtype=np.float64) + _B) ** -_A


def block_scores(
    top_labels: Tensor,
    labels: SparseRows,
    inverse_propensity: NDArray[np.float64],
    ks: Sequence[int] = DEFAULT_KS,
) -> NDArray[np.float64]:
    """Computes one block's share of P@k and PSP@k.

    Args:
        top_labels: predicted labels int64 (b, K), best first, no label twice in a row; K >= max(ks).
        labels: true labels; indices int64 (nnz,) in [0, L), offsets int64 (b + 1,). A label listed twice
            counts once.
        inverse_propensity: float64 (L,).
        ks: the k of P@k, one or more, each >= 1, in the order of the result.

    Returns:
        float64 (1 + 3 n,) with n = len(ks), each summed over the block: [0] rows, unlabelled ones too;
        [1 : 1 + n] true labels among the first k, for each k; [1 + n : 1 + 2n] their inverse propensities;
        [1 + 2n : 1 + 3n] the most inverse propensity that any k predictions could reach. The sum over
        blocks, in block order, goes to `finalize_scores`.
    """
    num_rows, num_labels = len(top_labels), len(inverse_propensity)
    predicted = top_labels.cpu().numpy()
    true = labels.indices.cpu().numpy()
    rows = np.repeat(np.arange(num_rows), np.diff(labels.offsets.cpu().numpy()))
    entries = np.unique(rows * num_labels + true)
    hits = np.isin(predicted + np.arange(num_rows)[:, None] * num_labels, entries)
    gains = np.where(hits, inverse_propensity[predicted], 0.0)

    rows, true = np.divmod(entries, num_labels)
    gains_possible = inverse_propensity[true]
    best_first = np.lexsort((-gains_possible, rows))
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    gains_possible = gains_possible[best_first]
    return np.array(
        [num_rows]
        + [hits[:, :k].sum() for k in ks]
        + [gains[:, :k].sum() for k in ks]
        + [gains_possible[place < k].sum() for k in ks],
        dtype=np.float64,
    )


def finalize_scores(totals: NDArray[np.float64], ks: Sequence[int] = DEFAULT_KS) -> dict[str, float]:
    """Turns the blocks' summed scores into metrics.

    P@k divides by k times all rows, unlabelled ones too (they add 0). PSP@k divides the propensity-scored
    precision by the largest that any prediction could reach, as the XMC repository reports it; it is 0 if no
    row has a label.

    Args:
        totals: the sum of `block_scores` over all blocks, of one row or more, float64 (1 + 3 len(ks),).
        ks: as given to `block_scores`.

    Returns:
        {"p1": ..., "p3": ..., "p5": ..., "psp1": ..., "psp3": ..., "psp5": ...} for the default ks, each in
        [0, 1].
    """
    num_rows = totals[0]
    hits, gained, possible = np.asarray(totals[1:]).reshape(3, len(ks))
    metrics = {f"p{k}": float(hit / (k * num_rows)) for k, hit in zip(ks, hits, strict=True)}
    for k, gain, most in zip(ks, gained, possible, strict=True):
        metrics[f"psp{k}"] = float(gain / most) if most > 0 else 0.0
    return metrics
