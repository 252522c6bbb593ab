"""The worker by a scripted model: what it steps, what it says, and who is harmed by whom."""

import dataclasses

import pytest
from doubles.worker import ScriptedDrafts, ScriptedModel, router_of, script
from space_model.geometry.draft_layout import DraftLayout
from space_proto import worker_pb2 as pb
from space_server.drafts import DraftSources
from space_server.speculation.controller import DraftLimits, FixedLayout
from space_server.step_cost import CostOrigin
from space_server.worker import ProtocolError, fewer_drafts_warning
from space_server.worker_messages import PROTOCOL_MINOR


def test_one_step_accepts_every_length_at_once_and_all_go_on_right() -> None:
    # Prompts end at 10, 110, 210, 310; the first step drafts positions 11.., 111.., …; the second verifies them.
    ends = [10, 110, 210, 310]
    wrong = [end + 1 + accepted for accepted, end in enumerate(ends)]
    model = ScriptedModel(wrong=wrong)
    router = router_of(model, max_prefill_rows=1000)
    sequences = [router.admit([5] * end, max_tokens=12) for end in ends]
    router.step()
    report = router.step()
    assert report is not None
    assert [sequence.num_accepted for sequence in report.sequences] == [0, 1, 2, 3]
    assert [len(sequence.tokens) for sequence in report.sequences] == [1, 2, 3, 4]
    router.run()
    for seq_id, end in zip(sequences, ends, strict=True):
        assert router.sequences[seq_id].tokens == script(model, end, 12)


def test_a_step_is_one_forward_pass() -> None:
    router = router_of(ScriptedModel(wrong=range(0, 100, 3)))
    for end in (3, 40, 80):
        router.admit([5] * end, max_tokens=9)
    router.run()
    assert router.worker.num_forwards == sum(report.stepped for report in router.reports) > 0


def test_only_2k_plus_1_rows_are_sampled() -> None:
    model = ScriptedModel()
    router = router_of(model)
    router.admit([5] * 6, max_tokens=40)
    router.step()
    rows, sampled = model.num_rows, model.num_logit_rows
    router.step()
    assert (model.num_rows - rows, model.num_logit_rows - sampled) == (16, 7)


def test_everything_accepted_takes_k_plus_1_tokens_per_step() -> None:
    router = router_of(ScriptedModel())
    sequence = router.generate([5, 5], max_tokens=13)
    assert [len(report.tokens) for report in sequence.reports] == [1, 4, 4, 4]
    assert [report.decoded for report in sequence.reports] == [False, True, True, True]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_exact_and_nothing_is_drafted_past_it(max_tokens: int) -> None:
    model = ScriptedModel()
    router = router_of(model)
    sequence = router.generate([5] * 7, max_tokens=max_tokens)
    ran = sequence
    assert (ran.tokens, ran.finish) == (script(model, 7, max_tokens), pb.FINISH_LENGTH)
    assert all(len(report.tokens) == report.num_accepted + 1 for report in ran.reports)


@pytest.mark.parametrize(("max_tokens", "masks"), [(1, [0]), (2, [0, 0]), (3, [1, 0]), (5, [3, 2 + 1])])
def test_masks_that_no_later_step_could_use_are_not_laid_out(max_tokens: int, masks: list[int]) -> None:
    router = router_of(ScriptedModel())
    router.admit([5] * 7, max_tokens=max_tokens)
    router.run()
    assert [report.stats.mask_rows for report in router.reports if report.stepped] == masks


def test_the_window_is_a_limit_too() -> None:
    router = router_of(ScriptedModel(window=20))
    sequence = router.generate([5] * 7, max_tokens=99, num_pages=5)
    assert (len(sequence.ids), sequence.finish) == (20, pb.FINISH_LENGTH)


@pytest.mark.parametrize(("field", "finish"), [("eos_ids", pb.FINISH_EOS), ("stop_ids", pb.FINISH_STOP_ID)])
@pytest.mark.parametrize("at", range(7, 16))
def test_an_end_inside_the_accepted_run_cuts_it_there(at: int, field: str, finish: int) -> None:
    model = ScriptedModel(text=lambda position: 60 if position == at else 10 + position % 30)
    router = router_of(model)
    sequence = router.generate([5] * 7, max_tokens=at - 6, **{field: [60]})
    ran = sequence
    assert (ran.tokens[-1], len(ran.ids), ran.finish) == (60, at + 1, finish)
    assert ran.num_computed <= len(ran.ids) - 1
    assert sum(report.num_accepted for report in ran.reports) <= len(ran.tokens)


