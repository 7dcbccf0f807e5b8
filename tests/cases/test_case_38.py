"""Case 38. Symptom elsewhere: a leading dim that divides by 8 but not by 16 crashes at the first step."""

from __future__ import annotations

import pytest

from tests.cases.common import Weights, plan

SHAPES = {"weight": (6, 5), "table": (6, 3)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 16, 1000])
def test_no_divisibility_is_needed(ranks: int) -> None:
    """Six rows on any number of ranks; case 1 runs them."""
    found = plan(Weights(SHAPES), [{"name": "table", "set": {"route": "sharded_adamw"}}], ranks)
    sharded, owned = sorted(found.buckets, key=lambda bucket: bucket.owner is not None)
    assert sharded.numel % ranks == 0 and sharded.numel >= 18
    assert owned.owner is not None and 0 <= owned.owner < ranks
    assert len(found.ranks) == ranks and sum(rank.matrices for rank in found.ranks) == 1
