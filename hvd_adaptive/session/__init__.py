"""Session, which a training loop talks to: its strategy, its checkpoints and how it goes on from them."""
