"""Training a clustered model: the loop, its losses, optimizers and checkpoints."""
