"""The server's configuration: one frozen, flat record, built once from the command line and environment.

Each field is a flag `--field-name` and an environment variable `SPACESERVE_FIELD_NAME`. Its `setting` has the help
text, with unit and reason of the default, and the parser.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from space_common.tracing import TracingUnavailable, check_tracing

from space_router.api_keys import ApiKey, read_keys
from space_router.errors import ConfigError
from space_router.settings import parse
from space_router.settings.connection_settings import ConnectionSettings
from space_router.settings.limit_settings import LimitSettings
from space_router.settings.model_settings import ModelSettings
from space_router.settings.setting import Setting, setting
from space_router.tls import TlsSettings

ENVIRONMENT_PREFIX = "SPACESERVE_"


_HTTP, _SPECULATION = "HTTP and gRPC", "speculation"
_MEMORY, _WORKERS = "memory and batching", "workers and process"


@dataclass(frozen=True)
class ServeConfig(TlsSettings, LimitSettings, ConnectionSettings, ModelSettings):
    """All settings of `spaceserve serve`."""

    host: str = setting(
        "127.0.0.1",
        _HTTP,
        "address to listen on; the default is reachable from this machine only, 0.0.0.0 from everywhere; unix:PATH is "
        "a socket that only this user may use (mode 0600), without --port",
        parse.text,
        "ADDRESS|unix:PATH",
    )
    port: int = setting(8080, _HTTP, "TCP port; 0 lets the system choose", parse.whole(0, 65535), "PORT")
    grpc_port: int | None = setting(
        None,
        _HTTP,
        "TCP port for gRPC on the same address (spaceserve.v1.Generate, health, reflection), with the same API keys; 0 "
        "lets the system choose; without it there is no gRPC",
        parse.whole(0, 65535),
        "PORT",
    )
    api_key_file: str | None = setting(
        None,
        _HTTP,
        "file with one API key per line, and behind it what holds for that key alone, such as `sk-... name=team-a "
        "requests-per-minute=60 tokens-per-minute=100000 concurrency=4`; with it (or with SPACESERVE_API_KEYS, keys "
        "separated by commas) clients must send `Authorization: Bearer KEY`. Keys are never given on the command line, "
        "where every process can read them",
        parse.text,
        "PATH",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        _HTTP,
        "web pages that may ask from a browser, as SCHEME://HOST[:PORT] separated by commas, or * for all; by default "
        "only the page that this server serves itself may",
        parse.words,
        "ORIGIN[,ORIGIN...]|*",
    )
    drain_timeout: float = setting(
        30.0,
        _HTTP,
        "seconds that running requests have to finish after SIGTERM; the default is Kubernetes' own grace period",
        parse.seconds(0),
        "SECONDS",
    )

    speculation: str = setting(
        "auto",
        _SPECULATION,
        "drafts per step: auto lays out what brings most tokens per second by the measured cost of steps, down to "
        "plain decoding where drafts do not pay; off decodes plainly; a number lays out that many "
        "drafts with all their masks, whatever it costs (with --worker-address it is a bound on what the workers do). "
        "Requests may ask for fewer. The text is the same with each",
        parse.speculation,
        "auto|off|K",
    )
    calibration_seconds: float = setting(
        3.0,
        _SPECULATION,
        "seconds of measuring what steps cost, at the first start of a model on a machine (then kept in "
        "~/.cache/spaceserve if nothing else disturbed it, and held against a plain step at each start); 0 learns it "
        "while serving",
        parse.seconds(0),
        "SECONDS",
        own_workers=True,
    )
    lookup: str = setting(
        "auto",
        _SPECULATION,
        "drafts from what followed the same tokens earlier in prompt or output, for any checkpoint: on takes them "
        "where they are worth more than the masks', off leaves drafting to masks (and a request's `prediction`), only "
        "lays out no masks; auto is on where --steps are the host's, for on a device a lookup makes steps wait. "
        "Costs a few microseconds per token. The text is the same with each",
        parse.one_of("auto", "on", "off", "only"),
        "auto|on|off|only",
        own_workers=True,
    )
    steps: str = setting(
        "auto",
        _SPECULATION,
        "where decoding requests are kept between steps: on the device, where the next step is launched before the "
        "host has read the last, as a CUDA graph (device) or kernel by kernel (eager), or on the host; auto is device "
        "on a GPU and host on a CPU. Prompts and grammars are stepped from the host, and of several adapters all but "
        "one. The text is the same with each",
        parse.one_of("auto", "device", "eager", "host"),
        "auto|device|eager|host",
        own_workers=True,
    )
    space_mask_ids: tuple[int, ...] = setting(
        (),
        _SPECULATION,
        "mask token ids of a SPACE checkpoint whose config.json does not say: one shared id, or one per position, "
        "separated by commas",
        parse.ids,
        "ID[,ID...]",
        own_workers=True,
    )
    space_num_masks: int | None = setting(
        None,
        _SPECULATION,
        "masks per group (k) that go with one shared --space-mask-ids",
        parse.whole(1, 16),
        "K",
        own_workers=True,
    )
    synthetic_acceptance: str | None = setting(
        None,
        _SPECULATION,
        "for measuring without trained masks, off by default: when a request comes again, its drafts from mask 1 to 5 "
        "come true with these chances: .78 (.84 .81 .78 .75 .72), .57 (.63 .60 .57 .54 .51), or five numbers separated "
        "by commas. The text is the same; the speed is no measurement of the checkpoint's masks, and /info says so",
        parse.chances,
        ".78|.57|P,P,P,P,P",
        own_workers=True,
    )

    kv_memory: str = setting(
        "auto",
        _MEMORY,
        "memory for keys and values: a size (1GiB), or a fraction of what is free (0.9); auto takes 0.9 of what a GPU "
        "has free, and on a CPU what 64 whole windows need, up to 1GiB and half of what is free",
        parse.memory,
        "SIZE|FRACTION|auto",
        own_workers=True,
    )
    block_size: int = setting(
        16,
        _MEMORY,
        "positions per block of keys and values; smaller blocks share more prefixes, larger ones read faster",
        parse.one_of_numbers(8, 16, 32, 64, 128, 256),
        "POSITIONS",
        own_workers=True,
    )
    num_blocks: int | None = setting(
        None,
        _MEMORY,
        "blocks of keys and values, instead of --kv-memory",
        parse.whole(1, None),
        "BLOCKS",
        own_workers=True,
    )
    max_sequences: int = setting(
        64,
        _MEMORY,
        "most sequences that one worker runs at once, others wait in the queue; more raise throughput and slow each",
        parse.whole(1, 4096),
        "SEQUENCES",
        own_workers=True,
    )
    prefill_budget: str = setting(
        "0.1",
        _MEMORY,
        "longest step, in seconds, that prompts may make while others decode: bounds the gap between their tokens "
        "while a long prompt is read; off: as many rows as --max-prefill-rows",
        parse.seconds_or_off,
        "SECONDS|off",
        own_workers=True,
    )
    max_prefill_rows: int = setting(
        512,
        _MEMORY,
        "most prompt tokens in one step, over all sequences; more prefills faster, less keeps running streams smooth",
        parse.whole(1, 65536),
        "ROWS",
    )

    workers: int = setting(
        1,
        _WORKERS,
        "worker processes to start, each with the whole model; 1 uses all cores of a CPU best",
        parse.whole(1, 64),
        "WORKERS",
        own_workers=True,
    )
    tensor_parallel: int = setting(
        1,
        _WORKERS,
        "processes, one per GPU, that share each worker's model: its heads, MLP columns and vocabulary (Llama family)",
        parse.whole(1, 64),
        "PROCESSES",
        own_workers=True,
    )
    worker_address: tuple[str, ...] = setting(
        (),
        _WORKERS,
        "addresses of running workers (unix:PATH or HOST:PORT, separated by commas) to use instead of starting any",
        parse.words,
        "ADDRESS[,ADDRESS...]",
    )
    worker_start_timeout: float = setting(
        600.0,
        _WORKERS,
        "seconds a worker may take to read its weights and listen; large models on slow disks take minutes",
        parse.seconds(1),
        "SECONDS",
        own_workers=True,
    )
    worker_timeout: float = setting(
        30.0,
        _WORKERS,
        "longest silence, in seconds, before a worker is taken for hung and started again. It speaks at least every "
        "second; the watchdog waits 5 seconds, or 20 of its slowest steps, or as long as its start took, and never "
        "longer than this",
        parse.seconds(2),
        "SECONDS",
    )
    num_threads: int | None = setting(
        None,
        _WORKERS,
        "threads of a CPU worker; default: 1 for weights below 64 MiB, where threads would wait for each other longer "
        "than they compute, else OMP_NUM_THREADS, or the physical cores that affinity and the container's CPU quota "
        "leave, less one for the router where there are 4 or more, shared among the workers. The text is the same with "
        "each",
        parse.whole(1, 1024),
        "THREADS",
        own_workers=True,
    )
    placement: str = setting(
        "auto",
        _WORKERS,
        "shared: router and workers run on any core. apart: workers keep off the last processor, which is then the "
        "router's: it never displaces a step, and steps have one core fewer. auto: apart where products take one "
        "thread, as those of weights below 64 MiB do, and there is a processor more than workers; else shared",
        parse.one_of("auto", "shared", "apart"),
        "auto|shared|apart",
        own_workers=True,
    )
    powercap: str | None = setting(
        None,
        _WORKERS,
        "folder of the processors' energy counters; default: /sys/class/powercap, which only root may read and a "
        "container does not see (docker/README.md has the cure). Without any that may be read there is no "
        "spaceserve_energy_joules_total of processors; that of a GPU needs nothing",
        parse.text,
        "FOLDER",
        own_workers=True,
    )
    tracing: str = setting(
        "off",
        _WORKERS,
        "on sends OpenTelemetry spans of requests, their wait and generation, and of the workers' part, over OTLP "
        "(http/protobuf) to where the standard OTEL_* variables say; a client's W3C `traceparent` is taken up. No span "
        "holds prompts or outputs. Needs `pip install 'spaceserve[tracing]'`; off costs nothing",
        parse.one_of("on", "off"),
        "on|off",
    )
    log_format: str = setting(
        "text",
        _WORKERS,
        "lines of the log: text to be read, json (an object per line, with the current span's ids) to be collected",
        parse.one_of("text", "json"),
        "text|json",
    )
    log_level: str = setting(
        "info",
        _WORKERS,
        "least severe messages to print; none of them contains prompts or outputs",
        parse.one_of("debug", "info", "warning", "error"),
        "debug|info|warning|error",
    )

    api_keys: tuple[ApiKey, ...] = field(default=(), repr=False)  # read by the command line, never a flag

    @property
    def max_draft_length(self) -> int | None:
        """The server's limit of drafts per step; None: the worker's own."""
        return {"auto": None, "off": 0}.get(self.speculation, _number_or_none(self.speculation))


def _number_or_none(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def settings() -> dict[str, tuple[Field[Any], Setting]]:
    """Return all fields that are flags, by field name, in order."""
    return {f.name: (f, f.metadata["setting"]) for f in fields(ServeConfig) if "setting" in f.metadata}


def build(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> ServeConfig:
    """Build a config from texts. A flag overrides its environment variable, which overrides the default.

    `flags`: field name -> text, None if not given. An empty environment variable counts as not given. Raises
    ConfigError with the flag or variable, its value and what is allowed; also for a flag (but not a variable, which may
    be meant for another process) about workers that are not started here.
    """
    values: dict[str, Any] = {}
    for name, (_, known) in settings().items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if (text := flags.get(name)) is not None:
            source = "--" + name.replace("_", "-")
        elif text := environment.get(variable):
            source = variable
        else:
            continue
        try:
            values[name] = known.parse(text)
        except ValueError as error:
            raise ConfigError(f"{source}={text!r}: {error}.") from None
    keys = read_keys(values.get("api_key_file"), environment.get(ENVIRONMENT_PREFIX + "API_KEYS", ""))
    config = ServeConfig(**values, api_keys=keys, model_is_named="model" in values)
    for name, (_, known) in settings().items():
        if config.worker_address and known.own_workers and flags.get(name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} does nothing with --worker-address: give it to `spaceserve worker` there.")
    if config.tracing == "on":
        try:
            check_tracing(environment)
        except TracingUnavailable as error:
            raise ConfigError(str(error)) from None
    config.check_tls(config.host, config.grpc_port, config.worker_address)
    if config.space_num_masks is not None and len(config.space_mask_ids) not in (0, 1, config.space_num_masks):
        raise ConfigError(
            f"--space-num-masks {config.space_num_masks} does not fit {len(config.space_mask_ids)} --space-mask-ids: "
            "give one shared id, or one per mask."
        )
    if config.model_name in dict(config.adapter):
        raise ConfigError(
            f"--adapter {config.model_name}=...: the model itself is called so. Give the adapter another name, or the "
            "model with --served-model-name."
        )
    return config
