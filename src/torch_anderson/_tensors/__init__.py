"""Parameters as flat vectors: who takes part, blocks, checkpoints, evaluations that leave no trace."""
