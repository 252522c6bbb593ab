"""The command line of the worker."""

import pytest
from space_server.config import parse


def test_defaults() -> None:
    config = parse(["--listen", "unix:/tmp/w"])
    assert (config.model, config.speculation, config.max_draft_length) == ("smollm2", "auto", None)
    assert (config.block_size, config.max_sequences, config.kv_memory, config.log_level) == (16, 64, None, "INFO")


def test_only_a_model_that_was_not_named_may_give_way_and_ranks_must_agree() -> None:
    assert not parse(["--listen", "h:1"]).model_is_named
    assert parse(["--listen", "h:1", "--model", "smollm2"]).model_is_named
    assert parse(["--listen", "h:1", "--tensor-parallel", "2"]).model_is_named


def test_every_flag_is_parsed_into_its_unit() -> None:
    words = "--listen h:1 --kv-memory 2MiB --speculation 3 --space-mask-ids 7,8 --space-num-masks 2 --num-blocks 9"
    config = parse([*words.split(), "--parent-pid", "12", "--log-level", "warning", "--max-model-len", "64"])
    assert (config.kv_memory, config.speculation, config.max_draft_length) == (2 * 1024**2, 3, 3)
    assert (config.space_mask_ids, config.space_num_masks, config.num_blocks) == ((7, 8), 2, 9)
    assert (config.parent_pid, config.log_level, config.max_model_len) == (12, "WARNING", 64)
    assert parse(["--listen", "h:1", "--speculation", "off"]).max_draft_length == 0
    assert parse(["--listen", "h:1", "--kv-memory", "auto"]).kv_memory is None
    adapters = parse(["--listen", "h:1", "--adapter", "code=/a=b", "--adapter", "prose=c"]).adapter
    assert adapters == (("code", "/a=b"), ("prose", "c"))


@pytest.mark.parametrize(
    "words",
    [
        "--listen unix:/w",
        "--listen h:1 --kv-memory 0.5 --prefill-budget off --speculation off --tracing off --space-mask-ids 7,8",
        "--listen h:1 --kv-memory 2MiB --prefill-budget 0.2 --speculation 3 --exact on --offline on --log-level debug",
        "--listen h:1 --model demo --cores 0 --synthetic-acceptance .78 --adapter a=/x=y --adapter b=/z",
        "--listen h:1 --revision r --token-file /t --download-folder /d --num-blocks 3 --block-size 4 --steps eager",
        "--listen h:1 --model demo --tensor-parallel 2 --rank-timeout 3 --powercap /p --lookup only --cores auto",
    ],
)
def test_settings_that_are_written_as_a_command_line_are_parsed_to_the_same(words: str) -> None:
    settings = parse(words.split())
    assert parse(settings.to_argv()) == settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--listen"),
        (["--listen", "h:1", "--num-blocks", "0"], "must be an integer of at least 1; got '0'"),
        (["--listen", "h:1", "--block-size", "24"], "must be a power of two up to 256; got '24'"),
        (["--listen", "h:1", "--block-size", "0"], "must be a power of two up to 256; got '0'"),
        (["--listen", "h:1", "--speculation", "fast"], "must be auto, off, or a number of drafts; got 'fast'"),
        (["--listen", "h:1", "--kv-memory", "much"], "'much' is no amount of memory"),
        (["--listen", "h:1", "--space-mask-ids", "7,x"], "must be ids separated by commas"),
        (["--listen", "h:1", "--adapter", "code"], "must be NAME=FOLDER; got 'code'"),
        (["--listen", "h:1", "--adapter", "a=b", "--adapter", "a=c"], "there are two adapters named a"),
    ],
)
def test_what_makes_no_sense_exits_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
