"""A small pre-norm Transformer with the norm as its spine, and everything to train and run it."""
