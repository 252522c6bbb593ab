"""Flags, variables and defaults become one config, or an error that says which text was wrong; what a key may do."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from space_router import cli
from space_router.api_keys import ApiKey, KeyLimits, RateLimits, plain_keys
from space_router.config import ServeConfig, build, settings, unknown_variables
from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.errors import ConfigError, RateLimited
from space_router.metrics import Metrics
from space_router.text.model_text import with_default_model


def test_a_flag_wins_over_its_variable_and_that_over_the_default() -> None:
    environment = {"SPACESERVE_PORT": "9000", "SPACESERVE_HOST": "::1", "SPACESERVE_DTYPE": ""}
    config = build({"port": "9001"}, environment)
    assert (config.port, config.host, config.dtype) == (9001, "::1", "auto")
    assert build({}, {}) == ServeConfig()


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ({}, {"SPACESERVE_PORT": "70000"}, "SPACESERVE_PORT='70000': must be a whole number from 0 to 65535"),
        ({"port": "-1"}, {}, "--port='-1'"),
        ({"dtype": "int3"}, {}, "must be one of auto, float32, bfloat16, float16"),
        ({"speculation": "17"}, {}, "a number of drafts from 0 to 16"),
        ({"kv_memory": "1.5"}, {}, "a fraction of free memory"),
        ({"kv_memory": "much"}, {}, "a size such as 1GiB"),
        ({"block_size": "17"}, {}, "8, 16, 32"),
        ({"drain_timeout": "nan"}, {}, "seconds"),
        ({"space_mask_ids": "1,x"}, {}, "token ids separated by commas"),
        ({"space_mask_ids": "1,2", "space_num_masks": "3"}, {}, "one shared id, or one per mask"),
        ({"api_key_file": "/nonexistent"}, {}, "cannot be read"),
        ({"worker_address": ","}, {}, "separated by commas"),
        ({"max_body": "0"}, {}, "must be a size"),
        ({"host": " "}, {}, "must not be empty"),
        ({"worker_timeout": "1"}, {}, "2 or more"),
        ({"max_model_len": "1"}, {}, "of at least 2"),
        ({"adapter": "code"}, {}, "--adapter='code': must be NAME=FOLDER"),
        ({}, {"SPACESERVE_ADAPTER": "a b=c"}, "with a name of letters, digits"),
        ({"adapter": "a=b,a=c"}, {}, "two adapters the same name"),
        ({"adapter": "smollm2=b"}, {}, "the model itself is called so"),
        ({"worker_address": "w:1", "dtype": "auto"}, {}, "--dtype does nothing with --worker-address"),
        ({"workers": "some"}, {}, "must be a whole number from 1 to 64, or auto"),
    ],
)
def test_an_unusable_text_is_named_with_what_is_allowed(
    flags: dict[str, str | None], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(flags, environment)
    assert words in str(caught.value)


GPUS = ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(
    ("flags", "workers", "gpus"),
    [
        ({}, 1, ()),
        ({"workers": "auto"}, 5, GPUS),
        ({"workers": "auto", "tensor_parallel": "2"}, 2, GPUS),
        ({"workers": "auto", "tensor_parallel": "4"}, 1, ()),
        ({"workers": "2"}, 2, GPUS),
        ({"workers": "auto", "device": "cpu"}, 1, ()),
        ({"workers": "3", "device": "cpu"}, 3, ()),
        ({"workers": "2", "device": "cuda:1"}, 2, ()),  # both on that one, as asked
    ],
)
def test_workers_are_as_many_as_there_are_gpus_for_and_share_them(
    flags: dict[str, str], workers: int, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("space_router.config.visible_gpus", lambda environment: GPUS)
    config = build(flags, {})
    assert (config.workers, config.gpus) == (workers, gpus)


def test_workers_that_there_are_no_gpus_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space_router.config.visible_gpus", lambda environment: GPUS)
    with pytest.raises(ConfigError, match=r"--workers 3 --tensor-parallel 2: 3 .* need 6; .* leaves 5\."):
        build({"workers": "3", "tensor_parallel": "2"}, {})


def test_auto_is_one_worker_where_there_is_no_gpu() -> None:
    assert build({"workers": "auto"}, {"CUDA_VISIBLE_DEVICES": ""}).workers == 1


def test_keys_come_from_the_file_and_the_variable_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nalpha\n\nbeta\n")
    config = build({"api_key_file": str(file)}, {"SPACESERVE_API_KEYS": "gamma,alpha"})
    assert config.api_keys == plain_keys("gamma", "alpha", "beta")
    assert "alpha" not in repr(config) + repr(config.api_keys)
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="holds no key"):
        build({"api_key_file": str(file)}, {})


def test_texts_become_values_in_units() -> None:
    config = build({"max_body": "2KiB", "space_mask_ids": "4, 5", "worker_timeout": "2.5", "speculation": "3"}, {})
    assert (config.max_body, config.space_mask_ids, config.worker_timeout) == (2048, (4, 5), 2.5)
    assert build({"worker_address": "a:1,b:2"}, {}).worker_address == ("a:1", "b:2")
    assert (config.max_draft_length, build({"speculation": "off"}, {}).max_draft_length) == (3, 0)
    assert build({}, {}).max_draft_length is None


def test_adapters_come_from_one_flag_several_times_or_from_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServeConfig] = []
    monkeypatch.setattr(cli, "_serve", lambda config: found.append(config) or 0)
    assert cli.main(["serve", "--adapter", "code=/a=b", "--adapter", "team/prose=c"]) == 0
    assert found[0].adapter == (("code", "/a=b"), ("team/prose", "c"))
    assert build({}, {"SPACESERVE_ADAPTER": "code=/a=b, team/prose=c"}).adapter == found[0].adapter


def test_names_origins_and_workers_of_a_repeated_flag_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServeConfig] = []
    monkeypatch.setattr(cli, "_serve", lambda config: found.append(config) or 0)
    flags = {
        "--worker-address": ("a:1", "b:2"),
        "--served-model-name": ("one", "two"),
        "--cors-origins": ("http://a", "http://b"),
    }
    words = [word for name, values in flags.items() for value in values for word in (name, value)]
    assert cli.main(["router", "--model", "m", *words]) == 0
    assert cli.main(["serve", "--model", "m", "--space-mask-ids", "5", "--space-mask-ids", "7"]) == 0
    config, own = found
    assert own.space_mask_ids == (5, 7)
    assert (config.worker_address, config.served_model_name, config.cors_origins) == tuple(flags.values())


def test_a_training_runs_model_is_named_after_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    assert build({"model": f"{tmp_path}/mine/model/"}, {}).model_name == "mine"
    monkeypatch.chdir(tmp_path / "mine")
    assert build({"model": "model"}, {}).model_name == "mine"


def test_the_model_is_called_by_the_last_part_of_its_path() -> None:
    assert build({"model": "/data/models/llama/"}, {}).model_name == "llama"
    assert build({"model": "org/llama", "served_model_name": "mine"}, {}).model_name == "mine"
    several = build({"model": "org/llama", "served_model_name": "mine, yours,*"}, {})
    assert (several.model_names, several.takes_any_name) == (("mine", "yours"), True)
    assert build({"model": "org/llama", "served_model_name": "*"}, {}).model_names == ("llama",)
    assert build({"model": "org/model"}, {}).model_name == "model"
    assert build({"model": "demo"}, {}).model_name == "spaceserve-demo"
    assert build({}, {}).model_name == "smollm2"


def test_a_model_is_named_by_flag_or_variable() -> None:
    assert not build({}, {}).model_is_named
    assert build({"model": "smollm2"}, {}).model_is_named
    assert build({}, {"SPACESERVE_MODEL": "smollm2"}).model_is_named


def test_a_default_model_that_cannot_be_had_gives_way_to_demo_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"offline": "on", "download_folder": str(tmp_path)}
    config = with_default_model(build(flags, {}))
    assert (config.model, config.model_name) == ("demo", "spaceserve-demo")
    (line,) = caplog.messages
    assert line == config.model_fallback
    assert line.startswith("demo is served in place of smollm2: ")
    with pytest.raises(ConfigError, match="--model='smollm2': The weights of smollm2 are not in"):
        with_default_model(build({**flags, "model": "smollm2"}, {}))
    named = build({"model": "demo"}, {})
    assert with_default_model(named) is named


def test_help_teaches_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for name in settings():
        assert f"--{name.replace('_', '-')} " in text
        assert f"SPACESERVE_{name.upper()}" in text.replace("\n      ", " ")
    assert "examples:" in text


def test_a_router_alone_has_no_flags_of_workers_and_shares_their_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["router", "--help"])
    text = capsys.readouterr().out
    for name, (_, known) in settings().items():
        assert (f"--{name.replace('_', '-')} " in text) is not known.own_workers
    assert build({"worker_address": "w:1"}, {"SPACESERVE_DEVICE": "cpu"}).worker_address == ("w:1",)


def test_wrong_settings_end_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "x"]) == 2
    assert capsys.readouterr().err == "spaceserve: --port='x': must be a whole number from 0 to 65535.\n"
    assert cli.main(["router"]) == 2
    assert "--worker-address is needed" in capsys.readouterr().err
    assert cli.main(["serve", "--model", "/no/such/folder"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_only_rooms_that_are_there_are_offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "PROGRAMS", {"dance": cli.Program("space_dance", "x"), "text": cli.Program("this", "y")})
    with pytest.raises(SystemExit):
        cli.main(["dance"])
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_another_rooms_program_takes_its_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []

    def become(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        assert environment["PYTHONSAFEPATH"] == "1"
        became.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", become)
    monkeypatch.setattr(cli, "PROGRAMS", {"worker": cli.Program("space_router", "a room that is there")})
    with pytest.raises(SystemExit):
        cli.main(["worker", "--listen", "x", "--help"])
    assert became == [[sys.executable, "-P", "-m", "space_router", "--listen", "x", "--help"]]


def test_importing_the_whole_router_leaves_torch_unloaded() -> None:
    code = "import sys, space_router.cli, space_router.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_key_of_the_file_may_have_a_name_and_limits_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha name=team-a requests-per-minute=60 concurrency=4\nbeta tokens-per-minute=1000\ngamma\n")
    first, second, third = build({"api_key_file": str(file)}, {}).api_keys
    assert (first.name, first.limits) == ("team-a", KeyLimits(requests_per_minute=60, concurrency=4))
    assert second.limits == KeyLimits(tokens_per_minute=1000)
    assert len(second.name) == 16, "a key without a name is known by its digest"
    assert third.limits == KeyLimits()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("secret nonsense", "line 2: behind a key go name=NAME"),
        ("secret speed=4", "line 2: behind a key go name=NAME"),
        ("secret name=a/b name=c", "line 2: name is given twice"),
        ("secret name=a,b", "a name has 1 to 64 letters"),
        ("secret concurrency=0", "concurrency must be a whole number from 1"),
        ("secret requests-per-minute=many", "requests-per-minute must be a whole number"),
        ("secret name=first", "two keys are named 'first'"),
        ("secret expires=soon", "expires is a date such as"),
        ("sha256:secret", "go the 64 hex digits"),
    ],
)
def test_a_line_of_the_key_file_that_is_not_understood_is_named_and_its_key_is_not(
    tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"other name=first\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        build({"api_key_file": str(file)}, {})
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rate_limits(clock: Clock, *keys: ApiKey, metrics: Metrics | None = None, **limits: int) -> RateLimits:
    return RateLimits(keys, KeyLimits(**limits), metrics or Metrics(), clock)


def asks(of: RateLimits, name: str) -> float | None:
    """One short request: None, or the seconds after which to come again."""
    try:
        with of[name].request():
            return None
    except RateLimited as error:
        return float(error.headers["Retry-After"])


def test_a_minutes_requests_may_come_at_once_and_the_next_when_it_is_told() -> None:
    clock = Clock()
    key = rate_limits(clock, ApiKey.of("s", "team", KeyLimits(requests_per_minute=6)))
    assert [asks(key, "team") for _ in range(6)] == [None] * 6
    wait = asks(key, "team")
    assert wait == 10
    clock.now += wait
    assert [asks(key, "team"), asks(key, "team")] == [None, 10]


def test_an_hour_of_silence_saves_up_no_more_than_a_minutes_worth() -> None:
    clock = Clock()
    key = rate_limits(clock, requests_per_minute=3)
    clock.now = 3600.0
    assert [asks(key, "") for _ in range(4)] == [None, None, None, 20]


def test_tokens_are_charged_as_they_come_and_a_debt_is_paid_off_first() -> None:
    clock = Clock()
    key = rate_limits(clock, tokens_per_minute=60)
    assert asks(key, "") is None
    key[""].charge(50, 100, 100)
    assert asks(key, "") == 91, "90 tokens of debt and one to begin with, at one a second"
    clock.now = 91.0
    assert asks(key, "") is None


def test_forced_drafts_take_of_the_tokens_and_are_counted_as_none() -> None:
    metrics, clock = Metrics(), Clock()
    key = rate_limits(clock, metrics=metrics, tokens_per_minute=60)
    request = ValidRequest("r", (1,), SamplingOptions(seed=1), num_forced_drafts=2)
    key[""].charge(0, 20, request.charge(20, 10))
    assert request.charge(20, 10) == 90
    assert ValidRequest("r", (1,), SamplingOptions(seed=1)).charge(20, 10) == 20
    assert asks(key, "") == 31, "90 - 60 tokens of debt and one to begin with"
    assert metrics.value("spaceserve_key_tokens_total", key="none", kind="generated") == 20


def test_only_so_many_requests_at_once_and_a_place_is_free_again_when_one_ends() -> None:
    key = rate_limits(Clock(), concurrency=2)
    with ExitStack() as open_requests:
        for _ in range(2):
            open_requests.enter_context(key[""].request())
        assert asks(key, "") == 1
    assert asks(key, "") is None


def test_a_keys_own_limits_win_over_those_of_all_and_one_keys_use_is_not_anothers() -> None:
    few = ApiKey.of("a", "few", KeyLimits(requests_per_minute=1))
    usual = ApiKey.of("b", "usual")
    keys = rate_limits(Clock(), few, usual, requests_per_minute=3)
    assert [asks(keys, "few"), asks(keys, "few")] == [None, 60]
    assert [asks(keys, "usual") for _ in range(3)] == [None] * 3
    assert asks(keys, "usual") == 20


def test_every_series_of_a_key_is_there_before_its_first_request_and_counts_by_its_name() -> None:
    metrics = Metrics()
    keys = rate_limits(Clock(), ApiKey.of("secret", "team"), metrics=metrics, requests_per_minute=1)
    assert metrics.value("spaceserve_key_requests_total", key="team") == 0
    assert metrics.value("spaceserve_key_rejected_total", key="team", limit="requests") == 0
    assert asks(keys, "team") is None
    assert asks(keys, "team") is not None
    keys["team"].charge(3, 4, 4)
    assert metrics.value("spaceserve_key_requests_total", key="team") == 1
    assert metrics.value("spaceserve_key_rejected_total", key="team", limit="requests") == 1
    assert metrics.value("spaceserve_key_tokens_total", key="team", kind="prompt") == 3
    assert metrics.value("spaceserve_key_tokens_total", key="team", kind="generated") == 4
    assert b"secret" not in metrics.render()


@pytest.mark.parametrize("bound", [{"requests_per_minute": 1}, {"concurrency": 1}, {"tokens_per_minute": 1}])
def test_a_refusal_names_the_bound_and_takes_nothing(bound: dict[str, int]) -> None:
    clock = Clock()
    key = rate_limits(clock, **bound)
    with key[""].request():
        key[""].charge(1, 0, 0)
        with pytest.raises(RateLimited, match=r"are allowed 1 .*Try again in"), key[""].request():
            pytest.fail("it was let in")
    clock.now = 61.0
    assert asks(key, "") is None


def test_a_variable_that_nothing_reads_is_named_with_the_nearest_one() -> None:
    environment = {
        "SPACESERVE_MAX_QUEU": "5",
        "SPACESERVE_ENTIRELY_ELSE": "1",
        "SPACESERVE_MAX_QUEUE": "5",
        "SPACESERVE_API_KEYS": "secret",
        "SPACESERVE_SERVICE_HOST": "10.0.0.1",
        "SPACESERVE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "PATH": "/bin",
    }
    wrong, right = list(unknown_variables(environment))[::-1]
    assert wrong == "SPACESERVE_MAX_QUEU is set, and nothing reads it; is SPACESERVE_MAX_QUEUE meant?"
    assert right == "SPACESERVE_ENTIRELY_ELSE is set, and nothing reads it"


def test_sizes_are_taken_in_terabytes_too() -> None:
    assert build({"kv_memory": "10TiB"}, {}).kv_memory == "10TiB"
    assert build({"max_body": "0.5TB"}, {}).max_body == 500_000_000_000
