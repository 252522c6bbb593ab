"""What streams over gRPC is what streams over HTTP, for a client with our stubs and for one with reflection alone."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from space_proto import generate_pb2, generate_pb2_grpc

PROMPTS = ("def area(width, height):\n    return ", "import os\n", "for i in range(10):\n", "x = [1, 2, 3]\ny = ", "#")
Client = Callable[..., Iterator[Any]]


@pytest.fixture(scope="module")
def channel(live: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(live.server.grpc_address) as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return generate_pb2_grpc.GenerateStub(channel)


@pytest.fixture(scope="module")
def stubs_client(stub: Any) -> Client:
    """Asks with the messages that come with spaceserve."""
    return lambda **fields: stub.Generate(generate_pb2.GenerateRequest(**fields))


@pytest.fixture(scope="module")
def reflecting_client(channel: grpc.Channel) -> Client:
    """Asks with messages that it has learnt from the server."""
    service = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName("spaceserve.v1.Generate")
    method = service.methods_by_name["Generate"]
    request, event = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    assert event is not generate_pb2.GenerateEvent
    call = channel.unary_stream(
        f"/{service.full_name}/{method.name}",
        request_serializer=request.SerializeToString,
        response_deserializer=event.FromString,
    )
    return lambda **fields: call(request(**fields))


def random_request(number: int) -> dict[str, Any]:
    """A request to sample, as a call has its fields."""
    choices = random.Random(number)
    fields: dict[str, Any] = {"max_tokens": choices.randint(1, 24), "temperature": choices.choice([0.0, 0.7, 1.0]),
                              "seed": choices.randrange(2**64), "n": choices.choice([1, 1, 2, 3])}  # fmt: skip
    if choices.random() < 0.3:
        fields["messages"] = [
            {"role": "system", "content": "Write Python."},
            {"role": "user", "content": choices.choice(PROMPTS)},
        ]
    else:
        fields["prompt"] = choices.choice(PROMPTS)
        fields["echo"] = choices.random() < 0.3
    for chance, name, values in (
        (0.3, "top_p", (0.5, 0.95)),
        (0.3, "top_k", (5, 50)),
        (0.2, "min_p", (0.05,)),
        (0.2, "typical_p", (0.9,)),
        (0.3, "presence_penalty", (-1.0, 0.5)),
        (0.3, "frequency_penalty", (0.3, 1.5)),
        (0.3, "repetition_penalty", (0.9, 1.3)),
        (0.3, "stop", (["\n"], ["return", "1"], ["e"])),
        (0.3, "include_stop_str_in_output", (True,)),
        (0.2, "min_tokens", (1,)),
        (0.2, "ignore_eos", (True,)),
        (0.2, "logit_bias", ({50: 3.0, 60: -100.0},)),
        (0.2, "bad_words", (["self", "return"],)),
        (0.4, "prediction", ("width * height\n", "nothing of the kind")),
        (0.6, "speculation", (0, 1, 3)),
        (0.4, "logprobs", (0, 3)),
        (0.2, "prompt_logprobs", (2,)),
        (0.2, "cache_salt", ("a", "b")),
        (0.2, "structured_outputs", ({"regex": "[a-z]{2,9}( [0-9]+)?"}, {"json_object": True})),
    ):
        if choices.random() < chance:
            fields[name] = choices.choice(values)
    if fields.get("echo"):
        fields.pop("logprobs", None)  # over HTTP they would be the prompt's as well
    return fields


def twin(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same request as a route and its body."""
    body = {**fields, "stream": True, "return_token_ids": True}
    if "prediction" in body:
        body["prediction"] = {"type": "content", "content": body["prediction"]}
    if "logit_bias" in body:
        body["logit_bias"] = {str(key): value for key, value in body["logit_bias"].items()}
    if "messages" not in body:
        return "/v1/completions", body
    if "logprobs" in body:
        body["top_logprobs"], body["logprobs"] = body["logprobs"], True
    return "/v1/chat/completions", body


