"""Operations, bytes and memory of a training run."""