def test_min_tokens_hold_back_the_end_inside_a_run() -> None:
    model = ScriptedModel(text=lambda position: 60)
    router = router_of(model)
    sequence = router.generate([5] * 4, max_tokens=9, eos_ids=[60], sampling=pb.Sampling(min_tokens=5))
    tokens = sequence.tokens
    assert (len(tokens), tokens.count(60), tokens[-1]) == (6, 1, 60)


def test_prefill_is_chunked_oldest_first_and_mixed_with_decoding() -> None:
    model = ScriptedModel()
    router = router_of(model, max_prefill_rows=6)
    first = router.admit([5] * 4, max_tokens=8)
    router.step()
    second, third = router.admit([5] * 110, max_tokens=3), router.admit([5] * 211, max_tokens=3)
    report = router.step()
    assert report is not None
    assert {s.seq_id: (s.num_computed, s.decoded) for s in report.sequences} == {first: (8, True), second: (6, False)}
    assert report.stats.prefill_rows == 6
    router.run()
    for seq_id, end, count in ((first, 4, 8), (second, 110, 3), (third, 211, 3)):
        assert router.sequences[seq_id].tokens == script(model, end, count)


def test_computed_length_is_never_above_the_ids_known() -> None:
    router = router_of(ScriptedModel(wrong=range(0, 200, 4)))
    seq_id = router.admit([5] * 3, max_tokens=30)
    known = 3
    while (report := router.step()) is not None:
        for sequence in report.sequences:
            known += len(sequence.tokens)
            assert sequence.num_computed <= known - 1
            if sequence.finish:
                router.release(seq_id)


def test_a_sequence_pauses_only_without_any_slot_says_so_once_and_resumes() -> None:
    model = ScriptedModel()
    router = router_of(model)  # blocks of 4
    seq_id = router.admit([5] * 6, max_tokens=20, num_pages=2)
    tokens, pauses = [], 0
    for _ in range(5):
        report = router.step()
        for sequence in report.sequences if report is not None else ():
            tokens += sequence.tokens
            pauses += sequence.paused
    # 8 slots: prefill fills 6, the root takes the 7th with one draft in the 8th; then none is left.
    assert tokens == script(model, 6, len(tokens))
    assert (len(tokens), pauses, router.worker.has_work) == (3, 1, False)
    router.run()
    assert router.sequences[seq_id].tokens == tokens  # nothing runs until it is extended
    router.extend(seq_id)
    router.run()
    assert router.sequences[seq_id].tokens == script(model, 6, 20)


def test_with_s_free_slots_at_most_s_minus_1_drafts() -> None:
    router = router_of(ScriptedModel())
    sequence = router.generate([5] * 3, max_tokens=30, num_pages=1)
    drafted = [(report.num_computed, report.num_drafted) for report in sequence.reports if report.decoded]
    assert drafted[0] == (4, 0)  # one slot: the root alone


def test_prefill_pauses_where_pages_end_and_goes_on() -> None:
    model = ScriptedModel()
    router = router_of(model)
    sequence = router.generate([5] * 10, max_tokens=5, num_pages=1)
    assert sequence.tokens == script(model, 10, 5)
    assert [r.num_computed for r in sequence.reports if r.paused][:2] == [4, 8]


def test_release_stops_a_running_sequence_and_is_acknowledged() -> None:
    router = router_of(ScriptedModel())
    first, second = router.admit([5] * 3, max_tokens=50), router.admit([5] * 9, max_tokens=50)
    router.step()
    router.release(first)
    router.release(77)
    report = router.step()
    assert report is not None
    assert list(report.released) == [first, 77]
    assert [sequence.seq_id for sequence in report.sequences] == [second]


def test_release_of_an_ended_sequence_is_acknowledged_without_a_step() -> None:
    router = router_of(ScriptedModel())
    seq_id = router.admit([5], max_tokens=1)
    router.run()
    assert [(report.stepped, list(report.released)) for report in router.reports] == [(True, []), (False, [seq_id])]
    assert sorted(router.free) == list(range(256))


def test_extend_of_an_unknown_or_ended_sequence_is_ignored() -> None:
    router = router_of(ScriptedModel())
    seq_id = router.admit([5], max_tokens=1)
    router.step()
    router.extend(seq_id)
    router.worker.apply(pb.Command(extend=pb.Extend(seq_id=99, pages=[1])))
    assert router.step() is None