def joined(events: list[Any]) -> list[dict[str, Any]]:
    """The choices that the events of a call add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        one = choices.setdefault(event.index, {"text": "", "token_ids": [], "logprobs": [], "prompt": [], "ids": []})
        assert "finish_reason" not in one, "nothing comes behind the end"
        one["text"] += event.text
        one["token_ids"] += event.token_ids
        one["logprobs"] += [(known.token, known.logprob, len(known.top)) for known in event.logprobs]
        one["prompt"] += [known.logprob for known in event.prompt_logprobs]
        one["ids"] += event.prompt_token_ids
        if event.finish_reason:
            value = event.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_number[event.finish_reason]
            one["finish_reason"] = "length" if value.name == "FINISH_REASON_LENGTH" else "stop"
        if which := event.WhichOneof("stop_reason"):
            one["stop_reason"] = getattr(event, which)
    return [choices[index] for index in sorted(choices)]


def check_same(client: Client, live: Any, number: int) -> None:
    """One random request both ways."""
    fields = random_request(number)
    events = list(client(return_prompt_token_ids=True, **fields))
    reported = live.answer(*twin(fields))
    called = joined(events)
    assert len(called) == len(reported["choices"]) == fields["n"]
    for place, (mine, theirs) in enumerate(zip(called, reported["choices"], strict=True)):
        assert mine["text"] == theirs["text"]
        assert mine["token_ids"] == theirs["token_ids"]
        assert (mine["finish_reason"], mine.get("stop_reason")) == (theirs["finish_reason"], theirs["stop_reason"])
        assert mine["ids"] == list(theirs["prompt_token_ids"])
        known = known_of(theirs["logprobs"], fields.get("logprobs"))
        assert mine["logprobs"][: len(known)] == known
        if "logprobs" in fields:  # gRPC has one for each id; HTTP none for a final EOS, which has no text
            assert len(mine["logprobs"]) == len(mine["token_ids"])
            assert len(mine["logprobs"]) - len(known) <= (mine["finish_reason"] == "stop")
        if "prompt_logprobs" in fields and place == 0:
            first, *rest = theirs["prompt_logprobs"]
            assert first is None
            pairs = zip(mine["ids"][1:], rest, strict=True)
            assert mine["prompt"] == [entry[str(id_)]["logprob"] for id_, entry in pairs]
    usage, figures = events[-1].usage, events[-1].spaceserve
    assert usage.prompt_tokens == reported["usage"]["prompt_tokens"]
    assert usage.completion_tokens == reported["usage"]["completion_tokens"]
    assert usage.total_tokens == reported["usage"]["total_tokens"]
    details = reported["usage"].get("completion_tokens_details", {})
    assert usage.accepted_prediction_tokens == details.get("accepted_prediction_tokens", 0)
    assert usage.rejected_prediction_tokens == details.get("rejected_prediction_tokens", 0)
    assert figures.seed == reported["spaceserve"]["seed"] == fields["seed"]
    if fields.get("speculation") == 0 and "prediction" not in fields:
        assert figures.drafted == reported["spaceserve"]["drafted"] == 0
        assert figures.steps == reported["spaceserve"]["steps"]


def known_of(logprobs: Any, count: int | None) -> list[tuple[str, float, int]]:
    """Token, log-probability and number of alternatives, as either route of HTTP writes them."""
    if count is None:
        return []
    if "content" in logprobs:
        return [(one["token"], one["logprob"], len(one["top_logprobs"])) for one in logprobs["content"]]
    return [(token, value, count) for token, value in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]


@pytest.mark.parametrize("number", range(6))
def test_a_random_request_streams_the_same_over_grpc_and_http(
    live: Any, stubs_client: Client, reflecting_client: Client, number: int
) -> None:
    check_same((stubs_client, reflecting_client)[number % 2], live, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6, 50))
def test_every_random_request_streams_the_same_to_both_clients(
    live: Any, stubs_client: Client, reflecting_client: Client, number: int
) -> None:
    check_same(stubs_client, live, number)
    check_same(reflecting_client, live, number)


def test_the_random_requests_are_of_every_kind() -> None:
    given = [random_request(number) for number in range(50)]
    some = ("messages", "prompt", "stop", "logprobs", "prompt_logprobs", "prediction", "structured_outputs")
    for field in some:
        assert 5 <= sum(field in fields for fields in given) < 50, field
    assert {fields.get("speculation") for fields in given} == {None, 0, 1, 3}
    assert {fields["n"] for fields in given} == {1, 2, 3}


def test_a_cancelled_call_gives_its_blocks_back(live: Any, stub: Any) -> None:
    cancelled = live.wait_idle()["spaceserve_requests_total{outcome=cancelled}"]
    call = stub.Generate(generate_pb2.GenerateRequest(prompt="x = ", max_tokens=400, ignore_eos=True, n=2))
    next(call)
    assert live.metrics()["spaceserve_kv_blocks{state=held}"] > 0
    call.cancel()
    assert live.wait_idle()["spaceserve_requests_total{outcome=cancelled}"] == cancelled + 2


def test_the_deadline_of_a_call_ends_its_request(live: Any, stub: Any) -> None:
    late = live.wait_idle()["spaceserve_requests_total{outcome=deadline}"]
    request = generate_pb2.GenerateRequest(prompt="x = ", max_tokens=1000, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=0.5))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert live.wait_idle()["spaceserve_requests_total{outcome=deadline}"] in {late, late + 1}, "refused, or ended"


def test_log_probabilities_of_a_prompt_as_long_as_the_window_fit_a_client_with_grpcs_own_limits(
    live: Any, stub: Any
) -> None:
    info = stub.Info(generate_pb2.InfoRequest())
    ids = stub.Tokenize(generate_pb2.TokenizeRequest(text="return x" * 40)).ids
    prompt = (list(ids) * info.max_model_len)[: info.max_model_len - 2]
    request = generate_pb2.GenerateRequest(prompt_token_ids=prompt, prompt_logprobs=20, max_tokens=1)
    events = list(stub.Generate(request))
    known = [one for event in events for one in event.prompt_logprobs]
    assert [one.id for one in known] == prompt[1:]
    assert all(len(one.top) == 20 for one in known)
    assert max(event.ByteSize() for event in events) < 4 * 1024**2 / 2
