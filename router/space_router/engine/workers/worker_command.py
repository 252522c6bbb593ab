"""The command line of a worker process."""

from __future__ import annotations

import os

from space_common.python_process import module_command

from space_router.config import ServeConfig
from space_router.placement import for_workers, processors


def worker_command(config: ServeConfig, address: str, *, module: str = "space_server") -> list[str]:
    """Return the argument list of `python -m MODULE` with this router's settings, listening on `address`."""
    flags: dict[str, object] = {
        "--model": config.model,
        "--listen": address,
        "--parent-pid": os.getpid(),  # the worker ends when its router is gone
        "--dtype": config.dtype,
        "--weights": config.weights,
        "--kv-dtype": config.kv_dtype,
        "--device": config.device,
        "--attention": config.attention,
        "--cpu-kernels": config.cpu_kernels,
        "--exact": config.exact,
        "--block-size": config.block_size,
        "--max-sequences": config.max_sequences,
        "--speculation": config.speculation,
        "--lookup": config.lookup,
        "--steps": config.steps,
        "--prefill-budget": config.prefill_budget,
        "--calibration-seconds": config.calibration_seconds,
        "--tracing": config.tracing,
        "--log-level": config.log_level,
        "--log-format": config.log_format,
        "--offline": config.offline,
    }
    if config.revision is not None:
        flags["--revision"] = config.revision
    if config.token_file is not None:
        flags["--token-file"] = config.token_file
    if config.download_folder is not None:
        flags["--download-folder"] = config.download_folder
    if config.kv_memory != "auto":
        flags["--kv-memory"] = config.kv_memory
    if config.num_blocks is not None:
        flags["--num-blocks"] = config.num_blocks
    if config.max_model_len is not None:
        flags["--max-model-len"] = config.max_model_len
    if config.space_mask_ids:
        flags["--space-mask-ids"] = ",".join(map(str, config.space_mask_ids))
    if config.space_num_masks is not None:
        flags["--space-num-masks"] = config.space_num_masks
    if config.synthetic_acceptance is not None:
        flags["--synthetic-acceptance"] = config.synthetic_acceptance
    if config.tensor_parallel > 1:
        flags["--tensor-parallel"] = config.tensor_parallel
    if config.powercap is not None:
        flags["--powercap"] = config.powercap
    if config.num_threads is not None:
        flags["--num-threads"] = config.num_threads
    if config.workers > 1:
        flags["--num-workers"] = config.workers
    if (cores := for_workers(config.placement, processors())) is not None:
        flags["--cores"] = cores
    words = [str(word) for flag in flags.items() for word in flag]
    adapters = [word for name, folder in config.adapter for word in ("--adapter", f"{name}={folder}")]
    return module_command(module, *words, *adapters)