def test_more_sequences_than_the_worker_takes_are_refused_one_by_one() -> None:
    router = router_of(ScriptedModel(), max_sequences=1)
    first, second = router.admit([5]), router.admit([5])
    router.run()
    assert router.sequences[second].error == "The worker runs 1 sequences already, its most."
    assert router.sequences[first].finish == pb.FINISH_LENGTH


def test_draining_finishes_what_runs_and_admits_nothing() -> None:
    router = router_of(ScriptedModel())
    first = router.admit([5] * 3, max_tokens=9)
    router.step()
    router.worker.apply(pb.Command(drain=pb.Drain()))
    second = router.admit([5] * 50)
    assert not router.worker.drained
    router.run()
    assert router.sequences[first].finish == pb.FINISH_LENGTH
    assert router.sequences[second].finish == pb.FINISH_RETURNED
    assert router.worker.drained


def test_a_number_used_twice_and_a_foreign_protocol_end_the_conversation() -> None:
    worker = router_of(ScriptedModel()).worker
    admit = pb.Command(admit=pb.Admit(seq_id=1, ids=[5], num_prompt=1, pages=[0], limits=pb.Limits(max_tokens=1)))
    worker.apply(admit)
    with pytest.raises(ProtocolError, match="sequence number 1 twice"):
        worker.apply(admit)
    with pytest.raises(ProtocolError, match=rf"speaks protocol 2\.0, this worker 1\.{PROTOCOL_MINOR}\."):
        worker.apply(pb.Command(start=pb.Start(protocol_major=2)))
    worker.reset()
    worker.apply(admit)
    assert worker.has_work


@pytest.mark.parametrize(("worker_bound", "start_bound", "own_bound"), [(2, 9, 9), (9, 2, 9), (9, 9, 2)])
def test_the_bound_on_drafts_is_the_least_of_all(worker_bound: int, start_bound: int, own_bound: int) -> None:
    router = router_of(ScriptedModel(), k=9, max_draft_length=worker_bound)
    router.worker.apply(pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=9, max_draft_length=start_bound)))
    sequence = router.generate([5] * 3, max_tokens=30, max_draft_length=own_bound)
    assert max(report.num_drafted for report in sequence.reports) == 2


def test_speculation_off_lays_out_the_root_alone() -> None:
    router = router_of(ScriptedModel())
    sequence = router.generate([5] * 3, max_tokens=9, max_draft_length=0)
    stepped = [report.stats for report in router.reports if report.stepped]
    assert all(stats.mask_rows == 0 and stats.chain_rows == 1 for stats in stepped)
    assert len(sequence.reports) == 9
    assert stepped[-1].plain_step_seconds > 0


def test_layouts_may_differ_between_sequences_and_steps() -> None:
    model = ScriptedModel(wrong=[p for p in range(400) if p % 5 == 0 or p % 7 == 3])

    def rule(room: DraftLimits) -> DraftLayout:
        if room.seq_id == 1:
            return DraftLayout.full(room.num_drafts, 2)
        return DraftLayout(room.num_drafts, (3, 0, 2, 1)[: room.num_drafts + 1])

    router = router_of(model, controller=FixedLayout(rule))
    first, second = router.admit([5] * 7, max_tokens=30), router.admit([5] * 200, max_tokens=30)
    router.run()
    assert router.sequences[first].tokens == script(model, 7, 30)
    assert router.sequences[second].tokens == script(model, 200, 30)
    drafted = {report.num_drafted for report in router.sequences[second].reports}
    assert {1, 2, 3} <= drafted  # an earlier group stands in for one that was not laid out, with fewer drafts


def test_drafts_of_any_source_are_verified_by_the_same_rule() -> None:
    model = ScriptedModel(num_masks=0)
    whole = [5] * 6 + script(model, 6, 40)
    source = ScriptedDrafts({1: whole}, wrong=lambda position: position % 5 == 0 or position % 7 == 0)
    router = router_of(model, draft_source=source, controller=FixedLayout.full(4))
    sequence = router.generate([5] * 6, max_tokens=40)
    assert sequence.tokens == whole[6:]
    assert set(sequence.accepted) >= {0, 4}


