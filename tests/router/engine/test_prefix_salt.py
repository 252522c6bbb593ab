"""What keeps prefixes of requests apart: the client's salt, and the LoRA that its keys and values depend on."""

from dataclasses import replace

from space_router.engine.request.request import SamplingOptions, ServedLora, ValidRequest

LORA = ServedLora("sql", "a" * 64, "/copies/a", "/loras/sql")
PLAIN = ValidRequest("r", (1, 2), SamplingOptions(seed=0))


def test_a_salt_cannot_be_written_that_is_a_loras() -> None:
    salts = ["", "own", "lora ", f"lora {LORA.digest}\0", f"lora {LORA.digest}\0own", "lora none\0", "lora none long\0"]
    plain = [replace(PLAIN, cache_salt=salt).prefix_salt(is_long=False) for salt in salts]
    tuned = [replace(PLAIN, cache_salt=salt, lora=LORA).prefix_salt(is_long=False) for salt in salts]
    long = [replace(PLAIN, cache_salt=salt).prefix_salt(is_long=True) for salt in salts]
    both = [replace(PLAIN, cache_salt=salt, lora=LORA).prefix_salt(is_long=True) for salt in salts]
    assert len({*plain, *tuned, *long, *both}) == 4 * len(salts)
    assert plain[:2] == salts[:2]


def test_the_content_counts_and_not_the_name() -> None:
    renamed = replace(LORA, name="other", folder="/copies/b")
    changed = replace(LORA, digest="b" * 64)
    with_lora, same, other = (replace(PLAIN, lora=lora).prefix_salt(is_long=False) for lora in (LORA, renamed, changed))
    assert with_lora == same != other
