"""Response models of the operator routes, for the OpenAPI document and tests; the routes build their JSON directly."""

from typing import Literal

from space_router.api.openai.answers import Answer, Count

StepCostSource = Literal["file", "measured", "learned"]


class Ready(Answer):
    """New work is taken."""

    status: Literal["ready"]


class Alive(Answer):
    """The process answers."""

    status: Literal["alive"]


class Started(Answer):
    """The model has been ready once."""

    status: Literal["started"]


class Version(Answer):
    """Of the package."""

    version: str


class Load(Answer):
    """How busy the engine is now."""

    num_queued: Count
    num_running: Count
    blocks_free: Count
    blocks_held: Count
    blocks_cached: Count
    num_workers_up: Count
    draining: bool


class RestartProgress(Answer):
    """Of the rolling restart that was asked for last."""

    state: Literal["none", "running", "done", "failed"]
    num_done: Count
    num_wanted: Count
    error: str | None


class WorkerState(Answer):
    """One worker, as the router knows it."""

    number: Count
    name: str
    state: Literal["up", "leaving", "away"]
    address: str | None
    incarnation: str | None
    num_incarnations: Count
    num_running: Count
    num_cached_blocks: Count
    num_available_blocks: Count
    trouble: str | None


class Workers(Answer):
    """Every worker, and how far a rolling restart is."""

    workers: list[WorkerState]
    restart: RestartProgress


class Cancelled(Answer):
    """A request that was ended by its id."""

    id: str
    object: Literal["request"]
    cancelled: Literal[True]


class SpeculationInfo(Answer):
    """Who drafts, and how much."""

    default: str
    max_draft_length: Count | None
    num_masks: Count | None
    draft_head: bool | None


class StepCostsInfo(Answer):
    """Where the worker's estimates of how long steps take came from when it started.

    `file`: kept by an earlier start; `measured`: at this start; `learned`: while serving, because of `reason`.
    """

    source: StepCostSource
    reason: str | None


class Info(Answer):
    """Model, limits and speculation, with TGI's names where TGI has them; what only a worker knows may be null."""

    model_id: str
    model_sha: str | None
    model_dtype: str | None
    model_device_type: str | None
    model_pipeline_tag: Literal["text-generation"]
    max_concurrent_requests: Count
    max_best_of: Count
    max_stop_sequences: Count
    max_input_tokens: Count | None
    max_total_tokens: Count | None
    max_batch_total_tokens: Count | None
    validation_workers: Count
    max_client_batch_size: Count
    router: Literal["spaceserve"]
    version: str
    sha: None
    docker_label: None
    vocab_size: Count | None
    attention: str | None
    block_size: Count | None
    num_blocks: Count | None
    speculation: SpeculationInfo
    step_costs: StepCostsInfo | None
    synthetic_acceptance: list[float] | None
    model_fallback: str | None
    adapters: list[str]
    eos_token_ids: list[int] | None
    turn_end_token_ids: list[int]
    chat_template: bool
    ready: bool
