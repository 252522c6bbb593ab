"""pass@k without bias, from n samples of a problem of which c are right (arXiv 2107.03374, equation 1)."""

import math


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k samples, drawn from the n without putting back, is right.

    pass@k = 1 - C(n-c, k) / C(n, k)
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must lie in 0..{num_samples}, the number of samples; got {num_correct}.")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must lie in 1..{num_samples}, the number of samples; got {k}. Take more samples.")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