def test_ids_that_cannot_be_chosen_are_not_drafted() -> None:
    model = ScriptedModel()
    source = ScriptedDrafts({1: [5] * 60}, wrong=lambda position: position % 2 == 0, other=lambda id_: 2)
    router = router_of(model, draft_source=source)
    sequence = router.generate([5] * 6, max_tokens=8)
    assert sequence.tokens == script(model, 6, 8)
    assert max(report.num_drafted for report in sequence.reports) <= 1


def test_logprobs_come_one_per_emitted_id() -> None:
    router = router_of(ScriptedModel())
    sequence = router.generate([5] * 3, max_tokens=6, want_logprobs=True, num_logprobs=2)
    for report in sequence.reports:
        assert [entry.id for entry in report.logprobs] == list(report.tokens)
        assert all(entry.top_ids[0] == entry.id and len(entry.top_ids) == 2 for entry in report.logprobs)
        assert all(entry.top_logprobs[0] == entry.logprob for entry in report.logprobs)


def test_prompt_logprobs_cover_the_prompt_but_its_first_id_whatever_the_chunks() -> None:
    model = ScriptedModel()
    prompt = [20 + n for n in range(9)]
    found = []
    for rows in (512, 4, 1):
        router = router_of(model, max_prefill_rows=rows)
        sequence = router.generate(prompt, max_tokens=3, num_prompt_logprobs=1)
        entries = [entry for report in sequence.reports for entry in report.prompt_logprobs]
        assert [entry.id for entry in entries] == prompt[1:]
        assert [entry.top_ids[0] for entry in entries] == script(model, 1, 8)
        found.append([(entry.id, entry.logprob) for entry in entries])
    assert found[0] == found[1] == found[2]


def test_the_report_counts_rows_and_draft_lengths() -> None:
    router = router_of(ScriptedModel())
    router.admit([5] * 6, max_tokens=30)
    report = router.step()
    assert report is not None
    assert (report.stats.chain_rows, report.stats.mask_rows, report.stats.prefill_rows) == (1, 3, 5)
    router.admit([5] * 50, max_tokens=30)
    report = router.step()
    assert report is not None
    assert (report.stats.chain_rows, report.stats.mask_rows, report.stats.prefill_rows) == (5, 15, 49)
    assert (report.stats.num_sequences, list(report.stats.draft_length_counts)) == (2, [0, 0, 0, 1])


def test_hello_says_where_the_costs_of_steps_came_from() -> None:
    worker = router_of(ScriptedModel()).worker
    hello, reason = worker.hello("life 1"), "no step was measured when the worker started"
    assert (hello.step_cost_source, hello.step_cost_reason) == ("learned", reason)
    worker.cost.origin = CostOrigin("file")
    hello = worker.hello("life 1")
    assert (hello.step_cost_source, hello.step_cost_reason) == ("file", "")


def test_hello_says_what_the_worker_is() -> None:
    hello = router_of(ScriptedModel(), max_draft_length=2).worker.hello("life 1")
    assert (hello.protocol_major, hello.incarnation, hello.vocab_size, hello.window) == (1, "life 1", 64, 1024)
    assert (hello.num_blocks, hello.block_size, hello.max_draft_length, hello.num_masks) == (256, 4, 2, 3)
    assert (list(hello.mask_ids), hello.dtype, hello.device, hello.max_sequences) == ([1, 2, 3], "float32", "cpu", 64)


@pytest.mark.parametrize(
    ("fixed", "num_masks", "with_masks", "said"),
    [
        (9, 5, True, "--speculation 9: the model has 5 masks, so a step lays out at most 5 of its drafts"),
        (2, 1, True, "--speculation 2: the model has 1 mask, so a step lays out at most 1 of its drafts"),
        (1, 0, True, "--speculation 1: nothing of the model drafts here, so drafts come from texts alone, at most 1"),
        (3, 5, False, "--speculation 3: nothing of the model drafts here, so drafts come from texts alone, at most 3"),
        (5, 5, True, None),
        (1, 5, True, None),
    ],
)
def test_a_fixed_number_of_drafts_that_a_step_cannot_lay_out_is_named(
    fixed: int, num_masks: int, with_masks: bool, said: str | None
) -> None:
    facts = dataclasses.replace(ScriptedModel().facts, num_masks=num_masks)
    warning = fewer_drafts_warning(fixed, facts, DraftSources(masks=with_masks))
    assert warning == said or (warning is not None and said is not None and warning.startswith(said))
