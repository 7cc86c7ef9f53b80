"""Models, losses, sessions and strategies: what runs on each rank."""
