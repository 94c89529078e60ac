"""Training and measuring one module of the user's own, as itself: batches, losses, seeds,
epochs."""
