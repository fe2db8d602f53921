"""Mutants that answer for the wrong key, or for another question."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from mutants.mutant import MemoryMutant, ungated

if TYPE_CHECKING:
    from reference import Handle

MOST_BUFFERS = 400
SHORT_S = 0.05


class ShiftedAfterAHole(MemoryMutant):
    """Lines up what it found with the first keys that were asked for."""

    image_of = "W7, B1: hf3fs pages after a missing one get the next page's bytes"
    caught_by = "test_a_missing_key_does_not_shift_the_others"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.operation is not Operation.GET:
            return super().run(handle, batch)
        sizes = batch.object_bytes
        read = [
            self.get(handle, key, int(sizes[row])) for row, key in enumerate(batch.keys)
        ]
        found = [data for outcome, data in read if outcome is Outcome.OK]
        for row, data in enumerate(found):
            ungated(batch).land(row, data)
        return BatchResult.of(batch, [outcome for outcome, _ in read])


class ResultByPosition(MemoryMutant):
    """Reports failures in the order in which they came back."""

    image_of = "U1: a failing page 7 is reported as page 0"
    caught_by = "test_exists_answers_each_key_for_itself"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        return BatchResult.of(batch, np.sort(result.outcomes)[::-1])


class MinimumOfMaxima(MemoryMutant):
    """Folds existence into one number and unfolds it again."""

    image_of = "min(boundaries) in nixl, hf3fs and others: a hole counts as a hit"
    caught_by = "test_sparse_pages_allow_what_the_hit_policy_says"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        if batch.operation is not Operation.EXISTS or not result.ok.any():
            return result
        last = int(np.flatnonzero(result.ok)[-1])
        codes = np.where(np.arange(len(batch)) <= last, Outcome.OK, Outcome.ABSENT)
        return BatchResult.of(batch, codes)


class PrefixOnly(MemoryMutant):
    """Stops looking at the first page that is missing."""

    image_of = "exists as a count of leading pages, wrong for sparse states"
    caught_by = "test_exists_answers_each_key_for_itself"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        if batch.operation is not Operation.EXISTS:
            return result
        run = np.logical_and.accumulate(result.ok)
        return BatchResult.of(batch, np.where(run, Outcome.OK, Outcome.ABSENT))


class OneAnswerForAll(MemoryMutant):
    """Fails the whole batch for one key."""

    image_of = "nixl: one bool for the whole batch"
    caught_by = "test_a_key_over_the_limit_is_refused_and_alone"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        if batch.operation is Operation.EXISTS or not len(batch):
            return result
        return BatchResult.all(batch, Outcome(int(result.outcomes.max())))


class TrueForAList(MemoryMutant):
    """Answers a batch with True."""

    image_of = "B8: hf3fs batch_set returns a bool where a list is due"
    caught_by = "test_putting_again_is_harmless"
    raises = "BatchError"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.operation is Operation.PUT and all(
            self.exists(handle, key) is Outcome.OK for key in batch.keys
        ):
            return cast("BatchResult", True)
        return super().run(handle, batch)


class EmptyBatchRaises(MemoryMutant):
    """Takes an empty batch for a defect of the caller."""

    image_of = "mooncake store: empty batches are asserted away"
    caught_by = "test_an_empty_batch_has_an_empty_answer"
    raises = "IndexError"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        self.exists(handle, batch.keys[0])
        return super().run(handle, batch)


class FirstHundredAndTwentyEight(MemoryMutant):
    """Fails batches that its client library has no room for."""

    image_of = "nixl: more than 128 keys with bounce buffers all fail"
    caught_by = "test_a_batch_of_many_pages_is_answered_whole"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if len(batch) > 128 and batch.operation is not Operation.EXISTS:
            return BatchResult.all(batch, Outcome.ERROR)
        return super().run(handle, batch)


class SmallerBatchThanDeclared(MemoryMutant):
    """Declares batches of 512 keys and answers 256."""

    image_of = "a lying limit: max_batch_keys"
    caught_by = "test_a_batch_of_the_largest_size_is_taken"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        codes = result.outcomes.copy()
        codes[256:] = Outcome.REFUSED
        return attrs.evolve(result, outcomes=codes)


class DuplicatesFold(MemoryMutant):
    """Collects its answers in a dict by key."""

    image_of = "B2: the same key twice in flight is reserved once"
    caught_by = "test_a_key_twice_in_a_batch_is_answered_twice"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        last = {key: row for row, key in enumerate(batch.keys)}
        mine = [last[key] == row for row, key in enumerate(batch.keys)]
        return BatchResult.of(batch, np.where(mine, result.outcomes, Outcome.ABSENT))


class AbsentIsAnError(MemoryMutant):
    """Calls a plain miss an error."""

    image_of = "U4: a missing key makes the client's check raise and close"
    caught_by = "test_absent_is_the_word_for_what_was_never_stored"

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        outcome, data = super().get(handle, key, nbytes)
        return (Outcome.ERROR if outcome is Outcome.ABSENT else outcome), data


class StaleCompletion(MemoryMutant):
    """Takes what an abandoned call left for the next one's answer."""

    image_of = "U2: after a timeout the next batch consumes stale completions"
    caught_by = "test_a_call_after_a_timeout_gets_its_own_bytes"

    def __init__(self) -> None:
        super().__init__()
        self.late: list[bytes] = []

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.operation is not Operation.GET:
            return super().run(handle, batch)
        if batch.remaining_s() <= 0:
            sizes = batch.object_bytes
            for row, key in enumerate(batch.keys):
                self.late.append(self.get(handle, key, int(sizes[row]))[1])
            return BatchResult.all(batch, Outcome.TIMEOUT)
        result = super().run(handle, batch)
        for row in range(min(len(self.late), len(batch))):
            if len(self.late[0]) == batch.object_bytes[row]:
                ungated(batch).land(row, self.late.pop(0))
        return result


class NoDeadline(MemoryMutant):
    """Waits for as long as it takes."""

    image_of = "nixl polls for ever: no deadline on the only I/O thread"
    caught_by = "test_a_call_whose_time_is_over_ends_at_once_and_lies_about_nothing"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.remaining_s() <= 0:
            time.sleep(2.0)
        return super().run(handle, attrs.evolve(batch, deadline_s=float("inf")))


class FewerPagesThanDeclared(MemoryMutant):
    """Declares batches of 512 keys and moves the bytes of 400."""

    image_of = "a lying limit: bounce buffers for fewer keys than a lookup takes"
    caught_by = "test_a_batch_of_the_largest_size_moves_its_bytes"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.addresses.size and len(batch) > MOST_BUFFERS:
            return BatchResult.all(batch, Outcome.ERROR)
        return super().run(handle, batch)


class BytesAfterTheAnswer(MemoryMutant):
    """Says TIMEOUT in time and lets the transfer go on."""

    image_of = "a client that cannot cancel: the page is reused, then overwritten"
    caught_by = "test_no_byte_comes_after_the_answer"

    def __init__(self) -> None:
        super().__init__()
        self.late: list[threading.Timer] = []

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.operation is not Operation.GET or batch.remaining_s() > SHORT_S:
            return super().run(handle, batch)
        rest = attrs.evolve(batch, deadline_s=float("inf"))
        self.late.append(threading.Timer(SHORT_S, super().run, (handle, rest)))
        self.late[-1].start()
        return BatchResult.all(batch, Outcome.TIMEOUT)

    def close(self, handle: Handle) -> None:
        """Wait for what is late: in memory that was freed it would end the process."""
        for timer in self.late:
            timer.join()
        super().close(handle)
