"""How ranks work together: local steps and merges, shares of one global batch, or plain Horovod for comparison."""
