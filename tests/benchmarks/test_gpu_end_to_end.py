"""Options of the story on GPUs that contradict each other."""

from __future__ import annotations

import pytest

from benchmarks.gpu_end_to_end import _parse, _plan


@pytest.mark.parametrize(("other", "said"), [(["--cpu"], "without --cpu"), (["--gpus", "1"], "without --gpus 1")])
def test_sharing_a_gpu_leaves_nothing_to_choose(
    other: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parse(["--share", *other])
    assert said in capsys.readouterr().err


def test_two_workers_share_one_gpu_and_none_shares_a_cpu() -> None:
    shared, on_cpus = _plan(_parse(["--share"]), None), _plan(_parse(["--cpu", "--gpus", "1"]), None)
    assert shared.sizes == (2, 1) and [shared.gpus(workers) for workers in shared.sizes] == [1, 1]
    assert on_cpus.sizes[0] == 1 and on_cpus.gpus(1) == 0
