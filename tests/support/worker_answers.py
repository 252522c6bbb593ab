"""Answers of a model in process: several requests at once through a worker, with this or that way of drafting."""

from collections.abc import Sequence
from dataclasses import dataclass

from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_eval.acceptance.equivalence import Future, Right, ScriptedDrafts
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_router.text.model_text import ModelText
from space_server.drafts import DraftSources
from space_server.speculation.controller import FixedLayout, SpeculationController
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker

BLOCK_SIZE = 16
SLOTS = 1024  # of one sequence: prompt and answer


class IdleArithmetic(StepCost):
    """What steps cost on a device that waits for memory, whatever steps take here: `auto` then drafts."""

    def __init__(self) -> None:
        super().__init__(StepCost.typical("cuda").as_json())

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Nothing: times of this machine are not what the test is about."""


@dataclass(frozen=True)
class Drafting:
    """How drafts are made: by the model's masks and by looking up, as `auto` or k say, or by a script."""

    name: str
    k: int | None = None  # mask drafts per step, laid out in full; None: the controller chooses; 0: none
    right: Right | None = None  # how many scripted drafts are right before the first wrong one


def answers(
    model: SpaceModel, requests: Sequence[SequenceRequest], drafting: Drafting, plain: Sequence[ClientSequence] = ()
) -> list[ClientSequence]:
    """The answers, all requests at once. `plain`: what a script of drafts knows of each."""
    cost = IdleArithmetic()
    source = None if drafting.right is None else ScriptedDrafts(drafting.right, range(model.facts.vocab_size))
    controller = SpeculationController(cost) if drafting.k is None else FixedLayout.full(drafting.k)
    worker = Worker(
        model, num_blocks=len(requests) * SLOTS // BLOCK_SIZE, block_size=BLOCK_SIZE, controller=controller,
        cost=cost, draft_source=source,
        sources=DraftSources(lookup=True) if drafting.k is None and source is None else None,
    )  # fmt: skip
    client = WorkerClient(worker, automatic=True)
    records = [ClientSequence(request) for request in requests]
    for number, record in enumerate(records):
        seq_id = client.submit(record).seq_id
        if source is not None:
            assert drafting.k is not None
            source.futures[seq_id] = Future(plain[number].ids, drafting.k)
    client.run()
    return records


def request(
    prompt: Sequence[int], *, eos: Sequence[int], max_tokens: int, temperature: float, seed: int
) -> SequenceRequest:
    """One question's ids, greedy or seeded."""
    sampling = pb.Sampling(seed=seed, temperature=temperature, top_p=0.95)
    return SequenceRequest(tuple(prompt), sampling, pb.Limits(max_tokens=max_tokens, eos_ids=eos), want_logprobs=True)


def encoded(text: ModelText, prompts: Sequence[str]) -> list[list[int]]:
    """The ids of each question: rendered by the chat template, or as a text to go on with where there is none."""
    template = text.chat_template
    if template is None:
        return [text.tokenizer.encode(f"Question: {prompt}\nAnswer:") for prompt in prompts]
    rendered = [template.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [text.tokenizer.encode(one, add_special_tokens=False) for one in rendered]
