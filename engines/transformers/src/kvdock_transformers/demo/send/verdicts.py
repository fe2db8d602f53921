"""Compare what two processes generated with what one of them would have."""

import attrs
import numpy as np

from kvdock_transformers.demo.send.records import Generated
from kvdock_transformers.demo.verdicts import Check
from kvdock_transformers.families import Family


@attrs.frozen(kw_only=True)
class SendResult:
    """What the demo showed for one model.

    Args:
        family: Which model.
        prefill: What the process did that sent the pages and then went on alone.
        decode: What the process did that took them.
        checks: Each claim, and whether it held.
        max_abs_diff: Largest difference of logits between both.
    """

    family: Family
    prefill: Generated = attrs.field(repr=False)
    decode: Generated = attrs.field(repr=False)
    checks: tuple[Check, ...]
    max_abs_diff: float

    @property
    def ok(self) -> bool:
        """Whether every claim held."""
        return all(check.holds for check in self.checks)

    @property
    def tokens_identical(self) -> bool:
        """Whether both generated the same tokens."""
        return self.prefill.token_ids == self.decode.token_ids


def judge_sending(prefill: Generated, decode: Generated) -> SendResult:
    """Compare both processes' work on one model."""
    one, other = np.load(prefill.logits_path), np.load(decode.logits_path)
    same_shape = one.shape == other.shape
    diff = float(np.abs(one - other).max()) if same_shape else float("inf")
    lacking = sorted(set(decode.pools) - set(decode.arrived))
    expected = sum(pool.nbytes for pool in decode.pools.values())
    computed = f"{decode.computed_tokens} of {decode.prompt_tokens} tokens"
    checks = [
        Check("every pool arrived whole", not lacking, ", ".join(lacking)),
        Check(
            "as many bytes arrived as the pages have",
            decode.arrived_bytes == expected,
            f"{decode.arrived_bytes} of {expected}",
        ),
        Check(
            "decode computed only what follows the last full page",
            decode.computed_tokens == decode.prompt_tokens - decode.prefix_tokens,
            computed,
        ),
        Check(
            "tokens are identical to those of one process",
            prefill.token_ids == decode.token_ids,
        ),
        Check(
            "logits are bit-identical to those of one process",
            diff == 0.0,
            f"max abs diff {diff:.3g}",
        ),
    ]
    if prefill.proposed:
        before = (prefill.accepted, prefill.proposed)
        after = (decode.accepted, decode.proposed)
        checks.append(
            Check(
                "the draft is accepted as often as in one process",
                before == after,
                f"{before[0]}/{before[1]} there, {after[0]}/{after[1]} here",
            )
        )
    return SendResult(
        family=decode.family,
        prefill=prefill,
        decode=decode,
        checks=tuple(checks),
        max_abs_diff=diff,
    )
