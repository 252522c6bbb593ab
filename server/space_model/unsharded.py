"""transformers without its own sharding over processes, for a process that shards its models itself or not at all."""

import torch.distributed

from space_model.kept_structure import keep_structure


def do_without_sharding() -> None:
    """Have transformers take torch for a build without `torch.distributed`, for as long as the process lives.

    Otherwise its models import torch's DTensor and FSDP, and these import sympy: two seconds of a worker's start. Call
    it before anything imports transformers' models. `torch.distributed.is_available` itself is left as it was.
    """
    keep_structure()
    from transformers.utils import import_utils

    really = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        import_utils.is_torch_distributed_available.cache_clear()
        import_utils.is_torch_distributed_available()  # cached from here on
    finally:
        torch.distributed.is_available = really
