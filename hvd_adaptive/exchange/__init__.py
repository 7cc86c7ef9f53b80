"""How encoded tensors meet: the sum over ranks with the same bits on every rank. Looks at no codec's type."""
