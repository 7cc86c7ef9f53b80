"""What every way of training shares: batches, the flat model, merges, optimizers, and the records of a round."""
